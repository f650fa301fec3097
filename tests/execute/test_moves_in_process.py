"""Swapped activations, all ranks in one process: gradients, what is freed, and what is counted."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from any_moves import move_newest, moving_schedules
from hypothesis import given, settings
from in_process import InProcessLanes, MovePost, Neighborhood, PolledLane, Post, run_in_process
from moved import peaks
from torch.multiprocessing.reductions import StorageWeakRef
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.cost.costs import Costs
from pipeloom.errors import ActionError, RunError, UserError
from pipeloom.execute.clock import Clock
from pipeloom.execute.lanes import ThreadLane
from pipeloom.execute.parts.moves import ActivationMoves, Vault
from pipeloom.execute.parts.part import RankRow
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.families import make_schedule
from pipeloom.passes import lower, split_backward
from pipeloom.schedule import Action, Kind, parse_schedule
from pipeloom.schedule.kinds import MOVE_KINDS

CPU = torch.device("cpu")
FAMILIES = [("1f1b", 1), ("gpipe", 1), ("depth-first", 2), ("breadth-first", 2), ("hybrid", 2)]


def executors_of(schedule, toy, modules):
    post, swap_post, lanes = Post(), MovePost(), Neighborhood()
    return [
        make_executor(
            schedule,
            rank,
            modules,
            toy.outputs(),
            post.transport(rank),
            ActivationMoves(schedule, rank, InProcessLanes(lanes), swap_post.wires(schedule)),
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


@given(moving_schedules())
@settings(max_examples=25)
def test_any_swaps_leave_gradients_as_they_are(schedule):
    results = run(schedule, num_steps=2)
    found = {span.action for result in results for span in result.trace.spans if span.action.kind in MOVE_KINDS}
    assert found == {action for _, _, action in schedule.actions() if action.kind in MOVE_KINDS}


@pytest.mark.parametrize(("family", "loops"), FAMILIES)
@pytest.mark.parametrize("kind", [Kind.EVICT, Kind.OFFLOAD])
def test_every_family_with_the_newest_away(family, loops, kind):
    schedule = lower(make_schedule(family, pp=4, loops=loops, num_microbatches=8))
    swapped = move_newest(schedule, keep=2, kind=kind)
    assert sum(row.is_kind(kind).sum() for row in swapped.rows) > 4
    run(swapped, num_steps=3)


@pytest.mark.parametrize(("family", "loops"), FAMILIES)
def test_what_is_held_is_what_the_simulation_says(family, loops):
    """Moves take no time in one process, so none is under way when a rank goes on."""
    plain = lower(make_schedule(family, pp=4, loops=loops, num_microbatches=8))
    sizes = [144, *[288] * (4 * loops - 1)]  # the batch holds the first stage's input
    for schedule in (plain, move_newest(plain, keep=2, kind=Kind.OFFLOAD)):
        expected = peaks(schedule, Costs(1, 2), sizes)
        assert [result.held.live_bytes for result in run(schedule)] == expected


@pytest.mark.parametrize("kind", [None, Kind.OFFLOAD])
def test_what_waits_for_the_second_half_of_a_backward_counts(kind):
    schedule = lower(split_backward(make_schedule("1f1b", pp=2, num_microbatches=6), None))
    schedule = schedule if kind is None else move_newest(schedule, keep=1, kind=kind)
    toy = Toy(2, 6)
    executors = executors_of(schedule, toy, toy.modules())
    results = run_in_process(executors, toy.inputs(), objective)
    for result, executor in zip(results, executors, strict=True):
        assert result.held.live_bytes >= result.held.pending_bytes > 0
        assert executor.parts[-1]._live._now == 0


def test_what_a_rank_accepts_counts_there():
    plain = lower(make_schedule("gpipe", pp=2, num_microbatches=8))
    assert [result.held.live_bytes for result in run(plain)] == [8 * 144, 8 * 288]
    evicting = move_newest(plain, keep=2, ranks={0})
    assert [result.held.live_bytes for result in run(evicting)] == [3 * 144, 8 * 288 + 6 * 144]


def test_what_is_evicted_is_freed_while_it_is_away():
    schedule = move_newest(lower(make_schedule("gpipe", pp=2, num_microbatches=6)), keep=1, ranks={1})
    toy = Toy(2, 6)
    executors = executors_of(schedule, toy, toy.modules())
    parcels, alive = [], []
    (stage,) = executors[1].parts[0].stages.values()
    forward, backward = stage.forward, stage.backward

    def watched_forward(part, tensor, objective, *, trains, parcel):
        output = forward(part, tensor, objective, trains=trains, parcel=parcel)
        parcels.append([StorageWeakRef(box.storage) for box in parcel._boxes])
        return output

    def watched_backward(part, gradient):
        alive.append([not all(ref.expired() for ref in refs) for refs in parcels])
        return backward(part, gradient)

    stage.forward, stage.backward = watched_forward, watched_backward
    run_in_process(executors, toy.inputs(), objective)
    away = [action.microbatch for action in schedule.rows[1] if action.kind is Kind.EVICT]
    assert all(parcels)
    assert away == [1, 2, 3, 4, 5]
    assert alive == [[number not in away and number >= done for number in range(6)] for done in range(6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_types_come_back_to_the_last_bit(dtype):
    plain = lower(make_schedule("depth-first", pp=2, loops=2, num_microbatches=4))
    found = []
    for schedule in (plain, move_newest(plain, keep=1)):
        toy = Toy(4, 4, dtype)
        modules = [module.to(dtype) for module in toy.modules()]
        run_in_process(executors_of(schedule, toy, modules), toy.inputs(), objective)
        found.append([p.grad for module in modules for p in module.parameters()])
    assert all(map(torch.equal, *found))


def test_a_step_that_failed_leaves_nothing_behind():
    schedule = move_newest(lower(make_schedule("1f1b", pp=2, num_microbatches=4)), keep=1, kind=Kind.OFFLOAD)
    toy = Toy(2, 4)
    modules, expected = toy.modules(), toy.modules()
    executors = executors_of(schedule, toy, modules)

    def fails(output, microbatch):
        if microbatch == 2:
            raise ZeroDivisionError
        return objective(output, microbatch)

    with pytest.raises(ActionError, match="1F2"):
        run_in_process(executors, toy.inputs(), fails)
    assert all(not executor.parts[-1]._parcels and not executor.parts[-1]._away._kept for executor in executors)
    for module in modules:
        module.zero_grad()
    executors = executors_of(schedule, toy, modules)
    run_in_process(executors, toy.inputs(), objective)
    reference(expected, toy.inputs(), objective)
    assert worst_difference(modules, expected) < 1e-9


def test_a_schedule_that_evicts_to_nobody_is_refused():
    text = "0F0 0EVICT0 0F1 0LOAD0 0B0 0B1"
    toy = Toy(1, 2)
    with pytest.raises(UserError, match="rank 0 evicts, but the schedule has no rank to evict to"):
        executors_of(parse_schedule(text), toy, toy.modules())


def test_without_swaps_an_executor_refuses_to_evict():
    schedule = move_newest(lower(make_schedule("1f1b", pp=2, num_microbatches=4)), keep=1)
    toy = Toy(2, 4)
    with pytest.raises(UserError, match="the executor has nothing to run EVICT, LOAD with"):
        make_executor(schedule, 0, toy.modules(), toy.outputs(), Post().transport(0))


def test_a_load_begins_when_its_eviction_has_ended():
    schedule = move_newest(lower(make_schedule("gpipe", pp=2, num_microbatches=3)), keep=1, ranks={0})
    slow = defaultdict(lambda: PolledLane(Clock(), lambda: None))  # they advance only when they are polled
    lanes = SimpleNamespace(waits=False, device=torch.device("cpu"), lane=slow.__getitem__)
    post, toy = MovePost(), Toy(2, 3)
    moves = ActivationMoves(schedule, 0, lanes, post.wires(schedule))
    row = RankRow(schedule, 0, Post().transport(0))
    moves.begin(row)
    forward = Action(Kind.FORWARD, 0, 1)
    parcel = moves.parcel(forward, owns_input=False)
    stage = Stage(toy.modules()[0], 0, toy.outputs()[0], needs_input_gradient=False)
    stage.forward(Portion(1), toy.inputs()[1], None, trains=True, parcel=parcel)
    moves.after_forward(forward, stage)
    for kind in (Kind.EVICT, Kind.LOAD):
        moves.start(row, row.actions.index(Action(kind, 0, 1)))
    while slow[Kind.LOAD].advance():
        pass
    assert not post.left[0, "load", "numbers"]
    while slow[Kind.EVICT].advance():
        pass
    assert parcel._boxes[0].storage is None
    while slow[Kind.LOAD].advance():
        pass
    assert len(post.left[0, "load", "numbers"]) == 1


def waiting(vault, lane):
    """A job under way that waits for something."""
    is_there = threading.Event()

    def job():
        finish = vault.until((0,))
        is_there.set()
        yield finish

    pending = lane.start(job())
    assert is_there.wait(10)
    return pending


def test_who_waits_gets_what_is_put_there():
    vault, lane = Vault(waits=True), ThreadLane(Clock())
    pending = waiting(vault, lane)
    vault.put((0,), torch.ones(3), CPU)
    assert pending.wait(10)
    pending.take()
    assert torch.equal(vault.fetch((0,), CPU), torch.ones(3))
    lane.close()


def test_after_a_failed_step_nobody_waits_for_anything_of_it():
    vault, lane = Vault(waits=True), ThreadLane(Clock())
    pending = waiting(vault, lane)
    vault.begin()
    assert pending.wait(10)
    behind = lane.start(iter(()))
    assert behind.wait(10)
    for one in (pending, behind):  # the lane does nothing more
        with pytest.raises(RunError, match="the step was aborted"):
            one.take()
    lane.close()
