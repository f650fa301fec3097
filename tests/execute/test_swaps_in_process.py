"""Swapped activations, all ranks in one process: gradients, what is freed, and what is counted."""

import pytest
from hypothesis import given, settings
from swapping import swap_newest, swapping_schedules
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.execute.clock import HostClock
from pipeloom.execute.drive import run_in_process
from pipeloom.execute.lanes import Neighborhood
from pipeloom.execute.swaps import InProcessSwapLanes, Swaps
from pipeloom.execute.transport import Post
from pipeloom.execute.wires import SwapPost
from pipeloom.generate import make_schedule
from pipeloom.schedule import Kind, lower
from pipeloom.schedule.action import SWAP_KINDS

FAMILIES = [("1f1b", 1), ("gpipe", 1), ("depth-first", 2), ("breadth-first", 2), ("hybrid", 2)]


def executors_of(schedule, toy, modules):
    post, swap_post, lanes = Post(), SwapPost(), Neighborhood()
    return [
        make_executor(
            schedule,
            rank,
            modules,
            toy.outputs(),
            post.transport(rank),
            Swaps(schedule, rank, InProcessSwapLanes(lanes, HostClock()), swap_post.wires(schedule)),
        )
        for rank in range(schedule.num_ranks)
    ]


def run(schedule, num_steps=1):
    toy = Toy(schedule.num_stages, schedule.num_microbatches)
    modules, expected = toy.modules(), toy.modules()
    executors = executors_of(schedule, toy, modules)
    for _ in range(num_steps):
        results = run_in_process(executors, toy.inputs(), objective)
        reference(expected, toy.inputs(), objective)
    assert worst_difference(modules, expected) < 1e-9
    return results


@given(swapping_schedules())
@settings(max_examples=60)
def test_any_swaps_leave_gradients_as_they_are(schedule):
    results = run(schedule, num_steps=2)
    found = {span.action for result in results for span in result.trace.spans if span.action.kind in SWAP_KINDS}
    assert found == {action for _, _, action in schedule.actions() if action.kind in SWAP_KINDS}


@pytest.mark.parametrize(("family", "loops"), FAMILIES)
@pytest.mark.parametrize("kind", [Kind.EVICT, Kind.OFFLOAD])
def test_every_family_with_the_newest_away(family, loops, kind):
    schedule = lower(make_schedule(family, pp=4, loops=loops, num_microbatches=8))
    swapped = swap_newest(schedule, keep=2, kind=kind)
    assert sum(row.is_kind(kind).sum() for row in swapped.rows) > 4
    run(swapped, num_steps=3)
