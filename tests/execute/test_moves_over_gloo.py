"""Swapped activations over processes: gradients, what is held, spans, and a partner that goes away."""

import gc
import os
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from any_moves import move_newest
from gloo import differences_over_gloo
from in_process import Post
from small_run import small_run
from thinned import thinned
from torch import nn
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.errors import PeerLostError, WorkerError
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.communication.wires import make_wires
from pipeloom.execute.lanes import Lanes
from pipeloom.execute.parts.moves import ActivationMoves, Served
from pipeloom.execute.parts.part import RankRow
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.trace import merge
from pipeloom.training.schedules import training_schedule
from pipeloom.workload.layout import Layout

FAMILIES = [("1f1b", 1), ("depth-first", 2), ("breadth-first", 2), ("hybrid", 2)]


def swapped(family, loops, kind, pp=4, num_microbatches=8):
    schedule = lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches))
    return move_newest(schedule, keep=2, kind=kind)


def toy_of(schedule):
    return Toy(schedule.num_stages, schedule.num_microbatches)


@contextmanager
def executing(schedule, world, modules):
    """The executor of a rank, with its connections to the others."""
    outputs, lanes = toy_of(schedule).outputs(), Lanes(Clock(), world.device)
    transport = Transport(world.rank, edges_of(schedule, outputs), world.device, timedelta(seconds=30))
    wires = make_wires(schedule, world.rank, world, [range(world.size)])
    moves = ActivationMoves(schedule, world.rank, lanes, wires)
    yield make_executor(schedule, world.rank, modules, outputs, transport, moves)
    lanes.close()
    transport.close()


