"""Swapped activations over processes: gradients, what is held, spans, and a partner that goes away."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from gloo import differences_over_gloo
from small_run import small_run
from swapping import swap_newest
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.execute.clock import HostClock
from pipeloom.execute.drive import run_rank
from pipeloom.execute.launch import run_workers
from pipeloom.execute.process_group import ProcessGroupTransport, edges_of
from pipeloom.execute.swaps import ProcessSwapLanes, Swaps
from pipeloom.execute.wires import make_wires
from pipeloom.execute.world import join_forked
from pipeloom.generate import make_schedule
from pipeloom.layout import Layout
from pipeloom.schedule import Kind, lower
from pipeloom.trace import merge

FAMILIES = [("1f1b", 1), ("depth-first", 2), ("breadth-first", 2), ("hybrid", 2)]


def swapped(family, loops, kind, pp=4, num_microbatches=8):
    schedule = lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches))
    return swap_newest(schedule, keep=2, kind=kind)


def steps(schedules, num_steps, rendezvous, rank, size):
    """For each schedule: the difference, what was held, the trace."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    found = []
    for schedule in schedules:
        toy = Toy(schedule.num_stages, schedule.num_microbatches)
        modules, expected, outputs = toy.modules(), toy.modules(), toy.outputs()
        transport = ProcessGroupTransport(rank, edges_of(schedule, outputs), world.device, timedelta(seconds=30))
        wires = make_wires(schedule, rank, world, [range(size)])
        swaps = Swaps(schedule, rank, ProcessSwapLanes(HostClock(), world.device), wires)
        executor = make_executor(schedule, rank, modules, outputs, transport, swaps)
        for _ in range(num_steps):
            result = run_rank(executor, toy.inputs(), objective, 20)
            reference(expected, toy.inputs(), objective)
        own = schedule.placement.stages_of(rank)
        difference = worst_difference([modules[s] for s in own], [expected[s] for s in own])
        found.append((difference, result.held.live_bytes, result.trace))
        swaps.close()
        transport.close()
    world.leave()
    return found


def test_every_family_equals_the_single_process():
    schedules = [swapped(*family, kind) for family in FAMILIES for kind in (Kind.EVICT, Kind.OFFLOAD)]
    by_rank = run_workers(partial(steps, schedules, 3), 4)
    for number, schedule in enumerate(schedules):
        assert max(found[number][0] for found in by_rank) < 1e-9
        trace = merge(found[number][2] for found in by_rank)
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [Kind.EVICT, Kind.OFFLOAD])
def test_runs_that_keep_one_part_each_equal_the_single_process(tmp_path, monkeypatch, kind, tied):
    monkeypatch.setattr("pipeloom.train.pipeline.moving", lambda _, schedule: swap_newest(schedule, 1, kind))
    configs = [
        small_run(tmp_path, model=replace(MODEL, tied=tied), layout=layout, schedule=ScheduleConfig(family=family))
        for layout, family in MOVED
    ]
    found = differences_over_gloo(configs, 4)
    assert len(found) == len(configs)
    assert max(max(one.values()) for one in found) < 1e-9
