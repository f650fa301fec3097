"""A tied matrix on the clock: how long its messages may take before they cost anything, for all sizes."""

import pytest

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.summary import communication
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_tied, lower
from pipeloom.simulation import simulate

FORWARD, BACKWARD = 1.0, 2.0
SIZES = [(3, 1, 3), (4, 1, 8), (3, 2, 3), (4, 2, 8), (4, 2, 11), (4, 4, 8), (5, 3, 6)]


def traced(pp, loops, count, weights_s=0.0, gradient_s=0.0, family="breadth-first"):
    schedule = add_tied(lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=count)))
    costs = Costs(FORWARD, BACKWARD, tied_s=weights_s, tied_grad_s=gradient_s)
    return schedule, simulate(schedule, costs)


def plain_s(pp, loops, count):
    return (count * loops + pp - 1) * (FORWARD + BACKWARD)


@pytest.mark.parametrize(("pp", "loops", "count"), SIZES)
def test_breadth_first_hides_weights_until_the_last_stage_begins_and_the_gradient_behind_all_other_stages(
    pp, loops, count
):
    stages_between = count * (loops - 1) + pp - 1  # before the last stage's first forward; after its last backward
    most = stages_between * FORWARD, stages_between * BACKWARD
    assert traced(pp, loops, count, *most)[1].end_s == pytest.approx(plain_s(pp, loops, count))
    assert traced(pp, loops, count, most[0] + 0.5)[1].end_s == pytest.approx(plain_s(pp, loops, count) + 0.5)
    assert traced(pp, loops, count, 0.0, most[1] + 0.5)[1].end_s == pytest.approx(plain_s(pp, loops, count) + 0.5)


def test_both_messages_of_four_ranks_and_two_loops_take_eleven_stages_time_unseen():
    schedule, trace = traced(4, 2, 8, 11 * FORWARD, 11 * BACKWARD)
    assert trace.end_s == plain_s(4, 2, 8) == 57
    spans = {str(span.action): span for span in trace.spans}
    assert (spans["7RECV_TIED"].start_s, spans["7RECV_TIED"].end_s) == (0, 11)
    assert spans["7F0"].start_s == 11
    assert spans["0RECV_TIED_GRAD"].start_s == spans["7B7"].end_s == 35
    assert spans["0RECV_TIED_GRAD"].end_s == spans["0B7"].end_s == 57
    untied = simulate(lower(make_schedule("breadth-first", pp=4, loops=2, num_microbatches=8)), Costs(1.0, 2.0))
    for account in account_bubble(schedule, trace):
        assert account.exposed_p2p_s == account.exposed_data_parallel_s == 0
        assert account.idle_s == pytest.approx(untied.end_s - 48)


def test_without_loops_there_is_only_the_start_up_to_hide_behind():
    assert traced(4, 1, 8, 3 * FORWARD, 3 * BACKWARD, "1f1b")[1].end_s == plain_s(4, 1, 8)
    assert traced(4, 1, 8, 3 * FORWARD + 1, 3 * BACKWARD + 2, "1f1b")[1].end_s == plain_s(4, 1, 8) + 3


def test_what_is_exposed_is_in_the_accounts_and_on_the_lanes():
    schedule, trace = traced(4, 2, 8, 14.0, 25.0)
    accounts = account_bubble(schedule, trace)
    assert accounts[3].exposed_p2p_s == 3  # between 3F7, which ends at 11, and 7F0
    assert accounts[0].exposed_p2p_s >= 3  # from its last backward on
    assert all(account.idle_s + account.compute_s == pytest.approx(trace.end_s) for account in accounts)
    uses = {(use.rank, str(use.lane)): use for use in communication(trace)}
    back = uses[0, "recv from 3"]
    assert back.busy_s == 25
    assert back.exposed_s == pytest.approx(3 + _idle(trace, 0, 35 + 3, 35 + 3 + 22))


def _idle(trace, rank, begin_s, end_s):
    """Seconds between two times in which a rank does not compute."""
    busy = sum(max(0.0, min(s.end_s, end_s) - max(s.start_s, begin_s)) for s in trace.compute(rank))
    return end_s - begin_s - busy


def test_the_last_reduction_of_the_first_stage_waits_for_the_gradient_and_no_other_does():
    schedule = add_tied(lower(make_schedule("breadth-first", pp=3, loops=2, num_microbatches=3)))
    costs = StageCosts((1.0,) * 6, (2.0,) * 6, reduce_s=(1.0,) * 6, tied_grad_s=30.0)
    ends = {str(s.action): s for s in simulate(add_reduce_grad(schedule), costs).spans}
    assert ends["0REDUCE_GRAD"].start_s == ends["0RECV_TIED_GRAD"].end_s > ends["0B2"].end_s
    assert ends["3REDUCE_GRAD"].start_s == ends["3B2"].end_s


def test_with_two_ranks_the_first_activation_waits_behind_the_weights():
    schedule = add_tied(lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=4)))
    end_s = [simulate(schedule, Costs(1.0, 2.0, tied_s=seconds)).end_s for seconds in (0.0, 1.0, 1.5)]
    assert end_s[0] == end_s[1] == end_s[2] - 0.5
