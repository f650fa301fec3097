"""Activations that leave the device between forward and backward: order, lanes, time and memory."""

import pytest

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.memory import memory_over_time
from pipeloom.analysis.summary import communication
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.errors import ScheduleError, ScheduleTextError
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.schedule import format_schedule, parse_schedule
from pipeloom.schedule.ledger import HeldBytes, KeptBytes
from pipeloom.simulation import simulate

EARLY = "0F0 0EVICT0 0F1 0F2 0LOAD0 0B2 0B1 0B0"
LATE = "0F0 0EVICT0 0F1 0F2 0B2 0B1 0LOAD0 0B0"


def times(text, costs):
    trace = simulate(parse_schedule(text), costs)
    return {str(span.action): (span.start_s, span.end_s) for span in trace.spans}


def test_swaps_overlap_compute_where_there_is_time():
    found = times(EARLY, Costs(1, 2, evict_s=3))
    # evicted 1-4 beside 0F1 and 0F2; posted behind 0F2, loaded 4-7 beside 0B2 and 0B1; 0B0 waits for nothing
    assert found["0EVICT0"] == (1, 4)
    assert found["0LOAD0"] == (4, 7)
    assert found["0B0"] == (7, 9)


def test_a_late_load_is_waited_for():
    found = times(LATE, Costs(1, 2, evict_s=3))
    assert found["0LOAD0"] == (7, 10)
    assert found["0B0"] == (10, 12)
    schedule = parse_schedule(LATE)
    trace = simulate(schedule, Costs(1, 2, evict_s=3))
    (account,) = account_bubble(schedule, trace)
    assert (account.exposed_p2p_s, account.host_s) == (3, 0)
    assert {str(use.lane): (use.busy_s, use.hidden_s) for use in communication(trace)} == {
        "evict": (3, 3),
        "load": (3, 0),
    }


def test_each_direction_is_a_lane_and_a_load_waits_for_its_eviction():
    text = "0F0 0EVICT0 0F1 0EVICT1 0LOAD0 0LOAD1 0B0 0B1"
    found = times(text, Costs(1, 1, evict_s=10))
    assert found["0EVICT1"] == (11, 21)
    assert found["0LOAD0"] == (11, 21)  # while the other one leaves
    assert found["0LOAD1"] == (21, 31)


def test_stages_have_their_own_swaps():
    costs = StageCosts((1, 1), (2, 2), evict_s=(3, 5))
    found = times("0F0 0EVICT0 1F0 1EVICT0 1LOAD0 1B0 0LOAD0 0B0", costs)
    assert (found["0EVICT0"], found["1EVICT0"]) == ((1, 4), (4, 9))


def test_what_is_evicted_is_not_in_memory():
    schedule = parse_schedule(EARLY)
    held = HeldBytes(always_bytes=(100.0,), kept=KeptBytes([10.0]))
    (curve,) = memory_over_time(schedule, simulate(schedule, Costs(1, 2, evict_s=1.5)), held)
    # 0F0 0-1, evicted 1-2.5; 0F1 1-2, 0F2 2-3; loaded 3-4.5; 0B2 3-5, 0B1 5-7, 0B0 7-9
    assert curve.points == ((0, 110), (1, 120), (2, 130), (2.5, 120), (3, 130), (5, 120), (7, 110), (9, 100))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0EVICT0 0B0", "0EVICT0 has no partner: 0LOAD0 is missing"),
        ("0F0 0LOAD0 0B0", "0LOAD0 has no partner: 0EVICT0 is missing"),
        ("0EVICT0 0F0 0LOAD0 0B0", "0EVICT0 is not between 0F0 and 0LOAD0"),
        ("0F0 0LOAD0 0EVICT0 0B0", "0EVICT0 is not between 0F0 and 0LOAD0"),
        ("0F0 0EVICT0 0B0 0LOAD0", "0LOAD0 follows 0B0, which needs it"),
        ("0F0 0EVICT0 0I0 0LOAD0 0W0", "0LOAD0 follows 0I0, which needs it"),
        ("0F0 0EVICT0 0LOAD0", "0EVICT0 keeps what no backward needs"),
        ("0F0 0EVICT0 0EVICT0 0LOAD0 0B0", "0EVICT0 appears a second time"),
    ],
)
def test_wrong_swaps_are_refused(text, words):
    with pytest.raises(ScheduleError, match=words):
        parse_schedule(text)


def test_swaps_are_text_but_nothing_for_pytorch():
    schedule = parse_schedule(EARLY)
    assert format_schedule(schedule) == EARLY + "\n"
    with pytest.raises(ScheduleTextError, match="PyTorch's runtime has no EVICT, LOAD"):
        format_torch_csv(schedule)
