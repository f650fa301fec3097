"""Runs that were trained from one base become one model: by given weights, and by routers of a preference."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from merges import merging, tensors_of
from small_run import small_run, write_text

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig
from pipeloom.config.file import read_run_file
from pipeloom.data.text import load_data
from pipeloom.errors import UserError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.model import Transformer
from pipeloom.model.cross_entropy import summed_cross_entropy
from pipeloom.training.conversions.converted import read_run
from pipeloom.training.conversions.merge import Sources, _write
from pipeloom.training.conversions.router_training import Mixed
from pipeloom.training.conversions.routers import Routers, block_of, parse_routers, read_routers, routed_blocks
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout

LAYERS, SEQ = 3, 8


def run_of(folder, name, text, init=None):
    config = small_run(
        folder,
        model=ModelConfig(num_layers=LAYERS, hidden_size=16, num_heads=2),
        data=DataConfig(path=text, seq_len=SEQ, cache=folder / "cache"),
        layout=Layout(pp=1, loops=2, num_microbatches=2, microbatch_size=2),
        optimizer=OptimizerConfig(lr=0.01, lr_warmup_steps=1),
        training=TrainingConfig(
            steps=3, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", stall_timeout_s=20
        ),
        checkpoint=CheckpointConfig(final="checkpoint", init=init),
        output=OutputConfig(folder=folder / name),
    )
    return train(config, quiet=True).folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, and two runs from it with texts of their own."""
    folder = tmp_path_factory.mktemp("merge")
    text = write_text(folder)
    capitals = folder / "capitals.txt"
    capitals.write_text(text.read_text().upper())
    base = run_of(folder, "base", text)
    return [base, *(run_of(folder, name, each, base) for name, each in (("small", text), ("large", capitals)))]


LAYOUTS = {
    "pipeline": {"pp = 1": "pp = 2", "loops = 2": "loops = 1"},
    "tensor": {"tp = 1": "tp = 2"},
    "sharded": {"dp = 1": "dp = 2", "num_microbatches = 2": "num_microbatches = 1", 'shard = "none"': 'shard = "full"'},
}
"""Of two ranks: what differs from the base's run file."""


def preferring(runs, layout):
    """A merge with routers that were trained on two ranks."""
    base, *models = runs
    other = base.parent / layout
    shutil.copytree(base, other)
    text = (other / "config.toml").read_text()
    for old, new in LAYOUTS[layout].items():
        assert old in text
        text = text.replace(old, new)
    (other / "config.toml").write_text(text)
    folder = base.parent / f"preferred-{layout}"
    words = ["--preference", "0.7", "0.3", "--router-steps", "3", "--router-lr", "0.1"]
    assert main(merging(other, folder, *models, "--method", "pwe", *words)) == 0
    return folder


@pytest.fixture(scope="module")
def preferred(runs):
    return preferring(runs, "pipeline")


def test_weighted_differences_are_added_to_the_base_and_the_run_goes_on(runs, tmp_path, capsys):
    base, *models = runs
    out = tmp_path / "out"
    assert main(merging(base, out, *models, "--weights", "0.6", "-0.3")) == 0
    assert str(out / "checkpoints" / "step-000003") in capsys.readouterr().out
    of_base, small, large, found = map(tensors_of, (*runs, out))
    assert found.keys() == of_base.keys()
    for name, one in found.items():
        expected = of_base[name] + 0.6 * (small[name] - of_base[name]) - 0.3 * (large[name] - of_base[name])
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-15)
        assert not torch.equal(one, of_base[name])
    after = ["--output.folder", str(tmp_path / "after"), "--training.steps", "1"]
    assert main(["train", str(out / "config.toml"), *after]) == 0


def test_without_weights_models_count_alike_and_one_model_is_itself(runs, tmp_path):
    base, *models = runs
    assert main(merging(base, tmp_path / "half", *models)) == 0
    assert main(merging(base, tmp_path / "given", *models, "--weights", "0.5", "0.5")) == 0
    assert main(merging(base, tmp_path / "one", models[0])) == 0
    half, given, one, small = map(tensors_of, (*(tmp_path / name for name in ("half", "given", "one")), models[0]))
    assert all(torch.equal(half[name], given[name]) for name in half)
    assert max((one[name] - small[name]).abs().max() for name in one) < 1e-16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_routers_are_trained_on_two_ranks_as_one_process_trains_them(runs, request, layout):
    folder = request.getfixturevalue("preferred") if layout == "pipeline" else preferring(runs, layout)
    found = read_routers(find_checkpoint(folder) / "routers.json")
    blocks = routed_blocks("feed-forward", LAYERS)
    assert found.blocks == blocks
    assert found.num_parameters == LAYERS * (4 * 2**2 + 3 * 2)
    expected = trained_by_hand(runs, blocks, steps=3, lr=0.1)
    for own, other in zip(found.gates, expected.gates, strict=True):
        # Adam divides by gradients of 1e-8 and less, so that rounding of 1e-16 is seen.
        torch.testing.assert_close(own, other.detach(), rtol=0, atol=1e-7)
    untrained = Routers.first(blocks, (0.5, 0.5), 0, interpolates=True)
    assert (found.weights([0.7, 0.3]) - untrained.weights([0.7, 0.3])).abs().max() > 0.05
    for alone in ([1.0, 0.0], [0.0, 1.0]):
        assert found.weights(alone).tolist() == [alone] * LAYERS


