"""The bubble account: whole, and right where the answer is known."""

from dataclasses import astuple, dataclass

import pytest
from families import named_sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.analysis.bubble import BubbleAccount, account_bubble
from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Action, Kind, parse_schedule
from pipeloom.schedule.stage_swaps import Content
from pipeloom.simulation import Sharing, simulate
from pipeloom.trace import Trace

EIGHTHS = st.integers(1, 80).map(lambda number: number / 8)  # sums of them are exact


@st.composite
def schedules(draw):
    name, fits = draw(named_sizes())
    count = draw(st.integers(1, 6).map(lambda count: 2 * count)) if FAMILIES[name].is_grouped else 5
    schedule = make_schedule(name, pp=draw(st.integers(1, 4)), num_microbatches=count, **fits)
    return lower(schedule, draw(st.integers(1, 3))) if draw(st.booleans()) else schedule


@settings(max_examples=150)
@given(schedule=schedules(), forward=EIGHTHS, backward=EIGHTHS, transfer=st.just(0.0) | EIGHTHS, shift=EIGHTHS)
def test_the_parts_add_up_and_a_simulated_rank_never_waits_for_its_host(schedule, forward, backward, transfer, shift):
    trace = simulate(schedule, Costs(forward, backward, transfer))
    accounts = account_bubble(schedule, later(trace, shift))
    for rank, account in enumerate(accounts):
        assert sum(astuple(account)) == trace.end_s
        assert account.compute_s == sum(span.end_s - span.start_s for span in trace.compute(rank))
        assert account.idle_s == trace.end_s - account.compute_s
        assert min(astuple(account)) >= 0
        assert account.host_s == account.exposed_data_parallel_s == 0
        assert account.exposed_p2p_s == 0 or transfer > 0


@given(schedule=schedules(), forward=st.floats(0.1, 3), backward=st.floats(0.1, 3), transfer=st.floats(0, 3))
def test_no_host_time_on_a_clock_of_any_costs_and_shared_cores(schedule, forward, backward, transfer):
    sharing = Sharing(lambda action, rank: None if "RECV" in action.kind else "host", {"host": 2.0})
    for trace in (
        simulate(schedule, Costs(forward, backward, transfer)),
        simulate(schedule, Costs(forward, backward, transfer), sharing),
    ):
        for account in account_bubble(schedule, trace):
            assert sum(astuple(account)) == pytest.approx(trace.end_s)
            assert account.host_s == 0


def later(trace, seconds):
    spans = (s._replace(start_s=s.start_s + seconds, end_s=s.end_s + seconds) for s in trace.spans)
    return Trace(tuple(spans), trace.num_ranks)


@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("transfer", [0.0, 0.25])
def test_breadth_first_fills_turns_and_drains_by_the_closed_forms(loops, transfer):
    schedule = lower(make_schedule("breadth-first", pp=4, loops=loops, num_microbatches=8))
    accounts = account_bubble(schedule, simulate(schedule, Costs(1, 2, transfer)))
    for rank, account in enumerate(accounts):
        assert account.startup_s == rank * (1 + transfer)
        assert account.drain_s == rank * (2 + transfer)
        assert account.compute_s == 8 * loops * 3
        # the turn at the last stage: compute of the ranks behind, and a transfer there and back
        assert account.imbalance_s + account.exposed_p2p_s == (3 - rank) * (3 + 2 * transfer)
        assert account.exposed_p2p_s == (0 if rank == 3 else transfer)


def test_only_the_last_hop_before_an_action_is_exposed_p2p():
    schedule = lower(make_schedule("gpipe", pp=3, num_microbatches=1))
    accounts = account_bubble(schedule, simulate(schedule, Costs(1, 2, 0.5)))
    #          compute startup imbalance p2p swaps dp host drain
    assert [astuple(account) for account in accounts] == [
        (3, 0, 7.5, 0.5, 0, 0, 0, 0),
        (3, 1.5, 3.5, 0.5, 0, 0, 0, 2.5),
        (3, 3, 0, 0, 0, 0, 0, 5),
    ]
    assert sum(accounts, BubbleAccount()).idle_s == 24


