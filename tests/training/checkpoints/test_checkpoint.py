"""Checkpoints over processes: written under any layout, a run goes on under any other."""

import shutil
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch._dynamo  # imported once here, not once in every process
from checkpoint_files import without_hashes
from eight_layouts import LAYOUTS, SHARED_EXPERTS
from resumed import SAVED, STEPS, config_of, last, losses, middle, train_all
from thinned import thinned
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from whole_matrices import NAME

from pipeloom.catalog import load_software
from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    INFO,
    METADATA,
    TOKENIZER,
    CheckpointInfo,
    StoredFile,
    find_checkpoint,
    read_info,
)
from pipeloom.config import (
    AdapterConfig,
)
from pipeloom.config.file import read_run_file
from pipeloom.cost.software import with_optimizer
from pipeloom.data.text import TokenWindows, load_data
from pipeloom.errors import RunError, UserError, WorkerError
from pipeloom.predict.describe import described_run
from pipeloom.predict.need import copy_bytes
from pipeloom.system.host_memory import Available
from pipeloom.training.background import Background
from pipeloom.training.checkpoints import checkpoint as checkpoint_module
from pipeloom.training.checkpoints.checkpoint import Checkpoints
from pipeloom.training.checkpoints.contents import expected_shapes
from pipeloom.training.session import load_text, resolve
from pipeloom.training.trainer import Trainer

TIED = ("one rank", "linear", "tensor, full")
NARROW = ("one rank", "full")
FROZEN = ("one rank", "full", "hybrid")
ADAPTED = ("one rank", "gradients", "loops", "tensor, full")
MATRICES = ("one rank", "full", "gradients", "hybrid")
EXPERTS = ("one rank", "gradients", "tensor, full", "hybrid", *SHARED_EXPERTS)
PLAIN = ("one rank", "loops", "full", "hybrid")
"""Of every commit, in which a run of another kind goes on from its first layout under its last one, and back."""


def circle(names, step=1):
    """Pairs of names: each layout is read by another and reads another."""
    return [(old, names[(number + step) % len(names)]) for number, old in enumerate(names)]


@pytest.fixture(scope="module")
def chains(tmp_path_factory, request):
    """By kind of run the folders of whole runs by layout, and of those that go on from their middle by pair of layouts.

    All of them in six groups of processes.
    """
    folder = tmp_path_factory.mktemp("chains")
    is_all = request.config.getoption("--all")
    plain = tuple(LAYOUTS) if is_all else PLAIN

    def some(names):
        return names if is_all else (names[0], names[-1])

    kinds = {
        "plain": (plain, circle(plain, 3), {}),
        "tied": (some(TIED), circle(some(TIED)), {"tied": True}),
        "narrow": (NARROW, list(product(NARROW, repeat=2)), {"dtype": "bfloat16"}),
        "matrices": (some(MATRICES), circle(some(MATRICES)), {"optimizer": NAME}),
        "frozen": (some(FROZEN), circle(some(FROZEN)), {"freeze_layers": 2}),
        "experts": (some(EXPERTS), circle(some(EXPERTS)), {"experts": 4}),
        "adapters": (some(ADAPTED), circle(some(ADAPTED)), {"freeze_layers": 1, "rank": 3}),
    }

    def run(kind, name, **checkpoint):
        config, changes = config_of(folder, name, **checkpoint), kinds[kind][2]
        model = replace(config.model, tied=changes.get("tied", False))
        if "experts" in changes:
            biased = {"experts": changes["experts"], "expert_every": 2, "balance": "bias", "balance_rate": 0.03}
            model = replace(model, family="llama", head_size=6, **biased)
        dtype, freeze_layers = changes.get("dtype", config.training.dtype), changes.get("freeze_layers")
        optimizer = replace(config.optimizer, name=changes.get("optimizer", "adamw"))
        training = replace(config.training, dtype=dtype, freeze_layers=freeze_layers)
        adapter = AdapterConfig(rank=changes.get("rank"))
        return replace(config, model=model, optimizer=optimizer, training=training, adapter=adapter)

    whole = {kind: {name: folder / kind / name for name in names} for kind, (names, _, _) in kinds.items()}
    train_all({path: run(kind, name, every=SAVED) for kind, one in whole.items() for name, path in one.items()})
    rest = {kind: {pair: folder / kind / " to ".join(pair) for pair in pairs} for kind, (_, pairs, _) in kinds.items()}
    jobs = {
        path: run(kind, new, resume=middle(whole[kind][old]))
        for kind, one in rest.items()
        for (old, new), path in one.items()
    }
    train_all(jobs)
    return {kind: (whole[kind], rest[kind]) for kind in kinds}


