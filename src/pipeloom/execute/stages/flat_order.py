"""Order of the parameters in the flat buffer of a stage."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from torch import Tensor

from pipeloom.workload.packing import pack


class Overlap(NamedTuple):
    """The intersection of a parameter with an interval of a stage's flat buffer.

    Attributes:
        name: of the parameter.
        first: its first element, as row-major index in the parameter.
        begin: its first element, as index in the flat buffer.
        end: the index in the flat buffer behind its last element.
    """

    name: str
    first: int
    begin: int
    end: int


class Place(NamedTuple):
    """A parameter's place in a stage's flat buffer.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        begin: index of its first element in the buffer.
        decays: whether it has weight decay.
        is_replicated: whether every tensor-parallel rank holds it whole.
        is_whole: whether it lies in one shard, and is updated as a whole.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    decays: bool
    is_replicated: bool
    is_whole: bool

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """The index in the buffer behind its last element."""
        return self.begin + self.size


class Unit(NamedTuple):
    """Elements of a flat buffer that the optimizer updates as one parameter.

    Attributes:
        begin: index of the first one.
        end: index behind the last one.
        decays: whether they have weight decay.
        whole: the parameter that they are, if it is updated as a whole.
    """

    begin: int
    end: int
    decays: bool
    whole: Place | None


def nothing_whole(name: str, shape: tuple[int, ...]) -> bool:  # noqa: ARG001
    """Let shards be cut at any element."""
    return False


@dataclass(frozen=True)
class FlatOrder:
    """Layout of the parameters in a stage's flat buffer.

    Parameters with weight decay, which are those of two dims and more, are first, so that those of a shard are a slice.
    The parameters that every tensor-parallel rank holds whole are next to the border on both sides, so that they are a
    slice, too. Zeros pad the buffer to a multiple of the number of shards.

    Where some parameters must be whole in a shard, they follow all others, each in the shard that has most room, and
    zeros pad every shard to the size of the fullest one.

    Attributes:
        places: of the parameters, in the order of the buffer.
        size: elements of the buffer.
    """

    places: tuple[Place, ...]
    size: int

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Tensor]],
        num_shards: int,
        replicated: Collection[str] = (),
        is_whole: Callable[[str, tuple[int, ...]], bool] = nothing_whole,
    ) -> "FlatOrder":
        """The layout of named parameters.

        Args:
            parameters: name and tensor of each.
            num_shards: equal parts of the buffer, each held by one rank.
            replicated: names of those that every tensor-parallel rank holds whole.
            is_whole: (name, shape) -> whether no shard may hold a part of it only.
        """

        def part(place: Place) -> int:
            # Split and decayed, replicated and decayed, replicated, split.
            return int(place.is_replicated) if place.decays else 3 - int(place.is_replicated)

        found: list[Place] = []
        for name, tensor in parameters:
            shape = tuple(tensor.shape)
            found.append(Place(name, shape, 0, tensor.ndim >= 2, name in replicated, is_whole(name, shape)))
        found.sort(key=part)  # stable: the module's order in each part
        cut, whole = ([place for place in found if place.is_whole is is_one] for is_one in (False, True))
        *begins, before = accumulate((place.size for place in cut), initial=0)
        share, offsets = pack([place.size for place in whole], before, num_shards)
        placed = zip((*cut, *whole), (*begins, *offsets), strict=True)
        places = sorted((place._replace(begin=begin) for place, begin in placed), key=lambda place: place.begin)
        return cls(tuple(places), share * num_shards)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of the buffer."""
        return {place.name: place.shape for place in self.places}

    @cached_property
    def replicated(self) -> tuple[slice, ...]:
        """Ranges of the elements that every tensor-parallel rank holds."""
        runs: list[slice] = []
        for place in self.places:
            if place.is_replicated:
                joins = runs and runs[-1].stop == place.begin
                begin = runs.pop().start if joins else place.begin
                runs.append(slice(begin, place.end))
        return tuple(runs)

    def num_parameters(self, *, with_replicated: bool) -> int:
        """Number of elements without padding, with or without those that every tensor-parallel rank holds."""
        return sum(place.size for place in self.places if with_replicated or not place.is_replicated)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a buffer, in its shape."""
        return {place.name: buffer[place.begin : place.end].view(place.shape) for place in self.places}

    def overlaps(self, begin: int, end: int) -> Iterator[Overlap]:
        """Nonempty intersections of an interval of the buffer with parameters, in the order of the buffer."""
        for place in self.places:
            low, high = max(begin, place.begin), min(end, place.end)
            if low < high:
                yield Overlap(place.name, low - place.begin, low, high)

    def units(self, begin: int, end: int) -> list[Unit]:
        """Cut an interval of the buffer, a shard, into what the optimizer updates as one parameter.

        Neighbors with equal weight decay are one, but for those that are updated as a whole. Padding has no decay.
        """
        found: list[Unit] = []

        def add(low: int, high: int, place: Place | None) -> None:
            whole, decays = place if place is not None and place.is_whole else None, place is not None and place.decays
            last = found[-1] if found else None
            if last is not None and whole is last.whole is None and decays == last.decays:
                low = found.pop().begin
            if low < high:
                found.append(Unit(low, high, decays, whole))

        at = begin
        for place in self.places:
            low, high = max(begin, place.begin), min(end, place.end)
            if low < high:
                add(at, low, None)
                add(low, high, place)
                at = high
        add(at, end, None)
        return found
