"""What the search of an order finds is no slower than any family, keeps the memory, and is the same twice."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pipeloom.cost.costs import StageCosts
from pipeloom.errors import UserError
from pipeloom.families import FAMILIES
from pipeloom.families.greedy import choice_on
from pipeloom.orders.search import search_order
from pipeloom.orders.work import ROUNDING, Work
from pipeloom.passes import add_data_parallel, exchanges, join_backward, lower, split_backward
from pipeloom.schedule import PLACEMENTS, Kind, parse_schedule
from pipeloom.schedule.ledger import KeptBytes, most_in_rows
from pipeloom.simulation import simulate

SECONDS = st.integers(1, 5).map(float)


def sharded(schedule):
    return add_data_parallel(lower(schedule), *exchanges("full", residency=2, prefetch=1, gradient_buffers=2))


@st.composite
def works(draw):
    pp, loops = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    placement = draw(st.sampled_from(list(PLACEMENTS.values())))(pp, loops)
    stages, count = placement.num_stages, draw(st.integers(2, 4))

    def each(values):
        return tuple(draw(st.lists(values, min_size=stages, max_size=stages)))

    kept = each(SECONDS)
    work = Work(
        start=choice_on("gpipe" if loops == 1 else "breadth-first", placement, count).make(),
        complete=draw(st.sampled_from([lower, sharded])),
        costs=StageCosts(
            forward_s=each(SECONDS),
            backward_s=each(SECONDS),
            transfer_s=draw(st.sampled_from([0.0, 0.5, 4.0])),
            unshard_s=each(SECONDS),
            reduce_s=each(SECONDS),
        ),
        kept=KeptBytes(kept, draw(st.sampled_from([(), tuple(size / 2 for size in kept)]))),
        room=(0.0,) * pp,
        splits=draw(st.booleans()),
    )
    most = [sum(kept[stage] for stage in placement.stages_of(rank)) * count for rank in range(pp)]
    return Work(**(vars(work) | {"room": tuple(each * draw(st.sampled_from([1.0, 1.0, 0.75])) for each in most)}))


@settings(max_examples=5, deadline=None)
@given(works())
def test_it_is_no_slower_than_a_family_keeps_the_memory_and_is_the_same_twice(work):
    found = search_order(work, 25)
    whole = work.complete(found.schedule)
    assert simulate(whole, work.costs).end_s == pytest.approx(found.step_s)
    assert found.least_s <= found.step_s * ROUNDING
    held = most_in_rows(found.schedule, work.kept)
    assert all(most <= room * ROUNDING for most, room in zip(held, work.room, strict=True))
    for name, family in FAMILIES.items():
        choice = choice_on(name, work.start.placement, work.start.num_microbatches) if family.has_backward else None
        if choice is None or (family.splits_backward and not work.splits) or not work.has_room(choice.make()):
            continue
        assert found.step_s <= simulate(work.complete(choice.make()), work.costs).end_s * ROUNDING
    assert work.splits or not found.schedule.split_stages
    assert search_order(work, 25) == found


def test_changes_make_an_order_faster():
    placement = PLACEMENTS["v"](3, 2)
    prices = StageCosts(forward_s=(1.0,) * 6, backward_s=(2.0,) * 6, transfer_s=3.0)
    start = choice_on("breadth-first", placement, 5).make()
    work = Work(start=start, complete=lower, costs=prices, room=(10.0,) * 3)
    found = search_order(work, 300)
    assert found.least_s <= found.step_s < found.candidate_s <= found.family_s
    assert found.origin.endswith(", changed")
    assert search_order(work, 0).step_s == found.candidate_s


def test_too_little_memory_is_refused():
    placement = PLACEMENTS["looped"](2, 1)
    prices = StageCosts(forward_s=(1.0,) * 2, backward_s=(2.0,) * 2)
    start = choice_on("1f1b", placement, 4).make()
    work = Work(start=start, complete=lower, costs=prices, room=(0.5, 0.5))
    with pytest.raises(UserError, match="within the memory of all ranks"):
        search_order(work, 10)


def test_halves_that_follow_each_other_are_joined_again():
    schedule = parse_schedule("0F0 0F1 0B0 0B1")
    (row,) = split_backward(schedule, 0).rows
    assert " ".join(map(str, row)) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert join_backward(row) == schedule.rows[0]
    assert " ".join(map(str, join_backward(split_backward(schedule, 1).rows[0]))) == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert not any(action.kind is Kind.BACKWARD for action in row)
