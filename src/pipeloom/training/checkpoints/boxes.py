"""Decomposes an interval of a flattened tensor into boxes of the tensor."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from pipeloom.execute.stages.flat_order import FlatOrder


class Box(NamedTuple):
    """A rectangular block of a tensor.

    Attributes:
        begin: index of its first element along each dim.
        size: number of elements along each dim, none of them 0.
    """

    begin: tuple[int, ...]
    size: tuple[int, ...]


def boxes_of(shape: tuple[int, ...], first: int, end: int) -> Iterator[Box]:
    """Decompose elements first..end-1 of a tensor, counted in row-major order, into boxes.

    Each box is contiguous in the interval, and boxes are yielded in its order, so ``interval.split(sizes of the
    boxes)`` gives their elements. In a matrix an interval is at most the end of a row, whole rows, and the beginning of
    a row; in ``n`` dims it is at most ``2 n - 1`` boxes.
    """
    assert 0 <= first <= end <= prod(shape), f"elements {first} to {end} of a tensor of shape {shape}"
    if first == end:
        return
    # A scalar is one box without dims; in a vector every interval is a box.
    if len(shape) < 2:
        yield Box((first,), (end - first,)) if shape else Box((), ())
        return
    size = prod(shape[1:])
    (row, column), (last_row, last_column) = divmod(first, size), divmod(end, size)
    if row == last_row:
        yield from _in_row(shape, row, column, last_column)
        return
    # The end of a row that the interval enters in the middle; whole rows follow as one box.
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
    """The elements of a parameter that a rank holds: an interval of its flattened tensor-parallel part.

    Attributes:
        values: the elements, flat, in row-major order of the part.
        whole: shape of the whole parameter.
        corner: index of the part's first element along each dim of the whole parameter.
        part: shape of the part.
        first: index of the first held element in the flattened part.
    """

    values: Tensor
    whole: tuple[int, ...]
    corner: tuple[int, ...]
    part: tuple[int, ...]
    first: int

    def boxes(self) -> list[tuple[Box, Tensor]]:
        """Boxes of the whole parameter, in the order of ``values``, each with a view of its elements."""
        boxes = [
            Box(tuple(map(sum, zip(self.corner, box.begin, strict=True))), box.size)
            for box in boxes_of(self.part, self.first, self.first + len(self.values))
        ]
        # Views: loading writes directly into the weights, and saving copies nothing.
        views = self.values.split([prod(box.size) for box in boxes])
        return [(box, view.view(box.size)) for box, view in zip(boxes, views, strict=True)]


class Segment(NamedTuple):
    """What a rank holds of some parameters of a stage.

    Attributes:
        order: of the parameters in the segment's flat buffer.
        begin, size: of the rank's shard in it.
        among: index of this rank among those that hold the same shard, and their number.
        buffers: flat tensors of the shard: prefix of their keys, tensor, index of its first element.
    """

    order: FlatOrder
    begin: int
    size: int
    among: tuple[int, int]
    buffers: list[tuple[str, Tensor, int]]


def share_of(begin: int, size: int, share: tuple[int, int]) -> range:
    """The part of equal elements that a rank writes.

    Args:
        begin: index of the first element.
        size: their number.
        share: index of this rank among those that hold them, and the number of these ranks.
    """
    index, num_ranks = share
    return range(begin + size * index // num_ranks, begin + size * (index + 1) // num_ranks)
