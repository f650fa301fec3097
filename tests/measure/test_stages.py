"""What a run of slices measures before its first step: everything that it does takes time, halves and moves too."""

import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from small_run import small_run
from torch import float32

from pipeloom.config import ModelConfig, ScheduleConfig, TrainingConfig
from pipeloom.cost.costs import StageCosts
from pipeloom.data.text import load_data
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.families import make_schedule
from pipeloom.measure import stages as stages_module
from pipeloom.measure.rehearsal import Exchange, Times, teams_of
from pipeloom.measure.slices import with_slices
from pipeloom.measure.stages import Profile, message_s, most_held, num_served
from pipeloom.passes import lower
from pipeloom.passes.moves import Moves, add_moves
from pipeloom.schedule import Action, Kind, parse_schedule
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.schedule.lanes import HOST_LANE
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.system.cores import own_cores
from pipeloom.training.automatic.profiled_step import simulate_profile
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import saved_bytes
from pipeloom.workload.layout import Layout

UNEVEN = (9, 7, 5, 3)


def test_a_stage_that_is_faster_beside_others_was_disturbed_alone():
    """The median of the runs beside others counts, and each time for itself."""
    beside = [Times(1.0, 5.0, 0.0), Times(1.5, 4.5, 0.0), Times(9.0, 4.0, 0.0)]
    assert Times.shortest([Times(2.0, 3.0, 0.0), Times.medians(beside)]) == Times(1.5, 3.0, 0.0)


@pytest.mark.parametrize(("held", "expected"), [(1, 2), (2, 2), (4, 4)])
def test_a_stage_alone_runs_few_micro_batches_before_the_first_step(held, expected):
    seconds = iter([1.0, 9.0, 1.0, 1.0])

    def run(clock, held):
        return [Times(next(seconds), 2.0, 0.0) for _ in range(held)]

    assert stages_module._shortest_times(run, None, held) == Times(1.0, 2.0, 0.0)  # the slow one does not count
    assert len(list(seconds)) == 4 - expected


HELD = (1, 4, 3)
"""Micro-batches that each rank holds: a rank that holds few must not wait for one that holds many."""


class _Noted:
    """A run that computes nothing and notes how many micro-batches it holds."""

    def __init__(self):
        self.held = []

    def __call__(self, clock, held, around):
        self.held.append(held)
        for _ in range(2 * held):
            with around():
                pass
        return [Times(1.0, 1.0, 0.0)] * held


def _together(rendezvous, rank, size):
    world, layout, spec = join_forked(rendezvous, rank, size, "cpu", 20), Layout(pp=size), TensorSpec((4,), float32)
    edges = [edge for low in range(size - 1) for edge in ((low, low + 1), (low + 1, low))]
    with closing(Transport(rank, {edge: [spec] for edge in edges}, world.device, world.timeout)) as transport:
        run, exchange = _Noted(), Exchange(world, transport, spec, layout)
        found = exchange.together(run, time.perf_counter, 6, HELD[rank])
    world.leave()
    return run.held, len(found.times), found.receive_s > 0, found.send_s > 0


def test_ranks_that_hold_unlike_numbers_of_micro_batches_are_timed_together():
    found = run_workers(_together, 3)
    assert found == [([1] * 6, 6, True, True), ([4, 2], 6, True, True), ([3, 3], 6, True, True)]


