"""Ranks whose memory changes, or that compute wrongly, are found and named."""

import json
import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_run import small_run
from thinned import thinned

from pipeloom.checkpoint.checkpoint_folder import list_checkpoints
from pipeloom.cli import main
from pipeloom.config import AdapterConfig, CheckpointConfig, ModelConfig, RestartConfig, RunConfig, TrainingConfig
from pipeloom.errors import RunError, UserError
from pipeloom.execute.stages.digest import digest
from pipeloom.execute.stages.stage import Stage
from pipeloom.execute.stages.visit import Visited
from pipeloom.model import Transformer
from pipeloom.runs.run_folder import RunFolder
from pipeloom.runs.slow_ranks import find_slow, read_slow
from pipeloom.training.health.odd_ones import Odd, odd_ones, with_owners
from pipeloom.training.health.slow_ranks import SlowRanks
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.run import train
from pipeloom.workload.layout import Layout

TRAINING = TrainingConfig(
    steps=6, validation_batches=0, sample_tokens=0, predict=False, dtype="float64", stall_timeout_s=20, check_every=2
)
SMALL = {"num_microbatches": 2, "microbatch_size": 1}
PIPELINE = Layout(pp=2, loops=1, **SMALL)
REPLICAS = Layout(pp=1, loops=1, dp=3, shard="optimizer", **SMALL)


def run_of(folder, layout, *, every=2, model=None, adapter=None, **training):
    more = {} if adapter is None else {"adapter": adapter}
    return small_run(
        folder,
        layout=layout,
        model=model or ModelConfig(num_layers=2, hidden_size=8, num_heads=2),
        training=replace(TRAINING, **training),
        checkpoint=CheckpointConfig(final="none", every=every),
        **more,
    )


@pytest.fixture
def changes(monkeypatch):
    """Rank 1 changes something of its first stage in a step of a process, counted from 1."""
    honest = Pipeline.train_step

    def change(number, what, *, behind=False):
        calls = []

        def step(pipeline, batch):
            calls.append(1)
            is_now = len(calls) == number and pipeline._world.rank == 1
            weights = next(iter(pipeline.data_parallel.weights.values()))
            if is_now and not behind:
                what(weights)
            result = honest(pipeline, batch)
            if is_now and behind:
                what(weights)
            return result

        monkeypatch.setattr(Pipeline, "train_step", step)

    return change


def nudge(tensor):
    tensor.view(-1)[3] += 2**-20


def matrix_of(module):
    """A matrix that every token uses, unlike the embedding."""
    return next(one.data for name, one in module.named_parameters() if name.startswith("layers.") and one.ndim > 1)


@pytest.mark.parametrize("layout", thinned([PIPELINE, REPLICAS], 2), ids=["pipeline", "sharded replicas"])
def test_a_weight_that_changes_in_memory_is_found_in_that_step(tmp_path, changes, layout):
    changes(5, lambda weights: nudge(weights.shard))
    config = run_of(tmp_path, layout)
    with pytest.raises(RunError, match="step 5: rank 1 on .* has memory that changed since the update of step 4"):
        train(config, quiet=True)
    warnings = (config.output.folder / "warnings.txt").read_text()
    assert "step 5: rank 1 on" in warnings
    # A checkpoint of step 4 may have been written behind the change.
    assert [one.name for one in list_checkpoints(config.output.folder)] == ["step-000002"]


