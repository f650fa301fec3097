"""Recomputing only where a rank is short of memory: rules, the fewest, and the room that is kept."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.analysis.memory import memory_over_time
from pipeloom.cost.costs import Costs
from pipeloom.errors import ScheduleError, ScheduleTextError, UserError
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.passes.recompute import recompute_beyond
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.simulation import simulate

FAMILIES = st.sampled_from([("gpipe", 1), ("1f1b", 1), ("depth-first", 2), ("breadth-first", 2), ("breadth-first", 3)])


def peaks(schedule, kept, left, costs=None):
    held = HeldBytes(always_bytes=(0.0,) * schedule.num_ranks, kept=KeptBytes(kept, recomputed=left))
    trace = simulate(schedule, costs or Costs(1, 2))
    return [curve.peak_bytes for curve in memory_over_time(schedule, trace, held)]


def recomputed(schedule):
    return {(a.stage, a.microbatch) for _, _, a in schedule.actions() if a.kind is Kind.RECOMPUTE}


@settings(max_examples=60, deadline=None)
@given(FAMILIES, st.integers(1, 4), st.integers(1, 7), st.floats(0, 1), st.booleans(), st.data())
def test_ranks_stay_within_their_room(family, pp, count, share, with_messages, data):
    name, loops = family
    schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=count)
    sizes = st.integers(2, 9)
    kept = [float(data.draw(sizes)) for _ in range(schedule.num_stages)]
    left = [1.0] * schedule.num_stages
    most = peaks(schedule, kept, left)
    everything = recompute_beyond(schedule, most, kept, left)
    assert recomputed(everything) == set()
    rows = [[again for a in row for again in _before(a)] for row in schedule.rows]
    least = peaks(schedule.with_rows(rows, schedule.level), kept, left)
    least = [low + max(kept) for low in least]  # the return of the largest part
    room = [low + share * max(0, high - low) for low, high in zip(least, most, strict=True)]
    found = recompute_beyond(lower(schedule) if with_messages else schedule, room, kept, left)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks(found, kept, left), room, strict=True))
    plain = [[a for a in row if a.kind is not Kind.RECOMPUTE] for row in found.rows]
    assert plain == [list(row) for row in (lower(schedule) if with_messages else schedule).rows]


def _before(action):
    return [action._replace(kind=Kind.RECOMPUTE), action] if action.kind is Kind.BACKWARD else [action]


@pytest.mark.parametrize(
    ("name", "loops", "pp", "count"), [("1f1b", 1, 3, 5), ("depth-first", 2, 2, 3), ("gpipe", 1, 2, 5)]
)
@pytest.mark.parametrize("room", [2.0, 3.0])
def test_no_choice_recomputes_fewer(name, loops, pp, count, room):
    schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=count)
    kept, left = [1.0] * schedule.num_stages, [0.0] * schedule.num_stages
    found = recompute_beyond(schedule, [room] * pp, kept, left)
    for rank, row in enumerate(schedule.rows):
        parts = [(a.stage, a.microbatch) for a in row if a.kind is Kind.FORWARD]
        fewest = next(n for n in range(len(parts) + 1) if any(_fits(row, set(c), room) for c in combinations(parts, n)))
        assert sum(a.kind is Kind.RECOMPUTE for a in found.rows[rank]) == fewest


def _fits(row, again, room):
    """Whether a rank that keeps nothing of what it recomputes has room, its return included."""
    held = 0
    for action in row:
        part = (action.stage, action.microbatch)
        if action.kind is Kind.FORWARD:
            held += part not in again
        else:
            if held + (part in again) > room:
                return False
            held -= part not in again
        if held > room - bool(again):
            return False
    return True


def test_what_is_recomputed_runs_while_the_gradient_is_waited_for():
    schedule = recompute_beyond(make_schedule("1f1b", pp=4, num_microbatches=4), [2.0, 4, 4, 4], [1.0] * 4, [0.0] * 4)
    assert recomputed(schedule) == {(0, m) for m in (1, 2, 3)}
    plain = simulate(make_schedule("1f1b", pp=4, num_microbatches=4), Costs(1, 2))
    # rank 0 waits for each of its backwards anyhow, at least one forward long
    assert simulate(schedule, Costs(1, 2)).end_s == plain.end_s


def test_too_little_room_is_refused_with_what_is_missing():
    schedule = make_schedule("gpipe", pp=2, num_microbatches=4)
    with pytest.raises(UserError, match=r"rank 1 has room for 4 and holds 5 with everything recomputed; 1 are missing"):
        recompute_beyond(schedule, [9.0, 4.0], [2.0, 2.0], [1.0, 1.0])
    with pytest.raises(UserError, match="expected 2 numbers of room, one for each rank, found 1"):
        recompute_beyond(schedule, [9.0], [2.0, 2.0], [1.0, 1.0])


def test_too_little_room_for_slices_is_reported_in_whole_micro_batches():
    schedule = make_schedule("gpipe", pp=2, num_microbatches=2, num_slices=4)
    message = r"rank 0 has room for 0\.5 and holds 2\.25 with everything recomputed; 1\.75 are missing"
    with pytest.raises(UserError, match=message):
        recompute_beyond(schedule, [0.5, 9.0], [2.0, 2.0], [1.0, 1.0])
    recompute_beyond(schedule, [2.25, 9.0], [2.0, 2.0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0R0 0F0 0B0", "forward-before-backward"),
        ("0F0 0B0 0R0", "forward-before-backward"),
        ("0F0 0I0 0R0 0W0", "forward-before-backward"),
        ("0F0 0R0 0R0 0B0", "unique"),
        ("0F0 0EVICT0 0R0 0LOAD0 0B0", "swaps-in-turn"),
    ],
)
def test_a_recomputation_elsewhere_is_refused(text, rule):
    with pytest.raises(ScheduleError) as refused:
        parse_schedule(text)
    assert refused.value.rule == rule


def test_a_stage_without_backward_recomputes_nothing():
    with pytest.raises(ScheduleError, match="0R0 is superfluous: stage 0 runs no backward"):
        parse_schedule("0F0 0R0\n1F0 1B0")


def test_a_recomputation_waits_for_what_was_kept_and_the_backward_for_it():
    schedule = parse_schedule("0F0 0OFFLOAD0 0F1 0RELOAD0 0R0 0B0 0B1")
    ends = {str(s.action): (s.start_s, s.end_s) for s in simulate(schedule, Costs(1, 2, offload_s=3)).spans}
    assert ends["0RELOAD0"] == (4, 7)
    assert ends["0R0"] == (7, 8)
    assert ends["0B0"] == (8, 10)


def test_pytorch_has_no_recomputation():
    schedule = replace(parse_schedule("0F0 0R0 0B0"))
    with pytest.raises(ScheduleTextError, match="PyTorch's runtime has no R"):
        format_torch_csv(schedule)