def test_ranks_on_several_hosts_are_timed_at_once_but_one_group_of_a_host_after_the_other():
    groups = Layout(pp=2, dp=2, tp=2).lockstep_groups()
    assert teams_of(groups, ["a"] * 8) == groups
    assert teams_of(groups, ["a"] * 4 + ["b"] * 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert teams_of(groups, list("aabbccdd")) == [list(range(8))]
    assert teams_of(groups, list("abbacdef")) == [[0, 1, 4, 5, 6, 7], [2, 3]]


def test_slices_have_their_own_compute_and_their_share_of_everything_else():
    whole = StageCosts((4.0,), (8.0,), 2.0, (5.0,), evict_s=(3.0,), offload_s=(6.0,), weight_s=(4.0,), tied_s=7.0)
    times = {0: [Times(3.0, 3.5, 1.5), Times(1.0, 1.5, 0.5)]}
    costs = with_slices(Profile(whole, ("host",), {"host": 1.0}), times, TokenSlices((3, 1))).action_costs
    of_microbatch = {
        Kind.FORWARD: (3.0, 1.0),
        Kind.BACKWARD: (5.0, 2.0),
        Kind.BACKWARD_INPUT: (3.5, 1.5),
        Kind.BACKWARD_WEIGHT: (1.5, 0.5),
        Kind.EVICT: (2.25, 0.75),
        Kind.LOAD: (2.25, 0.75),
        Kind.OFFLOAD: (4.5, 1.5),
        Kind.RELOAD: (4.5, 1.5),
        Kind.RECV_B: (1.5, 0.5),
    }
    for kind, expected in of_microbatch.items():
        assert tuple(costs.seconds(Action(kind, 0, 0, part)) for part in (0, 1)) == expected, kind
    assert costs.seconds(Action(Kind.UNSHARD, 0)) == 5.0
    assert costs.seconds(Action(Kind.RECV_TIED, 0)) == 7.0


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("breadth-first", {"pp": 2, "loops": 2}, [2, 2, 2, 2]),
        ("1f1b", {"pp": 5}, [2, 2, 2, 2, 1]),
        ("zb-h1", {"pp": 3}, [2, 2, 1]),
        ("breadth-first", {"pp": 2, "loops": 1, "num_microbatches": 3}, [2, 2]),
        ("1f1b", {"pp": 3, "num_slices": 4}, [1, 1, 1]),
    ],
)
def test_as_many_micro_batches_are_timed_at_once_as_a_stage_holds(family, sizes, expected):
    schedule = make_schedule(family, **({"num_microbatches": 8} | sizes))
    assert [most_held(schedule, stage) for stage in range(schedule.num_stages)] == expected


def test_a_rank_that_is_short_of_memory_is_timed_with_one_micro_batch():
    schedule = add_moves(make_schedule("1f1b", pp=4, num_microbatches=8), Moves(balance=True), KeptBytes())
    assert [most_held(schedule, rank) for rank in range(4)] == [1, 1, 1, 1]


TWO, NONE = frozenset({0, 1}), None


@pytest.mark.parametrize(
    ("slowdowns", "cores", "beside", "expected"),
    [
        ([2.0, 2.0, 2.0, 2.0], [NONE] * 4, 0.0, 2.0),
        ([1.8, 1.9, 1.7, 1.8], [NONE] * 4, 0.0, 4 / 1.8),
        ([0.9, 0.9], [NONE] * 2, 0.0, 2.0),
        ([1.0, 1.1, 1.0, 1.1], [TWO] * 4, 0.0, 2 / 1.05),
        ([0.9, 0.9, 0.9, 0.9], [TWO] * 4, 0.0, 2.0),  # slow by chance while alone: two cores are two cores
        ([1.0, 1.0], [frozenset({0}), frozenset({5})], 0.0, 2.0),
        ([1.0, 1.5], [frozenset({3}), frozenset({3})], 0.0, 0.8),
        ([2.0, 2.0], [TWO, NONE], 0.0, 1.0),
        ([1.0, 1.1, 1.0, 1.1], [TWO] * 4, 0.01, 1.96 / 1.05),
        ([1.0, 1.0], [TWO] * 2, 0.01, 1.98),
        ([1.0, 1.0], [frozenset({0, 1, 2})] * 2, 0.01, 2.0),  # on the third core
        ([2.0, 2.0], [NONE] * 2, 0.01, 1.0),  # wall time contains it
    ],
)
def test_a_host_serves_its_ranks_as_they_slow_down_and_no_more_than_its_cores(slowdowns, cores, beside, expected):
    assert num_served(slowdowns, cores, [beside] * len(slowdowns)) == pytest.approx(expected)


CASES = {
    "split and tied": ("zb-h1", {}, True),
    "offloaded": ("gpipe", {"offload": True}, True),
    "split and evicted": ("zb-h1", {"balance": True}, False),
}


def run_of(folder, name):
    family, moves, tied = CASES[name]
    given = small_run(
        folder,
        model=ModelConfig(num_layers=4, hidden_size=16, num_heads=2, tied=tied),
        layout=Layout(pp=3, loops=1, num_microbatches=3, microbatch_size=1, token_slices=UNEVEN),
        schedule=ScheduleConfig(family=family, **moves),
        training=TrainingConfig(stall_timeout_s=20),
    )
    given = replace(given, data=replace(given.data, seq_len=sum(UNEVEN)))
    config = resolve(given, load_data(given.data, 0))
    if config.schedule.offload:
        room = str(int(2.5 * max(saved_bytes(config).by_stage(config.layout.num_stages))))
        config = replace(config, schedule=replace(config.schedule, activation_budget=room))
    return config


