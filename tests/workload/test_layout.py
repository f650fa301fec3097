"""Ranks and coordinates."""

import pytest

from pipeloom.workload.layout import Coordinates, Layout

LAYOUT = Layout(pp=3, dp=4, tp=2, replicate=2, num_microbatches=5, microbatch_size=7)


def test_every_rank_has_its_own_coordinates_and_they_lead_back():
    places = [LAYOUT.coordinates(rank) for rank in range(LAYOUT.num_ranks)]
    assert len(set(places)) == LAYOUT.num_ranks == 24
    assert [LAYOUT.rank_at(place) for place in places] == list(range(24))
    assert {tuple(map(max, zip(*places, strict=True)))} == {(2, 3, 1)}


def test_the_tensor_axis_is_innermost_then_data_then_pipeline():
    assert [LAYOUT.coordinates(rank) for rank in (0, 1, 2, 8)] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(1, 0, 0),
    ]
    neighbor = LAYOUT.rank_at(Coordinates(pipeline=1, data=0, tensor=0))
    assert neighbor == LAYOUT.dp * LAYOUT.tp


def test_an_order_of_pipeline_ranks_gives_each_its_place():
    layout = Layout(pp=4, dp=1, tp=2, pipeline_order=(0, 3, 1, 2))
    assert [layout.coordinates(rank).pipeline for rank in range(8)] == [0, 0, 3, 3, 1, 1, 2, 2]
    assert [layout.rank_at(layout.coordinates(rank)) for rank in range(8)] == list(range(8))
    assert layout.pipelines() == [[0, 4, 6, 2], [1, 5, 7, 3]]
    assert sorted(layout.tensor_groups()) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_batch_goes_over_all_replicas():
    assert LAYOUT.batch_size == 4 * 5 * 7


@pytest.mark.parametrize("size", [1, 2])
def test_without_data_and_tensor_axes_a_rank_is_a_pipeline_rank(size):
    layout = Layout(pp=size)
    assert [layout.coordinates(rank).pipeline for rank in range(layout.num_ranks)] == list(range(size))


def test_ranks_of_one_copy_are_neighbors_and_copies_hold_the_same_shard():
    layout = Layout(pp=2, dp=4, replicate=2, shard="full")
    assert layout.shard_size == 2
    assert layout.shard_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.copy_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.pipelines() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(("shard", "size"), [("none", 1), ("optimizer", 4), ("gradients", 4), ("full", 4)])
def test_without_hybrid_sharding_there_is_one_copy_or_nothing_is_shared(shard, size):
    layout = Layout(pp=2, dp=4, shard=shard)
    assert {len(group) for group in layout.shard_groups()} == {size}
    assert {len(group) for group in layout.copy_groups()} == {4 // size}
    for groups in (layout.shard_groups(), layout.copy_groups(), layout.pipelines()):
        assert sorted(rank for group in groups for rank in group) == list(range(8))


def test_ranks_that_share_experts_are_neighbors_and_those_with_the_same_ones_a_stride_apart():
    layout = Layout(pp=2, tp=2, dp=4, ep=2, shard="full")
    assert layout.expert_groups()[:4] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.same_expert_groups()[:4] == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert layout.lockstep_groups()[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (layout.expert_shard, Layout(pp=1, dp=2, ep=2, shard="full").expert_shard) == ("full", "none")


def test_fewer_replicas_keep_the_ranks_that_share_state_and_one_alone_shares_none():
    layout = Layout(pp=2, dp=8, replicate=4, shard="full", num_microbatches=6)
    assert [(one.dp, one.replicate, one.shard) for one in layout.with_fewer_replicas(16)] == [
        (6, 3, "full"),
        (4, 2, "full"),
        (3, None, "full"),
        (2, None, "full"),
        (1, None, "none"),
    ]
    of_context = Layout(pp=1, dp=2, cp=2, shard="full", num_microbatches=1)
    assert [(one.dp, one.shard) for one in of_context.with_fewer_replicas(2)] == [(1, "full")]


def test_fewer_replicas_share_experts_where_they_still_divide_them():
    layout = Layout(pp=1, dp=4, ep=4, num_microbatches=3)
    assert [(one.dp, one.ep, one.num_microbatches) for one in layout.with_fewer_replicas(3)] == [
        (3, 1, 4),
        (2, 2, 6),
        (1, 1, 12),
    ]
