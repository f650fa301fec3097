"""The partition is as good as the best of all partitions."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.config import ModelConfig
from pipeloom.cost.partition import balanced_partition
from pipeloom.errors import UserError
from pipeloom.planner.partition import default_partition


def slowest(costs, sizes):
    bounds = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    return max(sum(costs[begin:end]) for begin, end in pairwise(bounds))


def all_partitions(num_pieces, num_stages):
    for cuts in combinations(range(1, num_pieces), num_stages - 1):
        yield [end - begin for begin, end in pairwise([0, *cuts, num_pieces])]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_partition_has_a_faster_slowest_stage(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    sizes = balanced_partition(costs, num_stages)
    assert len(sizes) == num_stages
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert slowest(costs, sizes) == min(slowest(costs, other) for other in all_partitions(len(costs), num_stages))


def test_the_rest_is_even_too():
    assert balanced_partition([10, 1, 1, 1, 1], 3) == (1, 2, 2)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_more_stages_than_pieces_are_refused(num_stages):
    with pytest.raises(UserError, match="cannot cut 3 pieces"):
        balanced_partition([1, 1, 1], num_stages)


def test_the_head_counts_at_its_cost():
    small = ModelConfig(num_layers=14, hidden_size=64).resolve(vocab_size=257)
    large = ModelConfig(num_layers=14, hidden_size=64).resolve(vocab_size=20_000)
    assert default_partition(small, 64, 4) == (5, 4, 3, 4) or default_partition(small, 64, 4)[-1] >= 4
    assert default_partition(large, 64, 4)[-1] == 1
