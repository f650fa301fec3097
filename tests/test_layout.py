"""Ranks and coordinates."""

import pytest

from pipeloom.layout import Coordinates, Layout

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


def test_a_batch_goes_over_all_replicas():
    assert LAYOUT.batch_size == 4 * 5 * 7


@pytest.mark.parametrize("size", [1, 2])
def test_without_data_and_tensor_axes_a_rank_is_a_pipeline_rank(size):
    layout = Layout(pp=size)
    assert [layout.coordinates(rank).pipeline for rank in range(layout.num_ranks)] == list(range(size))
