"""No order takes less than the lower bound: of all orders of small cases, of an exact solver, of every family."""

from itertools import permutations, product

import pytest
from exact import Exact

from pipeloom.cost.costs import StageCosts
from pipeloom.errors import ScheduleError, UserError
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.families.greedy import choice_on
from pipeloom.orders.bound import least_step_s
from pipeloom.passes import add_data_parallel, exchanges, lower
from pipeloom.schedule import PLACEMENTS, Action, Kind, Placement, Schedule
from pipeloom.schedule.kinds import RECEIVE_KINDS
from pipeloom.simulation import Sharing, simulate

ALMOST = 1 + 1e-9


def costs(stages, seconds=(2.0, 1.0, 1.0), *, transfer_s=0.0, gather_s=0.0, reduce_s=0.0):
    forward_s, input_s, weight_s = seconds
    return StageCosts(
        forward_s=(forward_s,) * stages,
        backward_s=(input_s + weight_s,) * stages,
        weight_s=(weight_s,) * stages,
        transfer_s=transfer_s,
        unshard_s=(gather_s,) * stages,
        reduce_s=(reduce_s,) * stages,
    )


def sharded(schedule):
    return add_data_parallel(lower(schedule), *exchanges("full", residency=2, prefetch=1, gradient_buffers=None))


def uplinks(ranks):
    moving = (*RECEIVE_KINDS, Kind.UNSHARD, Kind.REDUCE_GRAD)
    return Sharing(lambda action, rank: rank if action.kind in moving else None, dict.fromkeys(range(ranks), 1.0))


def links(ranks):
    """What a rank receives goes through the uplink of the rank before, and collectives through its own two ends."""
    up, collectives = uplinks(ranks), (Kind.UNSHARD, Kind.REDUCE_GRAD)

    def uplink_of(action, rank):
        return up.resource_of(action, rank if action.kind in collectives else (rank - 1) % ranks)

    def downlink_of(action, rank):
        return None if up.resource_of(action, rank) is None else ("down", rank)

    return Sharing(uplink_of, up.capacity | {("down", rank): 1.0 for rank in range(ranks)}, onward_of=downlink_of)


def every_row(stages, count):
    """All orders of a rank's split backwards in which nothing precedes what its own rank computes for it."""
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    actions = [Action(kind, stage, m) for m in range(count) for stage in stages for kind in kinds]
    for row in permutations(actions):
        place = {action: number for number, action in enumerate(row)}
        if all(
            place[Action(kinds[n], stage, m)] < place[Action(kinds[n + 1], stage, m)]
            for m, stage, n in product(range(count), stages, range(2))
        ):
            yield row


@pytest.mark.parametrize("more", [{}, {"transfer_s": 1.5}, {"transfer_s": 0.5, "gather_s": 2.5, "reduce_s": 1.5}])
def test_none_of_all_orders_of_two_ranks_and_two_microbatches_takes_less(more):
    placement = Placement.looped(2, 1)
    best_s, found = float("inf"), None
    for rows in product(*(every_row(placement.stages_of(rank), 2) for rank in range(2))):
        try:
            found = sharded(Schedule(rows, placement, 2))
        except ScheduleError:  # it deadlocks
            continue
        best_s = min(best_s, simulate(found, costs(2, **more), uplinks(2)).end_s)
    least_s = least_step_s(found, costs(2, **more), uplinks(2))
    assert 0.85 * best_s <= least_s <= best_s * ALMOST


@pytest.mark.parametrize("make", [lambda pp: Placement.looped(pp, 1), lambda pp: PLACEMENTS["v"](pp, 2)])
@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 2, 1), (3, 2, 1)])
@pytest.mark.parametrize(("room", "over_s"), [(2, 0), (3, 1), (4, 2)])
def test_an_exact_solver_finds_none_that_takes_less(make, seconds, room, over_s):
    placement, count = make(2), 3
    stages = placement.num_stages
    exact = Exact(placement, count, [[each] * stages for each in seconds], [room] * 2, over_s=over_s)
    best_s, is_proven, _ = exact.solve(exact.makespan)
    assert is_proven
    schedule = lower(make_schedule("breadth-first", pp=2, loops=stages // 2, num_microbatches=count, placement="v"))
    most = (room,) * stages
    least_s = least_step_s(schedule, costs(stages, seconds, transfer_s=float(over_s)), most_inputs=most)
    # Looser where two stages of a rank share its room: the bound has a room for each stage.
    assert 0.7 * best_s <= least_s <= best_s * ALMOST


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("finish", [lower, sharded])
def test_no_family_takes_less(placement, finish):
    pp, loops = 3, 1 if placement == "linear" else 2
    where = PLACEMENTS[placement](pp, loops)
    for name, family in FAMILIES.items():
        choice = choice_on(name, where, 5) if family.has_backward else None
        if choice is None:
            continue
        schedule = finish(choice.make())
        for transfer_s, sharing in ((0.0, None), (3.0, uplinks(pp)), (3.0, links(pp))):
            prices = costs(where.num_stages, transfer_s=transfer_s, gather_s=2.0, reduce_s=3.0)
            step_s = simulate(schedule, prices, sharing).end_s
            most = [max(schedule.peak_stage_inputs)] * where.num_stages
            assert least_step_s(schedule, prices, sharing) <= step_s * ALMOST
            assert least_step_s(schedule, prices, sharing, most_inputs=most) <= step_s * ALMOST
            if not family.splits_backward:
                assert least_step_s(schedule, prices, sharing, splits=False) <= step_s * ALMOST


def test_it_is_reached_where_an_order_is_optimal():
    one_f_one_b = lower(make_schedule("1f1b", pp=4, num_microbatches=8))
    prices = costs(4)
    assert least_step_s(one_f_one_b, prices, splits=False) == pytest.approx(simulate(one_f_one_b, prices).end_s)
    # Zero bubble on the last rank: its start-up and its work, and no tail, since nobody waits for weight gradients.
    assert least_step_s(one_f_one_b, prices) == pytest.approx(3 * 2.0 + 8 * 4.0)


def test_less_room_makes_it_longer():
    schedule, prices = lower(make_schedule("1f1b", pp=4, num_microbatches=8)), costs(4)
    bounds = [least_step_s(schedule, prices, most_inputs=[room] * 4) for room in (1, 2, 4, 8)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]


def test_token_slices_have_none():
    schedule = make_schedule("breadth-first", pp=2, num_microbatches=2, num_slices=2)
    with pytest.raises(UserError, match="whole micro-batches, found 2 token slices"):
        least_step_s(schedule, costs(2))