def description(run):
    """What a run's checkpoint contains about its tensors, by key."""
    return FileSystemReader(middle(run)).read_metadata().state_dict_metadata


@pytest.mark.parametrize("kind", ["plain", "tied", "matrices", "frozen", "adapters", "experts"])
def test_a_run_goes_on_under_another_layout(chains, kind):
    whole, rest = chains[kind]
    expected = losses(whole["one rank"])
    for folder in whole.values():
        assert losses(folder) == pytest.approx(expected, rel=1e-11)
    assert {old for old, _ in rest} == {new for _, new in rest} == {*whole}
    for folder in rest.values():
        assert losses(folder) == pytest.approx(last(expected), rel=1e-11)


@pytest.mark.parametrize("kind", ["plain", "tied", "frozen", "adapters", "narrow"])
def test_the_copy_of_a_checkpoint_is_predicted_for_the_rank_that_writes_most(chains, kind):
    for name, folder in chains[kind][0].items():
        config, _ = read_run_file(folder / "config.toml")
        layout, is_narrow = config.layout, kind == "narrow"
        run = described_run(config, "bf16" if is_narrow else "fp32")
        predicted = copy_bytes(config, run, with_optimizer(load_software("pipeloom"), config.optimizer.rule))
        found = written(folder)
        numbers = 4 if is_narrow else 8  # float64 is twice as wide as what is predicted
        most = [0.0] * layout.pp
        for rank in range(layout.num_ranks):
            place = layout.coordinates(rank).pipeline
            most[place] = max(most[place], found[f"__{rank}_0.distcp"] * 4 / numbers)
        assert predicted == pytest.approx(most, rel=0.1), name
        if layout.tp == 1:
            assert sum(predicted) * layout.dp == pytest.approx(sum(found.values()) * 4 / numbers), name


def written(run):
    """Bytes of tensors in each file of a checkpoint."""
    metadata, found = FileSystemReader(middle(run)).read_metadata(), Counter()
    for index, stored in metadata.storage_data.items():
        whole = metadata.state_dict_metadata[index.fqn]
        (chunk,) = [one for one in whole.chunks if one.offsets == index.offset]
        found[stored.relative_path] += prod(chunk.sizes) * whole.properties.dtype.itemsize
    return found


def test_a_tied_matrix_is_one_tensor_wherever_the_head_is(chains):
    for run in chains["tied"][0].values():
        keys = description(run)
        assert "model.embedding.tokens.weight" in keys
        assert not any("head.output" in key for key in keys)


def test_frozen_weights_have_no_state(chains):
    for run in chains["frozen"][0].values():
        keys = description(run)
        assert "model.layers.1.attention.query.weight" in keys
        assert {key.split(".")[3] for key in keys if key.startswith("optimizer.exp_avg.layers")} == {"2", "3"}


def test_biases_of_experts_are_part_of_a_checkpoint(chains):
    for run in chains["experts"][0].values():
        keys = {key: tuple(one.size) for key, one in description(run).items() if "balance_bias" in key}
        assert keys == {f"model.layers.{layer}.feed_forward.balance_bias": (4,) for layer in (1, 3)}


def test_the_state_of_whole_matrices_has_the_shape_that_the_optimizer_declares(chains):
    for run in chains["matrices"][0].values():
        found = {key: tuple(one.size) for key, one in description(run).items() if key.startswith("optimizer.")}
        assert found["optimizer.mean.layers.0.attention.query.weight"] == (10, 10)
        assert found["optimizer.rows.layers.0.attention.query.weight"] == (10,)
        assert found["optimizer.momentum.embedding.tokens.weight"][1] == 10
        assert "optimizer.momentum.layers.0.attention.query.weight" not in found


def test_narrow_weights_go_on_from_the_wide_ones(chains):
    whole, rest = chains["narrow"]
    for run in whole.values():
        assert {one.properties.dtype for one in description(run).values()} == {torch.float32}
    for (old, new), folder in rest.items():
        exact = 0 if old == new else 2e-3  # other orders of narrow sums before the checkpoint
        assert losses(folder) == pytest.approx(last(losses(whole[new])), rel=exact, abs=0)


