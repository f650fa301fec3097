"""Offloaded schedules: a budget for each rank, links that hide, and what is exposed where they do not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moved import compute_rows, num_moved, peaks
from orders import any_schedules

from pipeloom.analysis.bubble import account_bubble
from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import balance, offload
from pipeloom.passes.balance import find_partners
from pipeloom.passes.moves import Moves, add_moves
from pipeloom.schedule import Kind
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.simulation import simulate

BREADTH_FIRST = make_schedule("breadth-first", pp=4, loops=2, num_microbatches=8)
ONE_F_ONE_B = make_schedule("1f1b", pp=4, num_microbatches=16)


def test_breadth_first_keeps_half_of_its_stage_inputs_in_no_more_time():
    costs = Costs(1, 2, offload_s=1)
    found = offload(BREADTH_FIRST, budget_bytes=[8] * 4, seconds_of=costs.seconds)
    assert peaks(BREADTH_FIRST, costs) == [16] * 4
    assert max(peaks(found, costs)) <= 8
    assert simulate(found, costs).end_s == simulate(BREADTH_FIRST, costs).end_s


def test_only_what_is_too_much_is_moved():
    for most, moved in ((16, 0), (15, 1), (14, 2)):
        assert num_moved(offload(BREADTH_FIRST, budget_bytes=[most] * 4), Kind.OFFLOAD) == [moved] * 4


def test_what_is_needed_last_waits_longest():
    found = offload(BREADTH_FIRST, budget_bytes=[14] * 4)
    moved = {action[1:] for action in found.rows[0] if action.kind is Kind.OFFLOAD}
    assert moved == {(0, 6, 0), (0, 7, 0)}


def test_each_rank_has_a_budget_of_its_own():
    found = offload(ONE_F_ONE_B, budget_bytes=[4, 3, 2, 1])
    assert not any(num_moved(found, Kind.OFFLOAD))
    found = offload(ONE_F_ONE_B, budget_bytes=[3, 3, 2, 1])
    assert [bool(count) for count in num_moved(found, Kind.OFFLOAD)] == [True, False, False, False]


def test_a_slow_way_back_is_exposed_and_the_budget_is_kept():
    costs = StageCosts((1,) * 4, (2,) * 4, offload_s=(0.5,) * 4)
    plain_s = simulate(ONE_F_ONE_B, costs).end_s
    hidden = offload(ONE_F_ONE_B, budget_bytes=[3, 2, 2, 1], seconds_of=costs.seconds)
    assert simulate(hidden, costs).end_s == plain_s

    class SlowBack(StageCosts):
        def seconds(self, action):
            return 7.0 if action.kind is Kind.RELOAD else super().seconds(action)

    slow = SlowBack((1,) * 4, (2,) * 4, offload_s=(0.5,) * 4)
    exposed = offload(ONE_F_ONE_B, budget_bytes=[3, 2, 2, 1], seconds_of=slow.seconds)
    trace = simulate(exposed, slow)
    assert max(peaks(exposed, slow)) <= 3
    assert trace.end_s > plain_s
    assert sum(account.exposed_swaps_s for account in account_bubble(exposed, trace)) > 0


def test_a_budget_that_cannot_be_kept_is_refused_with_what_is_missing():
    with pytest.raises(UserError, match=r"pipeline rank 0 still holds 2, 1 more than its 1; pipeline rank 1 still"):
        offload(ONE_F_ONE_B, budget_bytes=[1] * 4)
    costs = Costs(1, 2, offload_s=1000)
    with pytest.raises(UserError, match="pipeline rank 0 still holds 4, 1 more than its 3"):
        offload(ONE_F_ONE_B, budget_bytes=[3, 3, 2, 1], seconds_of=costs.seconds)


def test_what_partners_accept_counts():
    costs = Costs(1, 2, evict_s=1, offload_s=0.5)
    plain = make_schedule("1f1b", pp=8, num_microbatches=32)
    balanced = balance(plain, seconds_of=costs.seconds)
    both = offload(balanced, budget_bytes=[4, 4, 4, 4, 4, 5, 5, 5], seconds_of=costs.seconds)
    assert peaks(balanced, costs) == [5, 5, 5, 5, 4, 5, 5, 5]
    assert peaks(both, costs) == [4, 4, 4, 4, 4, 5, 5, 5]
    assert both.partners == balanced.partners
    assert num_moved(both, Kind.EVICT) == num_moved(balanced, Kind.EVICT)
    assert sum(num_moved(both, Kind.OFFLOAD)) > 0
    assert simulate(both, costs).end_s == simulate(plain, costs).end_s
    with pytest.raises(UserError, match="pipeline rank 7 still holds 5, 1 more than its 4"):  # what it accepts stays
        offload(balanced, budget_bytes=[4] * 8, seconds_of=costs.seconds)


def test_what_is_offloaded_already_is_refused():
    with pytest.raises(UserError, match="the schedule offloads already"):
        offload(offload(ONE_F_ONE_B, budget_bytes=[3] * 4), budget_bytes=[3] * 4)


@settings(deadline=None, max_examples=40)
@given(any_schedules(), st.booleans(), st.data())
def test_a_budget_is_kept_or_refused(plain, is_balanced, data):
    costs = StageCosts(
        tuple(data.draw(st.integers(1, 4)) for _ in range(plain.num_stages)),
        tuple(data.draw(st.integers(1, 8)) for _ in range(plain.num_stages)),
        transfer_s=data.draw(st.sampled_from([0, 0.5])),
        evict_s=(1.0,) * plain.num_stages,
        offload_s=tuple(data.draw(st.sampled_from([0, 0.25, 1, 3])) for _ in range(plain.num_stages)),
    )
    sizes = [data.draw(st.integers(1, 4)) for _ in range(plain.num_stages)]
    before = balance(plain, seconds_of=costs.seconds, kept=KeptBytes(sizes)) if is_balanced else plain
    budget = [data.draw(st.integers(int(most / 3), int(most) + 2)) for most in peaks(before, costs, sizes)]
    try:
        found = offload(before, seconds_of=costs.seconds, kept=KeptBytes(sizes), budget_bytes=budget)
    except UserError as error:
        assert "pipeline rank" in str(error)  # noqa: PT017
        return
    assert compute_rows(found) == compute_rows(plain)
    assert all(held <= most for held, most in zip(peaks(found, costs, sizes), budget, strict=True))
    assert simulate(found, costs).end_s >= simulate(before, costs).end_s


V_HALF = make_schedule("v-half", pp=4, num_microbatches=8, loops=2, placement="v")


def test_between_the_halves_of_a_backward_only_what_is_pending_counts():
    pending, costs = [0.4] * 8, Costs(1, 2, evict_s=1, offload_s=1)
    least = max(peaks(V_HALF, costs, pending=pending))
    assert least < max(peaks(V_HALF, costs))
    sizes = {"seconds_of": costs.seconds, "budget_bytes": [least] * 4}
    assert num_moved(offload(V_HALF, kept=KeptBytes(pending=pending), **sizes), Kind.OFFLOAD) == [0] * 4
    assert num_moved(balance(V_HALF, kept=KeptBytes(pending=pending), **sizes), Kind.EVICT) == [0] * 4
    assert sum(num_moved(offload(V_HALF, **sizes), Kind.OFFLOAD)) > 0


def test_what_is_pending_stays_within_the_budget_too():
    pending, costs = [0.4] * 8, Costs(1, 2, offload_s=0.5)
    budget = [most - 1 for most in peaks(V_HALF, costs, pending=pending)]
    found = offload(V_HALF, seconds_of=costs.seconds, kept=KeptBytes(pending=pending), budget_bytes=budget)
    assert sum(num_moved(found, Kind.OFFLOAD)) > 0
    assert all(held <= most + 1e-9 for held, most in zip(peaks(found, costs, pending=pending), budget, strict=True))


def test_pairs_go_by_what_is_pending():
    """With whole inputs all ranks of V-Min hold as many; less is pending, and then the third one holds least."""
    v_min = make_schedule("v-min", pp=4, num_microbatches=8, loops=2, placement="v")
    assert find_partners(v_min) == (3, 2, 1, 0)
    assert find_partners(v_min, KeptBytes(pending=[0.4] * 8)) == (2, 3, 0, 1)


def test_what_is_pending_is_one_number_for_each_stage():
    with pytest.raises(UserError, match="kept pending must be 8 numbers"):
        offload(V_HALF, KeptBytes(pending=[1.0]), budget_bytes=[8] * 4)


def test_pairs_share_first_and_the_host_takes_what_is_left():
    odd = make_schedule("1f1b", pp=5, num_microbatches=8)  # the rank in the middle has no partner
    both = add_moves(odd, Moves(balance=True, offload=True, budget_bytes=3.0)).rows
    assert both == offload(balance(odd), budget_bytes=[3] * 5).rows != balance(odd).rows
    alone = Moves(balance=True, budget_bytes=4.0)
    assert add_moves(ONE_F_ONE_B, alone).rows == balance(ONE_F_ONE_B, budget_bytes=[4.0] * 4).rows
    assert add_moves(ONE_F_ONE_B, Moves()) is ONE_F_ONE_B
