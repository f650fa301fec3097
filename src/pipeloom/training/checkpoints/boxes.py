"""Elements that are contiguous in a flattened tensor, as boxes of the tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """A box of a tensor's elements.

    Attributes:
        begin: index of its first element along each dim.
        size: elements along each dim, none of them 0.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]


def boxes_of(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """Cut the elements first..end-1 of a tensor, counted in row-major order, into boxes.

    Each box is contiguous in the interval and they come in its order, so the interval's elements, cut at the boxes'
    sizes, are the boxes' elements. An interval of a matrix is at most the end of a row, whole rows, and the beginning
    of a row; of ``n`` dims it is at most ``2 n - 1`` boxes.
    """
    assert 0 <= first <= end <= prod(shape), f"elements {first} to {end} of a tensor of shape {shape}"
    if first == end:
        return
    # A scalar is one box without dims; of a vector every interval is a box.
    if len(shape) < 2:
        yield Box((first,), (end - first,)) if shape else Box((), ())
        return
    size = prod(shape[1:])
    (row, column), (last_row, last_column) = divmod(first, size), divmod(end, size)
    if row == last_row:
        yield from _in_row(shape, row, column, last_column)
        return
    # The rest of a row that was begun in the middle; whole rows follow as one box.
    if column:
        yield from _in_row(shape, row, column, size)
        row += 1
    if row < last_row:
        yield Box((row, *[0] * len(shape[1:])), (last_row - row, *shape[1:]))
    yield from _in_row(shape, last_row, 0, last_column)


def _in_row(shape: tuple[int, ...], row: int, first: int, end: int) -> Iterator[Box]:
    """Boxes of an interval within one index of the first dim."""
    return (Box((row, *box.begin), (1, *box.size)) for box in boxes_of(shape[1:], first, end))


@dataclass(frozen=True)
class Elements:
    """The elements of a parameter that a rank holds: contiguous in its tensor-parallel part of it.

    Attributes:
        values: flat, in row-major order of the part.
        whole: shape of the whole parameter.
        corner: index of the part's first element along each dim of the whole.
        part: shape of the part.
        first: the first element that is held, counted in the part.
    """

    values: Tensor
    whole: tuple[int, ...]
    corner: tuple[int, ...]
    part: tuple[int, ...]
    first: int

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Boxes of the whole parameter, in the order of the elements, each with a view of its values."""
        boxes = [
            Box(tuple(map(sum, zip(self.corner, box.begin, strict=True))), box.size)
            for box in boxes_of(self.part, self.first, self.first + len(self.values))
        ]
        # Views: what is loaded goes straight into the weights, and what is saved is copied nowhere.
        views = self.values.split([prod(box.size) for box in boxes])
        return [(box, view.view(box.size)) for box, view in zip(boxes, views, strict=True)]