def elements_written(checkpoint):
    """How many elements each rank wrote."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    found = Counter()
    for key, tensor in metadata.state_dict_metadata.items():
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            found[int(place.relative_path.split("_")[2])] += prod(chunk.sizes)
    return found


@pytest.mark.parametrize(
    ("name", "alike"), thinned([("hybrid", [(0, 2), (1, 3)]), ("tensor, no sharding", [(0, 2)])], 2)
)
def test_ranks_that_hold_the_same_share_the_writing_out(chains, tmp_path, name, alike):
    config = config_of(tmp_path, name)
    found = elements_written(find_checkpoint(chains["plain"][0][name]))
    for one, other in alike:
        assert found[one] == pytest.approx(found[other], abs=3 * config.layout.num_loops)  # weights and two moments
    shapes = expected_shapes(resolve(config, load_data(config.data, 0)))
    assert sum(found.values()) == sum(map(prod, shapes.values()))


def test_only_the_newest_checkpoints_are_kept_and_a_killed_runs_draft_is_in_no_ranks_way(tmp_path, monkeypatch):
    """A rank that began to write while rank 0 removes the draft would find its description, or lose the folder."""
    draft = tmp_path / "run" / FOLDER / ".step-000003.part"
    draft.mkdir(parents=True)
    (draft / METADATA).write_bytes(b"of a run that was killed")
    honest = shutil.rmtree

    def slow(path, **settings):
        if path == draft:
            time.sleep(0.3)
        honest(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", slow)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (draft.parent / "step-000000").symlink_to(elsewhere)
    for name in (METADATA, INFO):
        (elsewhere / name).touch()
    train_all({tmp_path / "run": config_of(tmp_path, "loops", every=1, keep=2, keep_every=2)})
    names = sorted(file.name for file in (tmp_path / "run" / FOLDER).iterdir())
    assert names == ["step-000000", "step-000002", "step-000003", "step-000004"]
    train_all({tmp_path / "run": config_of(tmp_path, "loops", every=1, keep=1)})
    assert [file.name for file in (tmp_path / "run" / FOLDER).iterdir()] == ["step-000004"]
    assert len(list(elsewhere.iterdir())) == 2


def test_a_checkpoint_in_the_background_has_the_weights_of_its_step(tmp_path, monkeypatch):
    """Its writing begins when the weights have changed, and its files are those of a run that waits for them."""
    honest = Checkpoints._write

    def late(self, info, held):
        if threading.current_thread() is not threading.main_thread():
            for _ in range(1000):
                if (steps := losses(self._run)) and max(steps) > info.step:
                    break
                time.sleep(0.02)
            else:
                raise AssertionError("the next step waited for the checkpoint")
        honest(self, info, held)

    waits = tmp_path / "waits"
    train_all({waits: config_of(tmp_path, "loops", every=SAVED, background=False)})
    monkeypatch.setattr(Checkpoints, "_write", late)
    train_all({tmp_path / "run": config_of(tmp_path, "loops", every=SAVED)})
    for run in (waits, tmp_path / "run"):
        assert [path.name for path in sorted((run / FOLDER).iterdir())] == ["step-000002", "step-000004"]
    for file in middle(waits).glob("*.distcp"):
        assert file.read_bytes() == (middle(tmp_path / "run") / file.name).read_bytes()


def test_training_waits_for_a_checkpoint_whose_copy_exceeds_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "available_memory", lambda: Available(1000, "free on this host"))
    honest = Background.begin

    def begin(self, work):
        assert self._name == "data", "a thread was started"
        honest(self, work)

    monkeypatch.setattr(Background, "begin", begin)
    train_all({tmp_path / "run": config_of(tmp_path, "loops", every=3)})
    assert [path.name for path in (tmp_path / "run" / FOLDER).iterdir()] == ["step-000003"]


def test_a_run_goes_on_with_another_batch_size_behind_the_text_that_was_read(chains, tmp_path, monkeypatch):
    config = config_of(tmp_path, "one rank", every=1, resume=middle(chains["plain"][0]["one rank"]))
    wider = replace(config, layout=replace(config.layout, num_microbatches=6))
    honest = TokenWindows._row

    def noted(self, number):
        with (tmp_path / "read").open("a") as notes:
            notes.write(f"{number} ")
        return honest(self, number)

    monkeypatch.setattr(TokenWindows, "_row", noted)
    train_all({tmp_path / "wider": wider})
    info = read_info(find_checkpoint(tmp_path / "wider"))
    assert (info.step, info.sequences, info.tokens) == (4, 2 * 4 + 2 * 6, (2 * 4 + 2 * 6) * 8)
    assert [int(number) for number in (tmp_path / "read").read_text().split()] == list(range(2 * 4, 2 * 4 + 2 * 6))


def test_a_checkpoint_of_another_model_is_refused_by_every_rank(saved_by_two, tmp_path):
    config = config_of(tmp_path, "full", resume=saved_by_two)
    wider = replace(config, model=replace(config.model, ffn_size=16, num_layers=5))
    with pytest.raises(UserError) as refused:
        train_all({tmp_path / "other": wider})
    words = str(refused.value)
    assert "it lacks model.layers.4.attention.key.bias" in words
    assert "model.layers.0.feed_forward.down.weight [10, 14] instead of [10, 16]" in words
    assert "Traceback" not in words


@pytest.fixture
def saved_by_two(chains):
    """A checkpoint that two ranks wrote at the end of their run."""
    return find_checkpoint(chains["plain"][0]["loops"])


def flip(file, place):
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["full", "one rank"])
def test_damage_is_refused_by_all_ranks_before_anything_is_used(saved_by_two, tmp_path, name):
    path = tmp_path / "copy"
    shutil.copytree(saved_by_two, path)
    flip(path / "__0_0.distcp", 5000)
    (path / "__1_0.distcp").unlink()
    with pytest.raises(
        UserError, match=r"the checkpoint .*copy is damaged; use another one:\n.*__1_0.distcp is missing"
    ):
        train_all({tmp_path / "other": config_of(tmp_path, name, resume=path)})
    shutil.copy(saved_by_two / "__1_0.distcp", path)
    flip(path / ".metadata", 300)
    with pytest.raises(UserError) as refused:
        train_all({tmp_path / "other": config_of(tmp_path, name, resume=path)})
    assert str(refused.value).splitlines()[1:] == [
        f"  - {path / file} was changed after it was written: its SHA-256 differs"
        for file in (".metadata", "__0_0.distcp")
    ]


def test_a_checkpoint_has_the_tokenizer_of_its_text_and_refuses_another(tmp_path):
    pytest.importorskip("tokenizers")
    config = config_of(tmp_path, "one rank", every=2)
    config = replace(config, data=replace(config.data, tokenizer="bpe", bpe_vocab_size=280))
    train_all({tmp_path / "run": config})
    first = tmp_path / "run" / FOLDER / "step-000002"
    text = (first / TOKENIZER).read_text()
    assert text == (tmp_path / "run" / TOKENIZER).read_text() == load_data(config.data, 0).tokenizer.files()[TOKENIZER]

    resumed = replace(config, checkpoint=replace(config.checkpoint, resume=first))
    (tmp_path / "text.txt").write_text("other letters: zyx wvu tsr qpo nml\n" * 900)
    with pytest.raises(UserError, match="has another tokenizer than this run, so its model reads other tokens"):
        train_all({tmp_path / "other": resumed})
    assert load_text(resumed).tokenizer.files() == {TOKENIZER: text}


def test_weights_that_give_no_gradient_end_the_run(tmp_path, monkeypatch):
    honest = Trainer.run

    def damaged(self):
        for weights in self._pipeline.data_parallel.weights.values():
            for name, parameter in weights.module.named_parameters():
                if "head" in name:
                    parameter.detach().zero_()
        return honest(self)

    monkeypatch.setattr(Trainer, "run", damaged)
    with pytest.raises(WorkerError, match=r"the gradient norm of step 1 is exactly 0 and its loss .*, so no weight"):
        train_all({tmp_path / "run": config_of(tmp_path, "loops")})
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_checkpoint_of_the_format_without_hashes_is_read(saved_by_two, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(saved_by_two, path)
    without_hashes(path)
    config = config_of(tmp_path, "one rank", resume=path)
    train_all({tmp_path / "other": replace(config, training=replace(config.training, steps=STEPS + 1))})
    assert list(losses(tmp_path / "other")) == [STEPS + 1]


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FOLDER).write_text("in the way")
    with pytest.raises(
        RunError, match=r"cannot write the checkpoint .*step-000004: rank 0: .*Not a directory"
    ) as failed:
        train_all({tmp_path / "run": config_of(tmp_path, "loops", every=2)})
    assert "Traceback" not in "".join(getattr(failed.value, "__notes__", []))


def test_files_that_another_host_wrote_elsewhere_make_no_checkpoint(tmp_path):
    draft, path = tmp_path / "draft", tmp_path / "step-000002"
    draft.mkdir()
    with pytest.raises(OSError, match=r"__1_0\.distcp of other ranks are not in .*; set output\.folder"):
        Checkpoints._complete(
            cast("Checkpoints", SimpleNamespace(_is_writer=True)),
            draft,
            path,
            CheckpointInfo(2, 0, 0, {}, {}, {}, {}),
            {"__1_0.distcp": StoredFile(1, "")},
        )
    assert not path.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_after_the_tensors_are_written_leaves_no_draft_and_nobody_waits(tmp_path, monkeypatch, rank):
    honest = Checkpoints._measure

    def measure(self, draft):
        if self._rank == rank:
            monkeypatch.setattr(checkpoint_module, "measure", full_disk)
        return honest(self, draft)

    def full_disk(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpoints, "_measure", measure)
    with suppress(RunError):  # what a run does when a checkpoint fails is not the matter here
        train_all({tmp_path / "run": config_of(tmp_path, "loops", every=2)})
    assert list((tmp_path / "run" / FOLDER).iterdir()) == []