def trained_by_hand(runs, blocks, steps, lr):
    """The same by autograd through a whole model of merged weights."""
    from pipeloom.training.conversions.router_training import _preferences

    config = read_run_file(runs[0] / "config.toml")[0]
    base, *models = map(tensors_of, runs)
    texts = [load_data(read_run_file(run / "config.toml")[0].data, 0) for run in runs[1:]]
    model = Transformer(config.model, SEQ).double()
    routers = Routers.first(blocks, (0.5, 0.5), 0, interpolates=True)
    adam = torch.optim.Adam([gate.requires_grad_() for gate in routers.gates], lr=lr)
    for step, preference in enumerate(_preferences(steps, 2, 0)):
        adam.param_groups[0]["lr"] = lr * (
            0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item()) / 2
        )
        weights = routers.weights(preference)
        mixed = {}
        for name, one in base.items():
            block = block_of(name, blocks)
            own = (0.5, 0.5) if block is None else weights[blocks.index(block)]
            mixed[name] = one + sum(weight * (each[name] - one) for weight, each in zip(own, models, strict=True))
        loss = torch.zeros((), dtype=torch.float64)
        for share, text in zip(preference, texts, strict=True):
            windows = torch.from_numpy(text.train.batch(step, 4))
            logits = torch.func.functional_call(model, mixed, (windows[:, :-1].contiguous(),))
            targets = windows[:, 1:].flatten()
            loss = loss + share * summed_cross_entropy(logits.flatten(0, 1), targets) / targets.numel()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return routers


@pytest.mark.parametrize("interpolates", [True, False])
def test_untrained_routers_return_the_preference_or_given_weights(interpolates):
    routers = Routers.first(routed_blocks("all", 2), (0.6, 0.3), 0, interpolates=interpolates)
    for preference in ([0.0, 1.0], [0.25, 0.75], [1.0, 0.0]):
        expected = torch.tensor(preference if interpolates else [0.6, 0.3], dtype=torch.float64)
        assert (routers.weights(preference) - expected).abs().max() < 0.1
    again = parse_routers(routers.text())
    assert torch.equal(again.weights([0.3, 0.7]), routers.weights([0.3, 0.7]))
    assert block_of("layers.1.attention_norm.weight", routers.blocks) == "layers.1.attention"
    assert block_of("layers.11.attention.query.weight", routed_blocks("all", 2)) is None


def test_what_is_written_are_the_weights_that_the_stages_compute_with(runs, preferred):
    routers = read_routers(find_checkpoint(preferred) / "routers.json")
    (found,) = run_workers(partial(_mixed, runs, routers.blocks, routers.by_block([0.7, 0.3])), 1)
    written = tensors_of(preferred)
    assert found.keys() == written.keys()
    assert all(torch.equal(torch.tensor(found[name], dtype=torch.float64), written[name].flatten()) for name in written)


def _mixed(runs, blocks, by_block, rendezvous, rank, size):
    """The weights of stages that are mixed by routers, as lists."""
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    config = read_run_file(runs[0] / "config.toml")[0]
    data = load_data(config.data, 0)
    config = replace(config, checkpoint=CheckpointConfig())
    pipeline = Pipeline(config, world)
    sources = [read_run(run) for run in runs]
    Mixed(config, world, pipeline, sources, tokenizer=data.tokenizer, blocks=blocks).mix(by_block)
    found = {
        name: view.flatten().tolist()
        for weights, _ in pipeline.data_parallel.segments()
        for name, view in weights.order.views(weights.whole).items()
    }
    pipeline.close()
    world.leave()
    return found


def test_another_preference_needs_no_training(runs, preferred, tmp_path, capsys):
    base, *models = runs
    two = base.parent / "pipeline"
    pwe = ("--method", "pwe", "--preference")
    assert main(merging(two, tmp_path / "again", *models, *pwe, "0.7", "0.3", "--routers", str(preferred))) == 0
    assert main(merging(two, tmp_path / "other", *models, *pwe, "0", "1", "--routers", str(preferred))) == 0
    same, again, other = map(tensors_of, (preferred, tmp_path / "again", tmp_path / "other"))
    assert all(torch.equal(same[name], again[name]) for name in same)
    changed = {name for name in same if not torch.equal(same[name], other[name])}
    assert changed == {name for name in same if ".feed_forward." in name}
    capsys.readouterr()
    words = merging(two, tmp_path / "not", *reversed(models), *pwe, "0.7", "0.3", "--routers", str(preferred))
    assert main(words) == 2
    assert "were trained for other runs" in capsys.readouterr().err
    file = find_checkpoint(preferred) / "routers.json"
    assert json.loads(file.read_text())["outside"] == [0.5, 0.5]