def test_a_run_goes_back_to_a_checkpoint_from_before_the_change(tmp_path, changes):
    changes(5, lambda weights: nudge(weights.shard))
    config = run_of(tmp_path, PIPELINE, on_spike="rollback")
    train(config, quiet=True)
    assert "back to step 2" in (config.output.folder / "warnings.txt").read_text()
    text = (config.output.folder / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == list(range(1, 7))


def losses_of(config):
    lines = [json.loads(line) for line in (config.output.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    return [line["loss"] for line in lines]


def test_a_run_is_started_again_from_a_state_in_memory_from_before_the_change(tmp_path, changes):
    quiet = run_of(tmp_path, PIPELINE, every=None)
    train(quiet, quiet=True)
    changes(5, lambda weights: nudge(weights.shard))
    config = replace(quiet, restart=RestartConfig(times=1), output=replace(quiet.output, folder=tmp_path / "again"))
    train(config, quiet=True)
    assert losses_of(config) == losses_of(quiet)
    warnings = (config.output.folder / "warnings.txt").read_text()
    assert re.search(r"started again from step 3, in memory, after: step 5: rank 1 on .* has memory", warnings)


@pytest.mark.long
def test_a_rank_that_stays_wrong_is_left_out(tmp_path, monkeypatch):
    honest = Pipeline.train_step

    def step(pipeline, batch):
        result = honest(pipeline, batch)
        if pipeline._world.rank == 1 and pipeline._world.size == 3:
            nudge(matrix_of(next(iter(pipeline.data_parallel.weights.values())).module))
        return result

    monkeypatch.setattr(Pipeline, "train_step", step)
    restart = RestartConfig(times=1, layout="plan")
    config = replace(run_of(tmp_path, REPLICAS, every=None), restart=restart)
    train(config, quiet=True)
    warnings = (config.output.folder / "warnings.txt").read_text()
    assert len(re.findall("started again", warnings)) == 2
    assert "without rank 1" in warnings
    assert len(losses_of(config)) == 6


def test_a_change_of_what_a_rank_computes_with_is_found_by_the_other_ranks(tmp_path, changes):
    # Gathered weights are in no digest.
    changes(4, lambda weights: nudge(matrix_of(weights.module)), behind=True)
    with pytest.raises(RunError, match="step 4: rank 1 on .* has other results of stage 0 than the other ranks"):
        train(run_of(tmp_path, REPLICAS), quiet=True)


LAYOUTS = {
    "tensor-parallel": (Layout(pp=2, tp=2, loops=1, sequence_parallel=True, **SMALL), {}),
    "context-parallel": (Layout(pp=2, cp=2, loops=1, **SMALL), {}),
    "two ranks": (PIPELINE, {}),
    "full sharding": (Layout(pp=1, dp=2, loops=2, shard="full", **SMALL), {}),
    "slices": (Layout(pp=2, loops=1, token_slices=2, **SMALL), {}),
    "tied": (PIPELINE, {"model": ModelConfig(num_layers=2, hidden_size=8, num_heads=2, tied=True)}),
    "adapters": (PIPELINE, {"adapter": AdapterConfig(rank=2)}),
    "bfloat16": (Layout(pp=2, dp=2, loops=1, **SMALL), {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", thinned(LAYOUTS, len(LAYOUTS)))
def test_ranks_that_are_right_are_not_named_and_checks_change_no_loss(tmp_path, name):
    layout, changed = LAYOUTS[name]
    losses = []
    for folder, every in (("checked", 1), ("quiet", None)):
        (tmp_path / folder).mkdir()
        config = run_of(tmp_path / folder, layout, every=None, check_every=every, steps=3, **changed)
        train(config, quiet=True)
        text = (config.output.folder / "metrics.jsonl").read_text()
        losses.append([json.loads(line)["loss"] for line in text.splitlines()])
        assert not (config.output.folder / "warnings.txt").exists()
    assert losses[0] == losses[1]


def test_two_ranks_that_differ_are_both_named(tmp_path, monkeypatch):
    honest, calls = Transformer.forward, []

    def forward(module, x, *more, **named):
        calls.append(1)
        return honest(module, x, *more, **named) * (1 + 2**-30 * (torch.distributed.get_rank() == 1))

    monkeypatch.setattr(Transformer, "forward", forward)
    words = "rank 0 on .* or rank 1 on .* has other results of stage 0 .* no majority shows which one is wrong"
    with pytest.raises(RunError, match=words):
        train(run_of(tmp_path, PIPELINE), quiet=True)


def test_a_slow_rank_is_named_while_the_run_goes_on_with_a_layout_without_it(tmp_path, monkeypatch, capsys):
    honest, step = Stage.forward, Pipeline.train_step

    def forward(stage, *inputs, **named):
        if torch.distributed.get_rank() == 1 and sleeps:
            time.sleep(0.05)
        return honest(stage, *inputs, **named)

    def train_step(pipeline, batch):
        sleeps.append(1)  # not while the stages are profiled
        try:
            return step(pipeline, batch)
        finally:
            sleeps.clear()

    sleeps = []
    monkeypatch.setattr(Stage, "forward", forward)
    monkeypatch.setattr(Pipeline, "train_step", train_step)
    config = run_of(tmp_path, PIPELINE, every=None, steps=11, check_every=None, predict=True, dtype="float32")
    train(config, quiet=True)
    (warning,) = (config.output.folder / "warnings.txt").read_text().splitlines()
    assert warning.startswith("step 10: rank 1 on ")
    assert main(["inspect", str(config.output.folder)]) == 0
    shown = capsys.readouterr().out
    assert "slow: rank 1 on" in shown
    assert re.search(r"without it the planner takes .*: \d+\.\d\d times the step of this layout", shown)


def test_uneven_stages_and_a_slow_machine_name_no_rank():
    assert find_slow([2.0, 6.0, 2.2], [1.0, 3.0, 1.0]) == {}
    assert find_slow([2.0, 12.0, 2.0], [1.0, 3.0, 1.0]) == {1: 2.0}
    assert find_slow([1.0], [1.0]) == {}
    assert find_slow([1.0, 9.0], [1.0, 0.0]) == {}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, {3: 4.0}),
        ({"average_every": (4, 4, 4, 1)}, {}),  # replica 3 has fewer updates, since it is slower
        ({"average_every": (4, 4, 1, 1)}, {3: 4.0}),
        ({"microbatches": (2, 2, 2, 1)}, {}),
        ({"microbatches": (2, 2, 1, 1)}, {3: 4.0}),
    ],
)
def test_without_a_prediction_replicas_with_as_much_work_are_compared(tmp_path, monkeypatch, more, named):
    layout = replace(REPLICAS, dp=4, shard="none", **more)
    world = SimpleNamespace(rank=0, size=4, gather=lambda one: [one] * 4)
    monkeypatch.setattr("pipeloom.training.health.slow_ranks.shared_cores", lambda _: None)
    slow = SlowRanks(SimpleNamespace(layout=REPLICAS), world, run := RunFolder(tmp_path))
    slow.forget(layout)
    for step in range(1, 11):
        slow.take(step, [1.0, 1.0, 1.0, 4.0], [])
    assert {one.rank: one.times for one in read_slow(run.path)} == named


@pytest.mark.parametrize(("last", "named"), [(1.0, {}), (3.0, {4: 3.0})])
def test_ranks_that_share_cores_are_not_named(tmp_path, last, named):
    hosts = [("crowded", True), ("crowded", True), ("free", False), ("free", False), ("free", False)]
    world = SimpleNamespace(rank=0, size=5, gather=lambda _: hosts)
    config = RunConfig(layout=replace(REPLICAS, dp=5, shard="none"))
    slow = SlowRanks(config, world, RunFolder(tmp_path))
    for step in range(1, 11):
        slow.take(step, [9.0, 1.0, 1.0, 1.0, last], [])
    assert {one.rank: one.times for one in read_slow(tmp_path)} == named
    if named:
        without = f"`pipeloom inspect {tmp_path}` prints the step time of a layout without it\n"
        assert (tmp_path / "warnings.txt").read_text().endswith(f"3.0 times as long as the others; {without}")


@pytest.mark.parametrize("text", ["{", "[]", '{"ranks": [{"rank": 1}]}', '{"ranks": 3}'])
def test_a_damaged_file_of_slow_ranks_is_one_message(tmp_path, text):
    (tmp_path / "slow_ranks.json").write_text(text)
    with pytest.raises(UserError, match="slow_ranks.json: expected ranks with rank, host and times"):
        read_slow(tmp_path)


def test_a_digest_changes_with_every_bit_and_with_the_place():
    tensor = torch.randn(7, dtype=torch.float32)
    tensors = [torch.arange(5), tensor, torch.zeros(3, dtype=torch.bfloat16), torch.zeros(0)]
    before = digest(tensors)
    for bit in range(0, 28 * 8, 5):
        words = tensor.view(torch.uint8)
        words[bit // 8] ^= 1 << bit % 8
        assert digest(tensors) != before
        words[bit // 8] ^= 1 << bit % 8
    assert digest(tensors) == before == digest([tensors[0], tensor.clone(), *tensors[2:]])
    assert digest([tensor, tensors[0]]) != digest([tensors[0], tensor])
    assert digest([torch.cat([tensor, tensor])[7:]]) == digest([tensor])  # memory that begins between two words


def test_a_majority_decides_and_a_copy_that_spreads_is_named_by_its_owner():
    assert odd_ones({(0,): 1, (1,): 1}) is None
    assert odd_ones({(0,): 1, (1,): 2}) == Odd(((0,), (1,)), is_decided=False)
    assert odd_ones({(0, 1): 1, (2, 3): 2, (4, 5): 1}) == Odd(((2, 3),), is_decided=True)
    replicas = [[(0,), (1,)], [(2,), (3,)], [(4,), (5,)]]
    values = dict(zip(((0,), (1,), (2,), (3,), (4,), (5,)), (1, 1, 7, 7, 1, 1), strict=True))
    odd = odd_ones(values)
    assert odd == Odd(((2,), (3,)), is_decided=True)
    assert with_owners(odd, values, replicas, 1) == Odd(((3,),), is_decided=True)


def test_results_of_unlike_devices_are_compared_up_to_rounding():
    one = Visited(1, ((0.5, 2.0), (0.1, 1.0)), 1e-4)
    near, far = (Visited(2, ((0.5 + by, 2.0), (0.1, 1.0)), 1e-4) for by in (5e-5, 5e-4))
    assert one.equals(near, is_alike=False)
    assert not one.equals(far, is_alike=False)
    assert not one.equals(near, is_alike=True)
    assert not one.equals(Visited(1, ((math.nan, 2.0), (0.1, 1.0)), 1e-4), is_alike=False)
