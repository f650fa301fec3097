"""Bytes over time, worked by hand, and against what the rows promise."""

import pytest

from pipeloom.analysis.memory import inputs_over_time, memory_over_time
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_slices, add_unshard, balance, lower
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.simulation import simulate


def held(ranks, stages, **sizes):
    given = {"always_bytes": (0.0,) * ranks, "kept": KeptBytes([0.0] * stages)} | sizes
    return HeldBytes(**given)


def test_one_rank_by_hand():
    # F0 at 0..1, F1 at 1..2, B0 at 2..4, B1 at 4..6; inputs of 10, work of 3, 100 always
    schedule = make_schedule("gpipe", pp=1, num_microbatches=2)
    trace = simulate(schedule, Costs(1.0, 2.0))
    sizes = held(1, 1, always_bytes=[100.0], kept=KeptBytes([10.0]), working_bytes=[3.0])
    (curve,) = memory_over_time(schedule, trace, sizes)
    assert curve.points == ((0.0, 113.0), (1.0, 123.0), (4.0, 113.0), (6.0, 100.0))
    assert (curve.peak_bytes, curve.peak_s) == (123.0, 1.0)
    assert curve.peak_parts["stage inputs"] == 20
    assert curve.peak_parts["working"] == 3
    assert curve.peak_parts["always"] == 100


@pytest.mark.parametrize("family", ["1f1b", "gpipe", "breadth-first", "depth-first", "hybrid"])
@pytest.mark.parametrize("communication", [False, True])
def test_the_peak_of_stage_inputs_is_what_the_rows_hold(family, communication):
    loops = 1 if family in ("1f1b", "gpipe") else 2
    schedule = make_schedule(family, pp=3, loops=loops, num_microbatches=7)
    schedule = lower(schedule) if communication else schedule
    trace = simulate(schedule, Costs(1.0, 2.0, 0.25))
    curves = memory_over_time(schedule, trace, held(3, 3 * loops, kept=KeptBytes([1.0] * (3 * loops))))
    assert tuple(curve.peak_bytes for curve in curves) == schedule.peak_stage_inputs
    assert all(curve.points[-1][1] == 0 for curve in curves)


def test_a_receive_buffer_is_held_from_its_posting_to_the_end_of_its_use():
    schedule = lower(make_schedule("gpipe", pp=2, num_microbatches=2), receive_buffers=1)
    trace = simulate(schedule, StageCosts((1.0, 1.0), (2.0, 2.0), 0.5))
    _, last = memory_over_time(schedule, trace, held(2, 2, message_bytes=8.0))
    # posted at once, and used until 2.5; then the second is posted, arrives at 3 and is used until 4
    assert last.points == ((0.0, 8.0), (4.0, 0.0))
    two = lower(make_schedule("gpipe", pp=2, num_microbatches=2), receive_buffers=2)
    trace = simulate(two, StageCosts((1.0, 1.0), (2.0, 2.0), 0.5))
    _, last = memory_over_time(two, trace, held(2, 2, message_bytes=8.0))
    assert last.peak_bytes == 16


def test_gathered_weights_stay_within_what_the_pass_allows():
    schedule = lower(make_schedule("breadth-first", pp=2, loops=4, num_microbatches=3))
    schedule = add_reduce_grad(add_unshard(schedule, residency=2, prefetch=1), gradient_buffers=2)
    trace = simulate(schedule, Costs(1.0, 2.0, 0.1, unshard_s=1.5, reduce_s=2.5))
    weights = memory_over_time(schedule, trace, held(2, 8, gathered_bytes=[1.0] * 8))
    assert [curve.peak_bytes for curve in weights] == [2, 2]
    assert {curve.points[-1][1] for curve in weights} == {0.0}


def test_weights_that_are_never_dropped_stay_to_the_end():
    schedule = add_unshard(lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=2)), None, 1)
    trace = simulate(schedule, Costs(1.0, 2.0, 0.1, unshard_s=0.5))
    for curve in memory_over_time(schedule, trace, held(2, 4, gathered_bytes=[1.0] * 4)):
        assert curve.peak_bytes == 2
        assert curve.points[-1] == (trace.end_s, 0.0)


def test_frozen_stages_hold_their_inputs_for_the_forward_only():
    schedule = make_schedule("forward-only", loops=1, pp=2, num_microbatches=3)
    trace = simulate(schedule, Costs(1.0, 2.0))
    curves = memory_over_time(schedule, trace, held(2, 2, kept=KeptBytes([5.0, 5.0])))
    assert [curve.peak_bytes for curve in curves] == [5, 5]


def test_a_trace_that_begins_later_gives_the_same_curve():
    schedule = lower(make_schedule("1f1b", pp=2, num_microbatches=3))
    trace = simulate(schedule, Costs(1.0, 2.0, 0.25))
    moved = type(trace)(
        tuple(span._replace(start_s=span.start_s + 64, end_s=span.end_s + 64) for span in trace.spans), trace.num_ranks
    )
    sizes = held(2, 2, kept=KeptBytes([1.0, 2.0]), message_bytes=1.0)
    assert memory_over_time(schedule, moved, sizes) == memory_over_time(schedule, trace, sizes)


@pytest.mark.parametrize("placement", ["looped", "v"])
@pytest.mark.parametrize("name", ["breadth-first", "depth-first", "hybrid", "forward-only"])
def test_stage_inputs_over_time_peak_where_the_schedule_says(name, placement):
    schedule = make_schedule(name, pp=3, loops=2, num_microbatches=6, placement=placement)
    trace = simulate(lower(schedule), Costs(1, 2, 0.25))
    steps = [curve.points for curve in inputs_over_time(lower(schedule), trace)]
    assert tuple(max(held for _, held in points) for points in steps) == schedule.peak_stage_inputs
    for points in steps:
        assert points[0][0] == 0
        assert points[-1][1] == 0
        assert [time for time, _ in points] == sorted({time for time, _ in points})


def test_what_a_partner_accepts_counts_there_and_a_slice_is_its_share():
    (mine, accepted) = inputs_over_time(*simulated(balance(make_schedule("1f1b", pp=2, num_microbatches=3))))
    assert (mine.peak_bytes, accepted.peak_bytes) == (2, 1)  # 2 and 1 have nothing to share
    four = balance(make_schedule("1f1b", pp=4, num_microbatches=8))
    assert [curve.peak_bytes for curve in inputs_over_time(*simulated(four))] == [3, 3, 2, 3]
    (whole,) = inputs_over_time(*simulated(add_slices(make_schedule("gpipe", pp=1, num_microbatches=1), 2)))
    assert whole.points == ((0, 0.5), (1, 1), (4, 0.5), (6, 0))


def simulated(schedule):
    return schedule, simulate(schedule, Costs(1, 2, evict_s=0.5))