def profiled(configs, rendezvous, rank, size):
    world, found = join_forked(rendezvous, rank, size, "cpu", 60), []
    for config in configs:
        data, pipeline = load_data(config.data, 0), Pipeline(config, world)
        found.append(pipeline.profile(pipeline.batch(data.train.batch(0, config.layout.batch_size))))
        pipeline.close()
    world.leave()
    return found


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    configs = [run_of(folder, name) for name in CASES]
    import torch._dynamo  # noqa: F401  once here, not once in every worker

    on_rank_0, *elsewhere = run_workers(partial(profiled, configs), 3)
    assert elsewhere == [[None] * len(configs)] * 2
    return dict(zip(CASES, zip(configs, on_rank_0, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_everything_that_a_rank_does_takes_time_before_the_first_step(profiles, name):
    config, profile = profiles[name]
    schedule = training_schedule(config)
    spans = simulate_profile(schedule, profile).spans
    kinds = {span.action.kind for span in spans if span.end_s > span.start_s}
    assert Kind.FORWARD in kinds
    assert (Kind.BACKWARD_INPUT in kinds) == (Kind.BACKWARD_WEIGHT in kinds) == ("split" in name)
    moved = {"evicted": {Kind.EVICT, Kind.LOAD}, "offloaded": {Kind.OFFLOAD, Kind.RELOAD}}.get(name.split()[-1], set())
    assert kinds & set(MOVE_KINDS) == moved
    if "split" in name:
        for part in profile.slices:
            assert all(0 < half < both for half, both in zip(part.weight_s, part.backward_s, strict=True))
            # Measured of each slice. The clock has steps of 10 ns, so two times may be equal by chance.
            assert len(set(part.weight_s) & set(profile.costs.weight_s)) <= 1
    # The receive of a tied matrix carries its time. A small message may arrive while it is posted, which takes time.
    sent = {Kind.SEND_F, Kind.SEND_B, Kind.SEND_TIED, Kind.SEND_TIED_GRAD, Kind.RECV_F, Kind.RECV_B}
    assert {str(span.action) for span in spans if span.end_s == span.start_s and span.action.kind not in sent} == set()
    assert profile.receive_s > 0
    assert profile.send_s > 0
    # Three ranks with two cores or one wait for them; the system gives a turn of some milliseconds.
    turns = profile.turn_s_by_host.values()
    assert len(turns) == (len(own_cores()) < 3)
    assert all(1e-4 < turn_s < 0.1 for turn_s in turns)


def test_a_message_takes_the_time_from_its_posting_to_its_arrival_without_that_of_the_posting():
    begun = [0.0, 10.0, 20.0, 30.0]
    assert message_s([9.0, 11.0, 22.0, 33.0], begun, 0.5) == 1.5  # the first one warms up
    assert message_s([0.25, 10.25, 20.25, 30.25], begun, 0.5) == 0.0  # it arrives while it is posted


def test_posting_a_message_takes_the_time_of_the_thread_that_computes():
    schedule = lower(make_schedule("gpipe", pp=2, num_microbatches=1))
    profile = Profile(StageCosts((1.0, 1.0), (1.0, 1.0)), ("host", "host"), {"host": 2.0})
    trace = simulate_profile(schedule, replace(profile, send_s=0.5, receive_s=0.25))
    starts = {str(span.action): span.start_s for rank in (0, 1) for span in trace.compute(rank)}
    # Both ranks first post a receive. Then 0F0 until 1.25, its send until 1.75, 1F0 and 1B0, the send until 4.25.
    assert starts == {"0F0": 0.25, "1F0": 1.75, "1B0": 2.75, "0B0": 4.25}
    assert HOST_LANE not in trace.lanes(0)  # a measured trace has no such lane either
    assert simulate_profile(schedule, profile).end_s == 4


def test_ranks_take_turns_on_the_cores_of_their_host():
    schedule = parse_schedule("0F0 0F1\n1F0 1F1")
    profile = Profile(StageCosts((3.0, 3.0), (3.0, 3.0)), ("host", "host"), {"host": 1.0}, {"host": 2.0})
    starts = {str(span.action): span.start_s for span in simulate_profile(schedule, profile).spans}
    assert starts == {"0F0": 0, "0F1": 3, "1F0": 4, "1F1": 9}
