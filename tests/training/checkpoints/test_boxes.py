"""An interval of a flattened tensor as boxes of it."""

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.training.checkpoints.boxes import Box, Elements, boxes_of


@st.composite
def intervals(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    first, end = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, first, end


def elements_of(box, array):
    return array[tuple(slice(begin, begin + size) for begin, size in zip(box.begin, box.size, strict=True))]


@given(intervals())
def test_the_boxes_elements_are_the_intervals_in_its_order(interval):
    shape, first, end = interval
    array = np.arange(prod(shape)).reshape(shape)
    boxes = list(boxes_of(shape, first, end))
    found = [elements_of(box, array).ravel() for box in boxes]
    assert np.concatenate([[], *found]).tolist() == list(range(first, end))
    assert all(part.shape == (prod(box.size),) for part, box in zip(found, boxes, strict=True))
    assert all(prod(box.size) > 0 for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(intervals(), st.data())
def test_an_interval_of_a_part_lies_where_the_part_does(interval, data):
    part, first, end = interval
    corner = tuple(data.draw(st.integers(0, 3)) for _ in part)
    whole = tuple(begin + size + data.draw(st.integers(0, 3)) for begin, size in zip(corner, part, strict=True))
    array = np.arange(prod(whole)).reshape(whole)
    expected = elements_of(Box(corner, part), array).ravel()[first:end]
    found = Elements(torch.from_numpy(expected), whole, corner, part, first).boxes()
    assert all(np.array_equal(elements_of(box, array), view.numpy()) for box, view in found)
    assert sum(view.numel() for _, view in found) == len(expected)


@pytest.mark.parametrize(
    ("first", "end", "boxes"),
    [
        (2, 12, [Box((0, 2), (1, 2)), Box((1, 0), (2, 4))]),
        (2, 15, [Box((0, 2), (1, 2)), Box((1, 0), (2, 4)), Box((3, 0), (1, 3))]),
        (4, 15, [Box((1, 0), (2, 4)), Box((3, 0), (1, 3))]),
        (5, 7, [Box((1, 1), (1, 2))]),
        (6, 10, [Box((1, 2), (1, 2)), Box((2, 0), (1, 2))]),
        (0, 16, [Box((0, 0), (4, 4))]),
        (7, 7, []),
    ],
)
def test_a_matrix_is_cut_into_the_end_of_a_row_whole_rows_and_the_beginning_of_one(first, end, boxes):
    assert list(boxes_of((4, 4), first, end)) == boxes


def test_an_interval_beyond_the_tensor_is_a_bug():
    with pytest.raises(AssertionError, match="elements 3 to 17 of a tensor of shape"):
        list(boxes_of((4, 4), 3, 17))