def test_a_late_start_with_the_tensor_there_is_host_time():
    schedule = lower(make_schedule("gpipe", pp=2, num_microbatches=1))
    times = {
        "0F0": (10, 11),
        "0SEND_F0": (11, 11.5),
        "1RECV_F0": (11, 12),
        "1F0": (13, 14),  # start-up, although the tensor was there at 12
        "1B0": (14.25, 16),
        "1SEND_B0": (16, 16.5),
        "0RECV_B0": (16, 17),
        "0B0": (17.5, 20),
    }
    spans = [
        span._replace(start_s=times[str(span.action)][0], end_s=times[str(span.action)][1])
        for span in simulate(schedule, Costs(1, 1)).spans
    ]
    assert [astuple(a) for a in account_bubble(schedule, Trace(tuple(spans[::-1]), 2))] == [
        (3.5, 0, 5, 1, 0, 0, 0.5, 0),
        (2.75, 3, 0, 0, 0, 0, 0.25, 4),
    ]


@dataclass(frozen=True)
class WithCollectives:
    """Compute and transfers as uniform costs have them, collectives of their own length."""

    gather_s: float
    reduce_s: float
    ignores_microbatch = True

    def seconds(self, action: Action) -> float:
        match action.kind:
            case Kind.UNSHARD:
                return self.gather_s
            case Kind.REDUCE_GRAD:
                return self.reduce_s
        return Costs(1, 2, 0.5).seconds(action)

    def move_s(self, stage: int, content: Content) -> float:
        raise NotImplementedError(stage, content)  # nothing is swapped here


def test_collectives_are_exposed_as_far_as_the_rank_stands_still_for_them():
    schedule = parse_schedule("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD\n")
    (account,) = account_bubble(schedule, simulate(schedule, WithCollectives(3, 4)))
    # gathers 0-3 and 3-6; 0F0 3-4, then 1F0 waits until 6; 1B0 7-9, 0B0 9-11, reductions 9-13 and 13-17
    assert astuple(account) == (6, 0, 0, 0, 0, 3 + 2 + 6, 0, 0)


def test_what_other_ranks_do_after_a_ranks_own_reduction_is_drain():
    text = "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD\n1RECV_F0 1UNSHARD 1F0 1B0 1SEND_B0 1REDUCE_GRAD\n"
    schedule = parse_schedule(text)
    first, second = account_bubble(schedule, simulate(schedule, WithCollectives(2, 1)))
    # 0F0 0-1, the tensor arrives at 1.5, the weights at 2; 1F0 2-3, 1B0 3-5, reduced 5-6; 0B0 5.5-7.5, reduced 7.5-8.5
    assert astuple(second) == (3, 1.5, 0, 0, 0, 0.5 + 1, 0, 2.5)
    assert astuple(first) == (3, 0, 4, 0.5, 0, 1, 0, 0)


def test_a_wait_for_a_gradient_buffer_is_exposed():
    rows = parse_schedule("0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD")
    schedule = rows.with_rows(rows.rows, rows.level, gradient_buffers=1)
    (account,) = account_bubble(schedule, simulate(schedule, WithCollectives(0, 3)))
    assert astuple(account) == (6, 0, 0, 0, 0, 3 + 3, 0, 0)
    (account,) = account_bubble(rows, simulate(rows, WithCollectives(0, 3)))
    assert astuple(account) == (6, 0, 0, 0, 0, 1 + 3, 0, 0)


def test_repeated_gathers_differ_by_time():
    schedule = parse_schedule("0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0B0 0B1\n")
    (account,) = account_bubble(schedule, simulate(schedule, WithCollectives(3, 0)))
    assert astuple(account) == (6, 0, 0, 0, 0, 6, 0, 0)


def test_a_trace_of_another_schedule_is_refused():
    schedule = make_schedule("gpipe", pp=2, num_microbatches=2)
    trace = simulate(schedule, Costs(1, 2))
    with pytest.raises(UserError, match="it lacks 1B1 on rank 1"):
        account_bubble(schedule, Trace(tuple(s for s in trace.spans if str(s.action) != "1B1"), 2))
    with pytest.raises(UserError, match="the trace has 0F0 on rank 0, the schedule does not"):
        account_bubble(schedule, Trace((*trace.spans, trace.spans[0]), 2))
    with pytest.raises(UserError, match="the trace has 3 ranks"):
        account_bubble(schedule, Trace(trace.spans, 3))
    other = make_schedule("1f1b", pp=2, num_microbatches=2)
    with pytest.raises(UserError, match="on rank 1, 1F1 begins too early"):
        account_bubble(other, trace)
