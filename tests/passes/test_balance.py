"""Balanced schedules: BPipe's figures on 1F1B, and what holds on any schedule."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moved import compute_rows, num_moved, peaks
from orders import any_schedules

from pipeloom.cost.costs import Costs, StageCosts
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import add_unshard, balance, lower
from pipeloom.passes.balance import pair_ranks
from pipeloom.schedule import Kind, Level, parse_schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.simulation import simulate


def one_f_one_b(pp, count):
    return make_schedule("1f1b", pp=pp, num_microbatches=count)


@pytest.mark.parametrize("pp", range(4, 17, 2))
@pytest.mark.parametrize("times", [1, 2, 8])
def test_bpipe_stalls_nowhere_and_no_rank_holds_more_than_half_the_pipeline_and_one(pp, times):
    plain = one_f_one_b(pp, pp * times)
    balanced = balance(plain)
    assert balanced.partners == tuple(reversed(range(pp)))
    for evict_s in (0.1, 0.5, 1.0):
        costs = Costs(1, 2, evict_s=evict_s)
        assert simulate(balanced, costs).end_s == simulate(plain, costs).end_s
        found = peaks(balanced, costs)
        assert max(found) == found[0] == pp / 2 + 1
        assert min(found) >= pp / 2
    assert peaks(plain, Costs(1, 2)) == [pp - rank for rank in range(pp)]


def test_bpipe_moves_no_more_than_published_policies_do():
    # simulated with the policy of the paper: 72, 62, 50 and 32 evictions and loads for 64 micro-batches
    moved = num_moved(balance(one_f_one_b(8, 64)), Kind.EVICT, Kind.LOAD)
    assert all(mine <= theirs for mine, theirs in zip(moved, [72, 62, 50, 32, 0, 0, 0, 0], strict=True))
    assert moved[0] > 0


@pytest.mark.parametrize("pp", [3, 5, 7, 9])
def test_with_an_odd_number_of_ranks_the_middle_one_has_no_partner(pp):
    plain = one_f_one_b(pp, 4 * pp)
    balanced = balance(plain)
    assert balanced.partners == tuple(reversed(range(pp)))
    costs = Costs(1, 2, evict_s=1)
    assert max(peaks(balanced, costs)) <= (pp + 3) / 2
    assert num_moved(balanced, Kind.EVICT)[pp // 2] == 0
    assert simulate(balanced, costs).end_s == simulate(plain, costs).end_s


def test_what_is_needed_last_goes_and_comes_back_one_compute_action_ahead():
    row = [str(action) for action in balance(one_f_one_b(4, 4)).rows[0] if action.kind not in ("SEND_F", "RECV_B")]
    assert row == ["0F0", "0F1", "0EVICT1", "0F2", "0F3", "0B0", "0LOAD1", "0B1", "0B2", "0B3"]


def test_pairs_are_of_the_fullest_and_the_emptiest():
    assert pair_ranks([1, 9, 5, 3]) == (1, 0, 3, 2)
    assert pair_ranks([4, 4, 4, 4]) == (3, 2, 1, 0)
    assert pair_ranks([1, 2, 3]) == (2, 1, 0)


@settings(deadline=None, max_examples=40)
@given(any_schedules())
def test_a_balanced_schedule_computes_in_the_same_order_and_time_and_no_pair_is_fuller(plain):
    balanced = balance(plain)
    costs = Costs(1, 2, evict_s=1)
    assert balanced.level is Level.COMMUNICATION
    assert compute_rows(balanced) == compute_rows(plain)
    assert simulate(balanced, costs).end_s == simulate(plain, costs).end_s
    before, after = peaks(plain, costs), peaks(balanced, costs)
    for rank, partner in enumerate(balanced.partners):
        assert max(after[rank], after[partner]) <= max(before[rank], before[partner])
    without = [[a for a in row if a.kind not in ("EVICT", "LOAD")] for row in balanced.rows]
    assert without == [list(row) for row in lower(plain).rows]


@settings(deadline=None, max_examples=40)
@given(any_schedules(), st.data())
def test_a_budget_is_kept_or_refused(plain, data):
    costs = StageCosts(
        tuple(data.draw(st.integers(1, 4)) for _ in range(plain.num_stages)),
        tuple(data.draw(st.integers(1, 8)) for _ in range(plain.num_stages)),
        transfer_s=data.draw(st.sampled_from([0, 0.5])),
        evict_s=tuple(data.draw(st.sampled_from([0.25, 1, 3])) for _ in range(plain.num_stages)),
    )
    sizes = [data.draw(st.integers(1, 4)) for _ in range(plain.num_stages)]
    before = peaks(plain, costs, sizes)
    budget = [data.draw(st.integers(int(most / 2), 2 * int(most) + 4)) for most in before]
    try:
        balanced = balance(plain, seconds_of=costs.seconds, kept=KeptBytes(sizes), budget_bytes=budget)
    except UserError as error:
        assert "pipeline rank" in str(error)  # noqa: PT017
        return
    assert compute_rows(balanced) == compute_rows(plain)
    assert all(held <= most for held, most in zip(peaks(balanced, costs, sizes), budget, strict=True))
    if all(held <= most for held, most in zip(before, budget, strict=True)):
        assert num_moved(balanced, Kind.EVICT) == [0] * plain.num_ranks


def test_a_larger_budget_never_moves_more():
    plain = one_f_one_b(6, 24)
    moved = [sum(num_moved(balance(plain, budget_bytes=[most] * 6), Kind.EVICT)) for most in (4, 5, 6)]
    assert all(few <= many for many, few in pairwise(moved))
    assert moved[0] > 0
    assert moved[-1] == 0


def test_a_budget_that_cannot_be_kept_is_refused_with_what_is_missing():
    with pytest.raises(UserError, match=r"pipeline rank 3 still holds 3, 2 more than its 1"):
        balance(one_f_one_b(4, 8), budget_bytes=[3, 3, 3, 1])


def test_slow_transfers_move_less_rather_than_stall():
    plain = one_f_one_b(8, 32)
    costs = Costs(1, 2, evict_s=6)
    balanced = balance(plain, seconds_of=costs.seconds)
    assert simulate(balanced, costs).end_s == simulate(plain, costs).end_s
    assert 5 < max(peaks(balanced, costs)) <= 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partners": [1, 0, 2, 2]}, "partners must pair ranks 0..3"),
        ({"partners": [1, 0]}, "partners must pair ranks 0..3"),
        ({"kept": KeptBytes([1, 2])}, "kept whole must be 4 numbers of at least 0, found"),
        ({"budget_bytes": [1, 2, 3, -1]}, "budget_bytes must be 4 numbers of at least 0, found"),
        ({"kept": KeptBytes([1, 2, 3, float("nan")])}, "kept whole must be 4 numbers of at least 0, found"),
    ],
)
def test_wrong_arguments_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        balance(one_f_one_b(4, 4), **changes)


def test_partners_may_be_given():
    assert balance(one_f_one_b(4, 8), partners=[1, 0, 3, 2]).partners == (1, 0, 3, 2)


def test_what_is_balanced_already_is_refused():
    with pytest.raises(UserError, match="the schedule evicts already"):
        balance(balance(one_f_one_b(4, 8)))


def test_one_rank_has_nobody():
    assert num_moved(balance(one_f_one_b(1, 4)), Kind.EVICT) == [0]


def test_gathers_may_be_added_before_and_behind():
    plain = make_schedule("depth-first", pp=4, loops=2, num_microbatches=8)
    costs = Costs(1, 2, evict_s=1)
    behind = add_unshard(balance(plain), 1, 1)
    before = balance(add_unshard(lower(plain), 1, 1))
    assert compute_rows(behind) == compute_rows(before) == compute_rows(plain)
    assert peaks(behind, costs) == peaks(before, costs)
    assert sum(num_moved(before, Kind.EVICT)) > 0


def test_split_backwards_and_token_slices_come_back_before_the_input_gradient():
    plain = parse_schedule(
        "0F0 0F0.1 0F1 0F1.1 0F2 0F2.1 0I0.1 0W0.1 0I0 0W0 0I1.1 0I1 0W1.1 0W1 0B2.1 0B2\n"
        "1F0 1F0.1 1I0.1 1W0.1 1I0 1W0 1F1 1F1.1 1I1.1 1I1 1W1.1 1W1 1F2 1F2.1 1B2.1 1B2\n"
    )
    costs = Costs(1, 2, evict_s=1)
    balanced = balance(plain)
    assert plain.num_slices == 2
    assert (max(peaks(plain, costs)), max(peaks(balanced, costs))) == (3, 2)
    assert simulate(balanced, costs).end_s == simulate(plain, costs).end_s
    loaded = [action for action in balanced.rows[0] if action.kind is Kind.LOAD]
    assert loaded
    for action in loaded:
        backward = balanced.facts.action(balanced.facts.input_gradients[action[1:]])
        assert balanced.rows[0].index(action) < balanced.rows[0].index(backward)
