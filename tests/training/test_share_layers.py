"""Layers that share their weights: one set on each rank, one update, and a copy for each layer behind ``delink``."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from any_runs import DATA
from one_process import OneProcess
from resumed import losses, train_all
from safetensors.torch import load_file
from small_run import small_run
from thinned import thinned

from pipeloom.cli import main
from pipeloom.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
)
from pipeloom.config.file import read_run_file
from pipeloom.cost.exchanges import shared_bytes
from pipeloom.cost.stages import trained_parameters
from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.model import Transformer
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.delink import delink
from pipeloom.training.conversions.export import export_weights, load_stored, stored_parameters
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout
from pipeloom.workload.model import model_of, shape_of
from pipeloom.workload.sharing import Sharing, ranks_of_owners, stages_of_owners

MODEL = ModelConfig(num_layers=6, hidden_size=16, num_heads=2, ffn_size=24, share_layers="all")
ONE = Layout(pp=1, loops=1, num_microbatches=4, microbatch_size=1)
THREE = replace(ONE, pp=3, loops=2)
RUNS = {
    "three ranks": (MODEL, THREE, {}, {}),
    "sets within and across stages": (replace(MODEL, share_layers=3), replace(ONE, pp=2, loops=2), {}, {}),
    "replicas, and a rank with several stages": (MODEL, replace(ONE, loops=3, dp=2, num_microbatches=2), {}, {}),
    "replicas of a pipeline": (
        replace(MODEL, share_layers=2),
        replace(THREE, loops=1, dp=2, num_microbatches=2),
        {},
        {},
    ),
    "a sharded stage": (MODEL, replace(ONE, dp=2, num_microbatches=2, shard="full"), {}, {}),
    "tensor ranks": (MODEL, replace(ONE, tp=2), {}, {}),
    "whole matrices": (MODEL, THREE, {"name": "muon"}, {}),
    "without state, nothing clipped": (MODEL, THREE, {"name": "lomo", "clip": "none"}, {}),
    "updated within the step": (MODEL, ONE, {"name": "adalomo", "clip": "none", "update": "stage"}, {}),
    "split backwards": (MODEL, replace(ONE, pp=2), {}, {"family": "zb-h1"}),
    "tied": (replace(MODEL, tied=True), THREE, {}, {}),
    "token slices": (MODEL, replace(ONE, pp=2, loops=1, token_slices=2), {}, {}),
    "context ranks": (MODEL, replace(ONE, pp=2, cp=2), {}, {}),
    "moved activations": (MODEL, replace(ONE, pp=2, loops=2), {}, {"balance": True}),
    "all recomputed": (MODEL, replace(THREE, recompute="full"), {}, {}),
}


def run_of(folder, model, layout, optimizer=(), schedule=(), **training):
    usual = {"steps": 3, "validation_batches": 0, "sample_tokens": 0, "predict": False, "dtype": "float64"}
    return small_run(
        folder,
        model=model,
        layout=layout,
        optimizer=OptimizerConfig(lr=0.02, lr_warmup_steps=1, **dict(optimizer)),
        schedule=ScheduleConfig(**dict(schedule)),
        training=TrainingConfig(**(usual | {"stall_timeout_s": 20} | training)),
        checkpoint=CheckpointConfig(final="checkpoint"),
        output=OutputConfig(folder=folder / "run"),
    )


@pytest.mark.parametrize("name", thinned(RUNS, 7))
def test_runs_equal_that_of_one_rank(tmp_path, name):
    model, layout, optimizer, schedule = RUNS[name]
    behind = {key: value for key, value in optimizer.items() if key != "update"}
    folders = tmp_path / "one", tmp_path / "other"
    runs = run_of(tmp_path, model, ONE, behind), run_of(tmp_path, model, layout, optimizer, schedule)
    train_all(dict(zip(folders, runs, strict=True)))
    expected, found = map(losses, folders)
    assert found == pytest.approx(expected, rel=1e-12)
    lines = [(one / "metrics.jsonl").read_text().splitlines() for one in folders]
    norms = [[json.loads(line)["grad_norm"] for line in each] for each in lines]
    assert norms[1] == pytest.approx(norms[0], rel=1e-11)
    assert len(set(expected.values())) == 3
    own, other = (load_file(export_weights(one, tmp_path / f"{one.name}-weights")[0]) for one in folders)
    assert own.keys() == other.keys()
    assert max(float((own[key] - other[key]).abs().max()) for key in own) < 1e-10
    summaries = [json.loads((one / "summary.json").read_text()) for one in folders]
    assert len({one["num_parameters"] for one in summaries}) == 1


def test_groups_are_of_consecutive_layers_and_only_those_in_several_stages_are_summed():
    sharing = Sharing(8, 2)
    assert [sharing.owner(layer) for layer in range(8)] == [0, 0, 0, 0, 4, 4, 4, 4]
    assert stages_of_owners(sharing, (3, 1, 2, 2)) == {0: (0, 1), 4: (2, 3)}
    assert ranks_of_owners(sharing, (3, 1, 2, 2), (0, 1, 0, 0)) == {0: (0, 1), 4: (0,)}
    assert ranks_of_owners(sharing, (4, 4), (0, 1)) == {}


def test_the_gradient_of_a_set_is_the_sum_of_those_of_equal_layers():
    shared = Transformer(replace(MODEL, share_layers=2).resolve(50), 8).double()
    own = Transformer(replace(MODEL, share_layers=None).resolve(50), 8).double()
    for number, (name, weight) in enumerate(shared.named_parameters()):
        torch.nn.init.normal_(weight, std=0.2, generator=torch.Generator().manual_seed(number))
        assert not name.startswith(("layers.1", "layers.2", "layers.4", "layers.5"))
    values = shared.state_dict()
    own.load_state_dict({name: values[owner_of(name)] for name in own.state_dict()})
    tokens = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(1))
    assert torch.equal(shared(tokens), own(tokens))
    for model in (shared, own):
        model(tokens).square().sum().backward()
    sums = {name: torch.zeros_like(weight) for name, weight in shared.named_parameters()}
    for name, weight in own.named_parameters():
        sums[owner_of(name)] += weight.grad
    for name, weight in shared.named_parameters():
        torch.testing.assert_close(weight.grad, sums[name], rtol=1e-11, atol=1e-11)


def owner_of(name):
    first, *rest = name.split(".")
    return name if first != "layers" else ".".join([first, str(int(rest[0]) // 3 * 3), *rest[1:]])


def train_and_compare(config, folder, rendezvous, rank, size):
    """On each rank the bits of what it has of a set, and on all the same."""
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    data = load_data(config.data, config.training.seed)
    trainer = Trainer(resolve(config, data), world, data, RunFolder(folder), quiet=True)
    trainer.run()
    (one,) = trainer._pipeline.data_parallel.shared
    moments = [trainer._optimizer.state[part.parameter] for part in one.weights.parts]
    own = [one.weights.shard, *(state[name] for state in moments for name in ("exp_avg", "exp_avg_sq"))]
    every = world.gather([tensor.numpy().tobytes() for tensor in own])
    world.leave()
    if every is not None:
        assert len(every) == size == 6
        assert all(found == every[0] for found in every)
        assert any(every[0][1])


def test_copies_keep_equal_bits(tmp_path):
    layout = replace(ONE, pp=3, dp=2, num_microbatches=2)
    config = run_of(tmp_path, MODEL, layout, {"betas": (0.7, 0.8)}, dtype="float32")
    load_data(config.data, 0)
    (tmp_path / "run").mkdir()
    run_workers(partial(train_and_compare, config, tmp_path / "run"), layout.num_ranks)


@pytest.mark.parametrize("number", ["all", 2, 3])
def test_state_and_reductions_have_the_bytes_that_are_predicted(number):
    model = replace(MODEL, share_layers=number)
    layout = Layout(pp=2, loops=2, dp=2, num_microbatches=2, microbatch_size=1)
    config = resolve(run_without_text(model, layout), DATA)
    sizes, ranks = sizes_in_training(config), OneProcess(config)
    sums = shared_bytes(sizes.run, sizes.software)
    reduced = [4 * held for held in trained_parameters(sizes.run, sizes.software)]
    own = run_without_text(replace(model, share_layers=None), layout)
    unshared = sizes_in_training(resolve(own, DATA))
    for rank, pipeline in enumerate(ranks.pipelines):
        place = config.layout.coordinates(rank).pipeline
        found = pipeline.data_parallel
        assert [one.gradient.nbytes for one in found.shared] == [size for among, size in sums if place in among]
        assert {stage: one.gradient.nbytes for stage, one in found.weights.items()} == {
            stage: reduced[stage] for stage in found.weights
        }
    # One layer is as large as another: what is reduced of the layers shrinks with their number.
    layers = 4 * (sum(trained_parameters(unshared.run, unshared.software)) - (257 * 16 * 2 + 16))
    sets = {"all": 1, 2: 2, 3: 3}[number]
    assert sum(reduced) + sum(size for _, size in sums) - 4 * (257 * 16 * 2 + 16) == layers * sets / 6


def run_without_text(model, layout):
    data, training = DataConfig(seq_len=8), TrainingConfig(dtype="float32")
    return RunConfig(data=data, training=training, model=model, layout=layout)


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    """A run of four of six steps on three ranks, which share a set of weights."""
    folder = tmp_path_factory.mktemp("shared")
    config = run_of(folder, replace(MODEL, share_layers=2), THREE, {"lr_decay_style": "constant"}, steps=4)
    train_all({folder / "run": replace(config, training=replace(config.training, steps=4))})
    return folder / "run"


def trained(run, folder):
    config, problems = read_run_file(run / "config.toml")
    assert not problems
    found = Transformer(config.model, 8).double()
    found.load_state_dict(load_file(export_weights(run, folder)[0]))
    return found


def test_a_delinked_model_computes_the_same_bits_and_its_run_goes_on(shared_run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", "delink", str(shared_run), str(out)]) == 0
    assert str(out / "checkpoints" / "step-000004") in capsys.readouterr().out
    own, old = trained(out, tmp_path / "own"), trained(shared_run, tmp_path / "old")
    assert len(own.layers) == 6 > len(old.layers) == 2
    tokens = torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(own(tokens), old(tokens))
    words = ["train", str(out / "config.toml"), "--training.steps", "6", "--output.folder", str(tmp_path / "next")]
    assert main([*words, "--layout.pp", "1", "--layout.loops", "1"]) == 0
    assert sorted(losses(tmp_path / "next")) == [5, 6]
    assert main(["convert", "delink", str(tmp_path / "next"), str(tmp_path / "again")]) == 2
    assert "share no weights (model.share_layers); delink has nothing to do" in capsys.readouterr().err


def test_moments_are_divided_by_the_layers_that_share_them(shared_run, tmp_path):
    def read(checkpoint):
        stored = stored_parameters(CheckpointReader(checkpoint), prefix="optimizer.")
        found = {name: torch.empty(shape, dtype=stored.dtypes[name]) for name, shape in stored.shapes.items()}
        load_stored(stored, found)
        return found

    before, after = read(shared_run / "checkpoints" / "step-000004"), read(delink(shared_run, tmp_path / "out"))
    for layer in range(6):
        for name, divided in {"exp_avg": 3, "exp_avg_sq": 9}.items():
            key = f"{name}.layers.{{}}.feed_forward.up.weight"
            assert torch.equal(after[key.format(layer)], before[key.format(layer // 3 * 3)] / divided)
    assert torch.equal(after["exp_avg.head.norm.weight"], before["exp_avg.head.norm.weight"])


def test_a_checkpoint_of_shared_layers_is_read_by_any_layout(shared_run, tmp_path):
    config, _ = read_run_file(shared_run / "config.toml")
    layouts = {"one": ONE, "two": replace(ONE, pp=2, loops=2), "replicas": replace(ONE, dp=2, num_microbatches=2)}
    changed = {
        tmp_path / name: replace(
            config,
            layout=layout,
            training=replace(config.training, steps=6),
            checkpoint=CheckpointConfig(final="none", resume=shared_run / "checkpoints" / "step-000004"),
        )
        for name, layout in layouts.items()
    }
    train_all(changed)
    first, *others = (losses(folder) for folder in changed)
    assert sorted(first) == [5, 6]
    assert all(found == pytest.approx(first, rel=1e-12) for found in others)


def test_a_hugging_face_folder_has_each_layer_by_itself(shared_run, tmp_path):
    export_weights(shared_run, tmp_path / "hf", format="hf")
    own, theirs = trained(shared_run, tmp_path / "own"), load_file(tmp_path / "hf" / "model.safetensors")
    for layer in range(6):
        expected = own.layers[str(layer // 3 * 3)].get_parameter("attention.query.weight")
        assert torch.equal(theirs[f"model.layers.{layer}.self_attn.q_proj.weight"], expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_hidden_layers"] == 6


REFUSED = {
    "--model.share-layers 4": "that divides model.num_layers 6 and is below it, found 4",
    "--model.share-layers 1": "from 2 on that divides model.num_layers 6 and is below it, found 1",
    "--model.share-layers 6": "and is below it, found 6",
    "--model.share-layers all --model.experts 2": "does not work with model.experts, whose loads are those of a layer",
    "--model.share-layers all --adapter.rank 2": "does not work with adapter.rank, whose pairs belong to one layer",
    "--model.share-layers all --training.freeze-layers 1": "does not work with training.freeze_layers, which freezes",
    "--model.share-layers all --layout.dp 2 --layout.shard full": "layout.shard full with several stages, whose shards",
    "--model.share-layers all --layout.tp 2": "does not work with layout.tp 2 with several stages",
    "--model.share-layers all --optimizer.clip stage": "optimizer.clip stage with several stages, which share",
    "--model.share-layers all --optimizer.update stage --optimizer.clip none": "of which each adds to the gradient",
    "--model.share-layers all --training.check-every 2": "does not work with training.check_every with several stages",
    "--model.share-layers all --training.compile": "does not work with training.compile with several stages",
    "--model.share-layers 2 --model.window 4 --model.full-attention-layers 1": "gives layers 0 to 2 one set of weights",
    "--model.share-layers 2 --layout.recompute-layers none none full none none none": "must be the same for layers 0",
    "--model.share-layers all --schedule.device-budget 1MB --layout.pp 1": "schedule.device_budget, which swaps whole",
    "--model.share-layers all --restart.layout plan --restart.times 1 --training.steps 3": "restart.layout plan, whose",
    "--model.share-layers all --machine.software nanotron": "model.share_layers needs machine.software pipeloom",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_shared_layers_do_not_work_with_is_refused(words, capsys):
    run = ["--model.num-layers", "6", "--layout.pp", "2", "--layout.loops", "2"]
    command = "train" if "training." in words else "simulate"
    assert main([command, *run, *words.split()]) == 2
    assert REFUSED[words] in " ".join(capsys.readouterr().err.split())


def test_options_of_another_conversion_are_refused(shared_run, tmp_path, capsys):
    assert main(["convert", "delink", str(shared_run), str(tmp_path / "out"), "--experts", "4"]) == 2
    assert "--experts has no effect with delink; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_plan_refuses_shared_layers_and_a_simulated_run_file_has_them(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nnum_layers = 6\nshare_layers = "all"\n[layout]\npp = 2\n')
    assert main(["plan", "--config", str(file), "--cluster", "laptop"]) == 2
    assert "model.share_layers: the search prices layers with own weights" in capsys.readouterr().err
    shape = shape_of(MODEL.resolve(257))
    assert model_of(shape, ModelConfig()).share_layers == "all"
    assert model_of(replace(shape, sharing=None), MODEL).share_layers == "all"