def steps(schedules, num_steps, rendezvous, rank, size):
    """For each schedule: the difference and the trace."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    found = []
    for schedule in schedules:
        toy = toy_of(schedule)
        modules, expected = toy.modules(), toy.modules()
        with executing(schedule, world, modules) as executor:
            for _ in range(num_steps):
                result = executor.run(toy.inputs(), objective, 20)
                reference(expected, toy.inputs(), objective)
        own = schedule.placement.stages_of(rank)
        difference = worst_difference([modules[s] for s in own], [expected[s] for s in own])
        found.append((difference, result.trace))
    world.leave()
    return found


def test_every_family_equals_the_single_process():
    schedules = [swapped(*family, kind) for family in FAMILIES for kind in (Kind.EVICT, Kind.OFFLOAD)]
    by_rank = run_workers(partial(steps, schedules, 3), 4)
    for number, schedule in enumerate(schedules):
        assert max(found[number][0] for found in by_rank) < 1e-9
        trace = merge(found[number][1] for found in by_rank)
        assert sorted(span.action for span in trace.spans) == sorted(action for _, _, action in schedule.actions())


MODEL = ModelConfig(num_layers=6, hidden_size=16, num_heads=4, num_kv_heads=2)
MOVED = [
    (Layout(pp=4, loops=1, num_microbatches=6), "1f1b"),
    (Layout(pp=4, loops=1, num_microbatches=6, recompute="full"), "1f1b"),
    (Layout(pp=4, loops=2, num_microbatches=4, recompute="selective"), "depth-first"),
    (Layout(pp=2, loops=2, dp=2, shard="full", num_microbatches=4, recompute="full"), "breadth-first"),
    (Layout(pp=2, loops=2, dp=2, shard="full", num_microbatches=4), "hybrid"),
    (Layout(pp=2, loops=1, dp=2, shard="gradients", num_microbatches=4), "gpipe"),
    (Layout(pp=2, loops=1, tp=2, num_microbatches=4, sequence_parallel=True), "1f1b"),
]


@pytest.mark.parametrize("kind", thinned([Kind.OFFLOAD, Kind.EVICT], 2))
def test_runs_that_keep_one_part_each_equal_the_single_process(tmp_path, monkeypatch, kind):
    """A matrix for both ends, or two, takes turns: tied in one of the two kinds of moves for each layout."""
    monkeypatch.setattr(
        "pipeloom.training.pipeline.training_schedule", lambda config: move_newest(training_schedule(config), 1, kind)
    )
    configs = [
        small_run(
            tmp_path,
            model=replace(MODEL, tied=(number % 2 == 0) == (kind is Kind.EVICT)),
            layout=layout,
            schedule=ScheduleConfig(family=family),
        )
        for number, (layout, family) in enumerate(MOVED)
    ]
    found = differences_over_gloo(configs, 4)
    assert len(found) == len(configs)
    assert max(max(one.values()) for one in found) < 1e-9


class _Patient(nn.Module):
    """A stage that goes on when all that was started before it has ended, so that no time decides what is held."""

    def __init__(self, module):
        super().__init__()
        self.module, self.executor = module, None

    def forward(self, tensor):
        for slot, job in self.executor._under_way.items():
            assert self.executor._actions[slot].kind not in MOVE_KINDS or job.wait(20)
        return self.module(tensor)


def _held(schedules, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    found = []
    for schedule in schedules:
        toy = toy_of(schedule)
        modules = list(map(_Patient, toy.modules()))
        with executing(schedule, world, modules) as executor:
            modules[rank].executor = executor
            found.append(executor.run(toy.inputs(), objective, 20).held.live_bytes)
    world.leave()
    return found


def test_what_is_held_falls_on_the_rank_that_evicts():
    plain = lower(make_schedule("gpipe", pp=2, num_microbatches=8))
    evicting = move_newest(plain, keep=2, ranks={1})
    before, after = zip(*run_workers(partial(_held, [plain, evicting]), 2), strict=True)
    assert before == (8 * 144, 8 * 288)
    # what is packed is there twice; accepted parts lie in memory with gaps, and all six may be there
    assert after[1] <= 3 * 288 + 336
    assert 6 * 336 <= after[0] <= 8 * 144 + 6 * 336


def _alone(rendezvous, rank, size):
    """Rank 1 leaves before rank 0 has its eviction back."""
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    schedule = move_newest(lower(make_schedule("gpipe", pp=2, num_microbatches=4)), keep=1, ranks={0})
    wires = make_wires(schedule, rank, world, [range(size)])
    if rank == 1:
        wires.clear()
        dist.destroy_process_group()
        gc.collect()
        time.sleep(3)
        return None
    moves = ActivationMoves(schedule, rank, Lanes(Clock(), world.device), wires)
    row = RankRow(schedule, rank, Post().transport(rank))
    moves.begin(row)
    toy = Toy(2, 4)
    (module, _), (output, _) = toy.modules(), toy.outputs()
    stage, part = Stage(module, 0, output, needs_input_gradient=False), Portion(1)
    parcel = moves.parcel(Action(Kind.FORWARD, 0, 1), owns_input=True)
    stage.forward(part, toy.inputs()[1], None, trains=True, parcel=parcel)
    moves.after_forward(Action(Kind.FORWARD, 0, 1), stage)
    found = []
    for kind in (Kind.EVICT, Kind.LOAD):
        collective = moves.start(row, row.actions.index(Action(kind, 0, 1)))
        assert collective.wait(10)
        with pytest.raises(PeerLostError) as caught:
            collective.take()
        found.append(str(caught.value))
    return found


def test_a_partner_that_went_away_is_an_error_and_no_hang():
    begin = time.monotonic()
    (found, _) = run_workers(_alone, 2)
    assert len(found) == 2
    assert all("the partner of evictions closed the connection" in message for message in found)
    assert time.monotonic() - begin < 30


class _Dies(nn.Module):
    """A stage whose process is gone at its third micro-batch."""

    def __init__(self, module):
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, tensor):
        self.calls += 1
        if self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.module(tensor)


def _killed(rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    schedule = swapped("1f1b", 1, Kind.EVICT)
    toy = toy_of(schedule)
    modules = toy.modules()
    modules[3] = _Dies(modules[3])
    with executing(schedule, world, modules) as executor:
        executor.run(toy.inputs(), objective, 20)


def test_a_killed_partner_ends_the_run():
    begin = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 3 was killed by signal 9 \(SIGKILL\)"):
        run_workers(_killed, 4)
    assert time.monotonic() - begin < 25


def _refuses(self):
    """What a rank does for another, without the memory for it."""
    numbers = torch.empty(5, dtype=torch.int64)
    yield self._wires.evict.expect(numbers)
    time.sleep(0.5)  # until the ranks wait for each other
    raise MemoryError("no room for what comes")


_gives_back = Served._give_back


def _sleeps(self):
    yield from _gives_back(self)
    time.sleep(60)


def _serves_badly(method, replacement, impatient, rendezvous, rank, size):
    """One step in which the last rank does not serve the first one as it should."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    schedule = swapped("1f1b", 1, Kind.EVICT)
    toy = toy_of(schedule)
    if rank == schedule.partners[0]:
        setattr(Served, method, replacement)
    with executing(schedule, world, toy.modules()) as executor:
        executor.run(toy.inputs(), objective, 2 if rank == impatient else 20)


@pytest.mark.parametrize("impatient", [0, 3])
def test_what_fails_in_serving_another_rank_is_the_cause_that_is_shown(impatient):
    """Whether another rank waits in vain first, or the rank itself."""
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="serving rank 0's evictions failed: MemoryError: no room for what comes"):
        run_workers(partial(_serves_badly, "_accept", _refuses, impatient), 4)
    assert time.monotonic() - begin < 30


def test_a_rank_behind_its_row_says_what_it_still_does_for_others():
    with pytest.raises(WorkerError, match="at the end of its [0-9]+ actions, serving rank 0's loads") as caught:
        run_workers(partial(_serves_badly, "_give_back", _sleeps, 3), 4)
    assert "waiting for" not in str(caught.value)


def _two_schedules(rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    plain = lower(make_schedule("gpipe", pp=2, num_microbatches=4 + rank))
    make_wires(move_newest(plain, keep=1, ranks={0}), rank, world, [range(size)])


def test_partners_that_run_different_schedules_say_so_before_the_first_step():
    with pytest.raises(WorkerError, match="announces 3 evictions and 3 loads a step, but its partner expects 4"):
        run_workers(_two_schedules, 2)
