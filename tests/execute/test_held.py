"""What a rank holds in a step, counted by the executor, is within what the schedule proves."""

from dataclasses import replace

import pytest
from families import SOME, fitting
from in_process import Post
from replicas import cluster_of
from toy import ROWS, WIDTH

from pipeloom.execute.clock import Clock
from pipeloom.execute.executor import Executor
from pipeloom.families import FAMILIES
from pipeloom.schedule import Kind
from pipeloom.schedule.sharding import unreduced_counts
from pipeloom.workload.layout import Layout

ELEMENTS = WIDTH * WIDTH + WIDTH
LEVELS = {
    "none": {},
    "optimizer": {},
    "gradients": {"gradient_buffers": 2},
    "full": {"gradient_buffers": 1, "residency": 1},
}


CASES = [(family, loops) for family in SOME for loops in (1, 2, 3) if fitting(family, loops)["loops"] == loops]


@pytest.mark.parametrize("shard", LEVELS)
@pytest.mark.parametrize(("family", "loops"), CASES)
def test_no_rank_holds_more_than_its_schedule_proves(family, shard, loops):
    layout = Layout(pp=2, loops=loops, dp=2, shard=shard, num_microbatches=4)
    cluster = cluster_of(layout, family, **LEVELS[shard])
    schedule = cluster.schedule
    for rank, result in enumerate(cluster.step()):
        held, place = result.held, layout.coordinates(rank).pipeline
        row, weights = schedule.rows[place], cluster.parallel[rank].weights
        assert held.stage_inputs == schedule.peak_stage_inputs[place]
        is_split = FAMILIES[family].splits_backward  # then inputs go with the first half of a backward
        assert held.stage_input_bytes <= held.stage_inputs * ROWS * WIDTH * 8
        assert is_split or held.stage_input_bytes == held.stage_inputs * ROWS * WIDTH * 8
        assert (held.pending > 0) == is_split
        gathers = row.is_kind(Kind.UNSHARD).astype(int) - row.is_kind(Kind.RESHARD)
        assert held.gathered == gathers.cumsum().max(initial=0)
        assert held.gathered <= (schedule.max_gathered or loops)
        proven = max(count for _, count in unreduced_counts(row))
        assert proven <= held.gradients <= min(schedule.gradient_buffers or loops, proven + 1)
        assert all(one.whole.nbytes == ELEMENTS * 8 for one in weights.values())


@pytest.mark.parametrize("family", SOME)
def test_without_data_parallelism_stage_inputs_are_counted_too(family):
    loops = fitting(family, 2)["loops"]
    cluster = cluster_of(Layout(pp=4, loops=loops, dp=1, num_microbatches=6), family)
    peaks = [result.held.stage_inputs for result in cluster.step()]
    assert tuple(peaks) == cluster.schedule.peak_stage_inputs
    stages = [stage for executor in cluster.executors for stage in executor.parts[0].stages.values()]
    assert [(stage.tally.held, stage.tally.held_bytes) for stage in stages] == [(0, 0)] * len(stages)


def test_a_backward_that_comes_late_is_seen_in_the_count():
    """One more forward before the first backward than the family has, one more input."""
    cluster = cluster_of(Layout(pp=1, loops=1, dp=1, num_microbatches=3), "1f1b")
    kinds = (Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD)
    numbers = (0, 1, 0, 2, 1, 2)
    (row,) = cluster.schedule.rows
    own = {(action.kind, action.microbatch): action for action in row}
    late = tuple(own[kind, number] for kind, number in zip(kinds, numbers, strict=True))
    executor = cluster.executors[0]
    before = cluster.step()[0].held.stage_inputs
    schedule = replace(cluster.schedule, rows=(late,), max_stage_inputs=None)
    settings = {"transport": Post().transport(0), "clock": Clock()}
    cluster.executors[0] = Executor(schedule, 0, executor.parts, **settings)
    assert (before, cluster.step()[0].held.stage_inputs) == (1, 2)
