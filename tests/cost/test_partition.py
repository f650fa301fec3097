"""The partition is as good as the best of all partitions, found by trying them."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost import partition
from pipeloom.cost.partition import fastest_partition
from pipeloom.errors import UserError
from pipeloom.schedule import PLACEMENTS, Placement


def is_by_rounds(seconds, placement):
    """Whether layers are uneven and a rank has several stages."""
    return placement.num_stages > placement.num_ranks and len(set(seconds[1:-1])) > 1


def judged(seconds, placement, slowness, sizes):
    """Slowest rank, slowest stage and the stages' squares; where rounds count: those, slowest rank and squares."""
    cuts = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    owner = placement.rank_by_stage
    stages = [slowness[rank] * sum(seconds[a:b]) for rank, (a, b) in zip(owner, pairwise(cuts), strict=True)]
    ranks = [sum(stages[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    squares = sum(value * value for value in stages)
    if not is_by_rounds(seconds, placement):
        return max(ranks), max(stages), squares
    number = [owner[:stage].count(rank) for stage, rank in enumerate(owner)]
    rounds = [max(s for s, n in zip(stages, number, strict=True) if n == this) for this in set(number)]
    return sum(rounds), max(ranks), squares


def best_by_trying(seconds, placement, slowness):
    """The least of ``judged`` over all partitions; whole numbers, so that nothing is rounded."""
    return min(
        judged(seconds, placement, slowness, [b - a for a, b in pairwise([0, *cuts, len(seconds)])])
        for cuts in combinations(range(1, len(seconds)), placement.num_stages - 1)
    )


@st.composite
def placements(draw, most_stages=6):
    """A named placement, or any map of stages to ranks."""
    if draw(st.booleans()):
        pp = draw(st.integers(1, most_stages))
        name = draw(st.sampled_from(sorted(PLACEMENTS)))
        return PLACEMENTS[name](pp, draw(st.integers(1, most_stages // pp)))
    owner = draw(st.lists(st.integers(0, 3), min_size=1, max_size=most_stages))
    return Placement(tuple(sorted(set(owner)).index(rank) for rank in owner))


@st.composite
def questions(draw, are_equal):
    """(seconds, placement, slowness), small enough to try everything."""
    placement = draw(placements())
    num_pieces = draw(st.integers(placement.num_stages, 10))
    seconds = draw(st.lists(st.integers(0, 9), min_size=num_pieces, max_size=num_pieces))
    if are_equal:
        seconds[1:-1] = [draw(st.integers(0, 5))] * (num_pieces - 2) if num_pieces > 2 else []
    ranks = placement.num_ranks
    slowness = draw(st.one_of(st.none(), st.lists(st.integers(1, 4), min_size=ranks, max_size=ranks)))
    return seconds, placement, slowness


@pytest.mark.parametrize("are_equal", [True, False])
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_no_partition_is_better(are_equal, data):
    seconds, placement, slowness = data.draw(questions(are_equal))
    sizes = fastest_partition(seconds, placement, slowness)
    assert len(sizes) == placement.num_stages
    assert sum(sizes) == len(seconds)
    assert min(sizes) >= 1
    slowness = slowness or [1] * placement.num_ranks
    assert judged(seconds, placement, slowness, sizes) == best_by_trying(seconds, placement, slowness)


@pytest.mark.parametrize(
    "placement", [Placement.looped(2, 2), Placement.v(2, 2), Placement.v(3), Placement.linear(2, 3)]
)
@pytest.mark.parametrize("ends", [(0, 0), (1, 7), (7, 1), (4, 12)])
@pytest.mark.parametrize("slowness", [None, (1, 2), (3, 1)])
def test_equal_layers_in_every_number(placement, ends, slowness):
    slow = [*(slowness or ()), *[1] * placement.num_ranks][: placement.num_ranks]
    for layers in range(placement.num_stages, 11):
        seconds = [ends[0], *[3] * layers, ends[1]]
        sizes = fastest_partition(seconds, placement, slow)
        assert judged(seconds, placement, slow, sizes) == best_by_trying(seconds, placement, slow)


@settings(deadline=None, max_examples=60)
@given(question=questions(are_equal=False))
def test_the_search_for_many_pieces_is_never_worse_than_even_stages(nothing_is_tried, question):
    seconds, placement, slowness = question
    slow = slowness or [1] * placement.num_ranks
    found = judged(seconds, placement, slow, fastest_partition(seconds, placement, slowness))
    alone = Placement(tuple(range(placement.num_stages)))
    even_stages = fastest_partition(seconds, alone, [slow[rank] for rank in placement.rank_by_stage])
    assert found[0] <= judged(seconds, placement, slow, even_stages)[0]


@pytest.fixture(scope="module")
def nothing_is_tried():
    """As where there are too many cuts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "FEW", 0)
        yield


def test_the_search_finds_an_even_partition_that_is_there(nothing_is_tried):
    # every stage can have exactly 8: the ends count as 4 each
    seconds = [4, *[1, 3] * 30, 4]
    placement = Placement.looped(4, 4)
    found = judged(seconds, placement, [1] * 4, fastest_partition(seconds, placement))
    assert found[:2] == (32, 32)


def test_long_stages_come_at_the_same_time():
    # two ranks could have 8 each as (2, 6), (6, 2); a round would wait for its 6 each time
    seconds = [0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 0]
    sizes = fastest_partition(seconds, Placement.looped(2, 2))
    assert judged(seconds, Placement.looped(2, 2), [1, 1], sizes)[:2] == (8, 8)


def test_layers_left_over_go_to_different_ranks():
    seconds = [0, *[1] * 6, 0]
    assert fastest_partition(seconds, Placement.looped(2, 2)) in {
        (2, 1, 2, 3),
        (3, 2, 1, 2),
        (2, 2, 2, 2),
        (3, 1, 1, 3),
    }
    ranks = judged(seconds, Placement.looped(2, 2), [1, 1], fastest_partition(seconds, Placement.looped(2, 2)))
    assert ranks[:2] == (3, 2)


def test_the_order_of_the_three_wishes():
    # rank 1 has the head and one layer, rank 0 the other five, though no stage but the last needed more than two
    assert fastest_partition([0, *[1] * 6, 4], Placement.looped(2, 2)) == (3, 1, 3, 1)


def test_a_slow_rank_gets_less():
    assert fastest_partition([0, *[1] * 12, 0], Placement.looped(3), (1, 1, 2)) == (6, 5, 3)


@pytest.mark.parametrize("placement", [Placement.looped(4), Placement.looped(2, 2)])
def test_more_stages_than_pieces_are_refused(placement):
    with pytest.raises(UserError, match="cannot cut 3 pieces into 4 stages"):
        fastest_partition([1, 1, 1], placement)
