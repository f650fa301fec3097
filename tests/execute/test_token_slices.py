"""A sequence that is run slice by slice trains as a whole one does, in process and over processes."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from families import SOME, fitting
from gloo import differences_over_gloo
from in_process import InProcessLanes, MovePost, Neighborhood, Post, run_in_process
from small_run import small_run
from stage_outputs import stage_outputs
from thinned import thinned
from toy import make_executor

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.data.text import load_data
from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.parts.moves import ActivationMoves
from pipeloom.execute.stages.batch import Batch
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.model import build_stage, stage_pieces
from pipeloom.passes import balance, lower, offload
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.training.equivalence import Gradients, compare, reference_gradients
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

UNEVEN = (9, 7, 5, 3)
NUM_TOKENS = sum(UNEVEN)
LLAMA = ModelConfig(family="llama", num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=20)
GPT2 = replace(LLAMA, family="gpt2", num_kv_heads=4)


def swaps_of(schedule):
    """For each rank what moves its activations, if the schedule does."""
    if not any(row.is_kind(*MOVE_KINDS).any() for row in schedule.rows):
        return [None] * schedule.num_ranks
    lanes, wires = Neighborhood(), MovePost().wires(schedule)
    return [ActivationMoves(schedule, rank, InProcessLanes(lanes), wires) for rank in range(schedule.num_ranks)]


def sliced_differences(tmp_path, model, layout, schedule_config, swap=None):
    config = small_run(tmp_path, model=model, layout=layout, schedule=schedule_config)
    config = replace(config, data=replace(config.data, seq_len=NUM_TOKENS))
    data = load_data(config.data, 0)
    config = resolve(config, data)
    batch = Batch.of(data.train.batch(0, layout.batch_size), layout.num_microbatches, torch.device("cpu"))
    schedule, pieces = training_schedule(config), stage_pieces(config.layout.partition)
    schedule = schedule if swap is None else swap(schedule)
    slices = TokenSlices(config.layout.slice_lengths(NUM_TOKENS))

    def build(stage, device):
        sizes = {"max_positions": NUM_TOKENS, "seed": 0, "dtype": torch.float64}
        module = build_stage(config.model, pieces[stage], device=device, **sizes)
        module.set_recompute((config.layout.recompute,) * config.model.num_layers)
        return module

    tokens = TensorSpec((layout.microbatch_size, NUM_TOKENS), torch.int64)
    outputs = stage_outputs(lambda stage: build(stage, "meta"), schedule.num_stages, tokens)
    modules, post = [build(stage, "cpu") for stage in range(schedule.num_stages)], Post()
    ranks = range(schedule.num_ranks)
    swaps = swaps_of(schedule)
    executors = [
        make_executor(schedule, rank, modules, outputs, post.transport(rank), swaps[rank], slices=slices)
        for rank in ranks
    ]
    cut = batch.cut(slices)
    results = run_in_process(executors, cut.inputs, cut.loss)
    if swap is None:
        assert [result.held.stage_inputs for result in results] == list(schedule.peak_stage_inputs)
    assert all(not stage._caches for executor in executors for stage in executor.parts[0].stages.values())
    assert sorted(results[schedule.placement.rank_by_stage[-1]].outputs) == list(range(layout.num_microbatches))
    loss = sum(float(value) for result in results for value in result.outputs.values())
    found = Gradients(loss, {name: p.grad for module in modules for name, p in module.named_parameters()})
    return compare(found, reference_gradients(config, batch))


CASES = [
    (LLAMA, UNEVEN, "none"),
    (LLAMA, 4, "selective"),
    (LLAMA, UNEVEN, "full"),
    (GPT2, UNEVEN, "selective"),
    (GPT2, 4, "full"),
]
EVERY_OTHER = [(family, *case) for n, family in enumerate(SOME) for case in CASES[n % 2 :: 2]]
"""Each case with half of the families; the others: ``tests/conformance/test_every_byte.py``."""


@pytest.mark.parametrize(("family", "model", "slices", "recompute"), thinned(EVERY_OTHER, 3))
def test_gradients_equal_those_of_whole_sequences(tmp_path, family, model, slices, recompute):
    loops = 2 if FAMILIES[family].is_looped else 1
    layout = Layout(
        pp=3, loops=loops, num_microbatches=2, microbatch_size=2, token_slices=slices, recompute=recompute
    )  # fewer micro-batches than ranks
    found = sliced_differences(tmp_path, model, layout, ScheduleConfig(family=family))
    assert len(found) > 30
    assert max(found.values()) < 1e-9


@pytest.mark.parametrize("placement", ["v", "linear"])
@pytest.mark.parametrize("family", [name for name in SOME if FAMILIES[name].is_looped])
def test_other_placements_too(tmp_path, family, placement):
    placement = fitting(family, 2, placement)["placement"]
    layout = Layout(pp=2, loops=2, num_microbatches=3, microbatch_size=1, token_slices=UNEVEN)
    found = sliced_differences(tmp_path, LLAMA, layout, ScheduleConfig(family=family, placement=placement))
    assert max(found.values()) < 1e-9


@pytest.mark.parametrize("family", ["1f1b", "breadth-first"])
def test_slices_that_are_recomputed_one_by_one(tmp_path, family):
    layout = Layout(pp=3, loops=1, num_microbatches=3, microbatch_size=1, token_slices=UNEVEN)
    found = sliced_differences(tmp_path, LLAMA, layout, ScheduleConfig(family=family, keep=(1, 1, 1)))
    assert max(found.values()) < 1e-9


@pytest.mark.parametrize("swap", [balance, partial(offload, budget_bytes=(1.5, 1.5, 1.5, 1.5))])
def test_slices_that_are_swapped(tmp_path, swap):
    """Keys and values stay, whatever else autograd saved of a slice goes and comes back."""
    layout = Layout(pp=4, loops=1, num_microbatches=4, microbatch_size=1, token_slices=UNEVEN)
    found = sliced_differences(tmp_path, LLAMA, layout, ScheduleConfig(family="1f1b"), swap)
    assert max(found.values()) < 1e-9


LAYOUTS = [
    ("breadth-first", Layout(pp=4, loops=1, num_microbatches=2, token_slices=UNEVEN, recompute="selective")),
    ("depth-first", Layout(pp=2, loops=2, dp=2, shard="full", num_microbatches=3, token_slices=3)),
    ("1f1b", Layout(pp=2, loops=1, tp=2, num_microbatches=1, token_slices=(10, 8, 6), recompute="full")),
    ("gpipe", Layout(pp=2, loops=1, tp=2, sequence_parallel=True, num_microbatches=2, token_slices=(10, 8, 6))),
    ("breadth-first", Layout(pp=1, loops=2, dp=2, tp=2, shard="gradients", num_microbatches=2, token_slices=4)),
]


def test_processes_too(tmp_path):
    configs = []
    for (family, layout), model in zip(LAYOUTS, cycle((LLAMA, replace(GPT2, tied=True)))):
        config = small_run(tmp_path, model=model, layout=layout, schedule=ScheduleConfig(family=family))
        configs.append(replace(config, data=replace(config.data, seq_len=NUM_TOKENS)))
    found = differences_over_gloo(configs, 4)
    assert [len(one) > 30 for one in found] == [True] * len(LAYOUTS)
    assert max(max(one.values()) for one in found) < 1e-9


def lowered(num_slices):
    return lower(make_schedule("gpipe", pp=2, num_microbatches=2, num_slices=num_slices))


@pytest.mark.parametrize("slices", [None, TokenSlices((3, 3, 3))])
def test_lengths_for_another_number_of_slices_are_refused(slices):
    with pytest.raises(UserError, match="cuts micro-batches into 2 token slices, found lengths for"):
        make_executor(lowered(2), 0, [None], [None, None], Post().transport(0), slices=slices)