def test_wrong_merges_are_one_message_and_nothing_is_written(runs, tmp_path, capsys):
    base, small, large = runs
    wide = run_of_width(tmp_path, base)
    out = tmp_path / "out"
    assert main(merging(base, out, small, wide, "--weights", "1", "2", "3")) == 2
    found = capsys.readouterr().err
    assert "--weights takes a number for each of 2 models, found 3" in found
    assert f"{wide}: model.hidden_size is 16, there it is 32" in found
    assert main(merging(tmp_path / "nothing", out, small, tmp_path / "none")) == 2
    found = capsys.readouterr().err
    assert f"found nothing at {tmp_path / 'nothing'}" in found
    assert f"found nothing at {tmp_path / 'none'}" in found
    assert main(merging(small, out, large)) == 2
    assert (
        f"{large}: it was trained from {find_checkpoint(base)}, not from {find_checkpoint(small)}"
        in capsys.readouterr().err
    )
    assert main(merging(base, out, small, large, "--method", "pwe", "--preference", "0.7", "0.7")) == 2
    assert "--preference must have numbers of at least 0 that add up to 1, found 0.7 0.7" in capsys.readouterr().err
    assert main(merging(base, out, small, large, "--weights", "nan", "1")) == 2
    assert "--weights must have finite numbers, found nan 1" in capsys.readouterr().err
    words = ("--method", "pwe", "--weights", "1", "inf", "--preference", "inf", "-inf")
    assert main(merging(base, out, small, large, *words)) == 2
    found = capsys.readouterr().err
    assert "--weights must have finite numbers, found 1 inf" in found
    assert "--preference must have finite numbers, found inf -inf" in found
    assert not out.exists()


def test_outputs_of_a_model_that_are_not_finite_are_one_message(runs, tmp_path, capfd):
    base, small, _ = runs
    out = tmp_path / "out"
    assert main(merging(base, out, small, "--weights", "1e100")) == 0
    assert main(["evaluate", str(out), "--json"]) == 1
    written = capfd.readouterr()
    assert "step-000003 must be finite, found nan; its weights are" in written.err
    assert '"loss"' not in written.out
    for temperature in ("0", "1"):
        words = ["--prompt", "a", "--max-tokens", "2", "--temperature", temperature]
        assert main(["generate", str(out), *words]) == 1
        written = capfd.readouterr().err
        assert "the logits of a token must be finite, found nan; its weights are" in written
        assert "Traceback" not in written


def test_weights_that_make_parameters_infinite_are_refused(runs, tmp_path):
    base, small, _ = runs
    out = tmp_path / "out"
    sources = Sources(read_run(find_checkpoint(base)), (read_run(find_checkpoint(small)),))
    with pytest.raises(UserError, match=r"the merge makes \d+ parameters NaN or infinite, such as embedding"):
        _write(out, sources, lambda _: [1e400], {})
    assert not out.exists()


def run_of_width(folder, base):
    """A run of the base's text with another width."""
    config = replace(
        read_run_file(base / "config.toml")[0],
        model=ModelConfig(num_layers=LAYERS, hidden_size=32, num_heads=2),
        output=OutputConfig(folder=folder / "wide"),
    )
    return train(replace(config, training=replace(config.training, steps=1)), quiet=True).folder


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["merge"], "--models is missing: the runs that merge adds up"),
        (["merge", "--models", "a", "--method", "pwe"], "--preference is missing"),
        (["merge", "--models", "a", "--preference", "1"], "--preference has no effect with merge --method arithmetic"),
        (["merge", "--models", "a", "--experts", "4"], "--experts has no effect with merge --method arithmetic"),
        (["delink", "--weights", "1"], "--weights has no effect with delink; leave it out"),
        (
            ["merge", "--models", "a", "--method", "pwe", "--preference", "1", "--routers", "r", "--router-lr", "1"],
            "--router-lr has no effect with merge --method pwe --routers; leave it out",
        ),
    ],
)
def test_words_that_do_not_go_together_are_refused(words, sentence, tmp_path, capsys):
    assert main(["convert", words[0], "base", str(tmp_path / "out"), *words[1:]]) == 2
    assert sentence in capsys.readouterr().err


def test_runs_whose_weights_are_not_on_their_ranks_have_no_routers(runs, tmp_path, capsys):
    base, *models = runs
    file = base.parent / "shared" / "config.toml"
    shutil.copytree(base, file.parent)
    file.write_text(file.read_text().replace("[schedule]", '[schedule]\ndevice_budget = "1MB"'))
    words = ("--method", "pwe", "--preference", "0.5", "0.5")
    assert main(merging(file.parent, tmp_path / "out", *models, *words)) == 2
    assert "routers cannot be trained with schedule.device_budget" in capsys.readouterr().err
