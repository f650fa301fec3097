"""Stage -> pipeline rank."""

import pytest

from pipeloom.errors import UserError
from pipeloom.schedule import PLACEMENTS, Placement


@pytest.mark.parametrize(
    ("name", "pp", "loops", "owners"),
    [
        ("looped", 4, 1, (0, 1, 2, 3)),
        ("looped", 2, 3, (0, 1, 0, 1, 0, 1)),
        ("looped", 1, 3, (0, 0, 0)),
        ("linear", 2, 3, (0, 0, 0, 1, 1, 1)),
        ("linear", 3, 1, (0, 1, 2)),
        ("v", 3, 2, (0, 1, 2, 2, 1, 0)),
        ("v", 2, 3, (0, 1, 1, 0, 0, 1)),
        ("v", 3, 1, (0, 1, 2)),
    ],
)
def test_stages_lie_where_the_name_says(name, pp, loops, owners):
    placement = PLACEMENTS[name](pp, loops)
    assert placement.rank_by_stage == owners
    assert placement.num_stages == pp * loops
    assert placement.num_ranks == pp


def test_a_rank_has_its_stages_in_ascending_order():
    placement = Placement((0, 1, 2, 2, 1, 0))
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_a_boundary_crosses_ranks_unless_both_stages_share_one():
    placement = Placement((0, 1, 1, 0))
    assert [placement.crosses(stage) for stage in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("owners", [(), (1,), (0, 2), (0, -1)])
def test_a_placement_that_leaves_a_rank_without_stage_is_refused(owners):
    with pytest.raises(UserError, match="every pipeline rank"):
        Placement(owners)
