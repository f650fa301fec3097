"""Spans: actions with their times, as a sequence over arrays."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import starmap
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule import Action, Row
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.lanes import Lane
from pipeloom.schedule.row import Ints


class Span(NamedTuple):
    """One action with its time.

    Attributes:
        action: the action.
        rank: the pipeline rank that ran it.
        lane: the lane that it occupied.
        start_s, end_s: seconds on a clock that all ranks of the trace share.
    """

    action: Action
    rank: int
    lane: Lane
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False, repr=False)
class Spans(Sequence[Span]):
    """An immutable sequence of spans in arrays, equal to any sequence of the same spans.

    Attributes:
        row: action of each span.
        rank: pipeline rank of each span.
        lane: for each span an index into ``lanes``.
        lanes: distinct lanes.
        start_s, end_s: seconds, for each span.
    """

    row: Row
    rank: Ints
    lane: Ints
    lanes: tuple[Lane, ...]
    start_s: Seconds
    end_s: Seconds

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Spans":
        """Spans in arrays; ``Spans`` are returned as they are."""
        if isinstance(spans, Spans):
            return spans
        spans = list(spans)
        number: dict[Lane, int] = {}
        lane = [number.setdefault(span.lane, len(number)) for span in spans]
        return cls(
            Row.of(span.action for span in spans),
            np.array([span.rank for span in spans], np.int32),
            np.array(lane, np.int32),
            tuple(number),
            np.array([span.start_s for span in spans], np.float64),
            np.array([span.end_s for span in spans], np.float64),
        )

    @property
    def duration_s(self) -> Seconds:
        """Duration of each span in seconds."""
        return self.end_s - self.start_s

    def on(self, name: str) -> NDArray[np.bool_]:
        """Mask of the spans whose lane has this name, such as ``compute``."""
        return np.array([lane.name == name for lane in self.lanes], np.bool_)[self.lane]

    @cached_property
    def by_lane(self) -> dict[tuple[int, Lane], NDArray[np.intp]]:
        """(rank, lane) -> indices of its spans, ascending."""
        key = self.rank.astype(np.int64) * max(len(self.lanes), 1) + self.lane
        # Stable, so that the indices of a lane stay ascending.
        order = np.argsort(key, kind="stable")
        begins = np.flatnonzero(np.diff(key[order], prepend=-1))
        groups = np.split(order, begins[1:]) if len(order) else []
        return {(int(self.rank[group[0]]), self.lanes[int(self.lane[group[0]])]): group for group in groups}

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> "Spans":
        """The spans at some indices, in a mask or in a slice."""
        arrays = (self.rank, self.lane, self.start_s, self.end_s)
        rank, lane, start_s, end_s = (array[index] for array in arrays)
        return replace(self, row=self.row.take(index), rank=rank, lane=lane, start_s=start_s, end_s=end_s)

    def __repr__(self) -> str:
        """Numbers of spans and of lanes."""
        return f"Spans({len(self)} of {len(self.by_lane)} lanes)"

    def __len__(self) -> int:
        """Number of spans."""
        return len(self.rank)

    def __iter__(self) -> Iterator[Span]:
        """The spans."""
        lanes = map(self.lanes.__getitem__, self.lane.tolist())
        columns = (self.row, self.rank.tolist(), lanes, self.start_s.tolist(), self.end_s.tolist())
        return starmap(Span, zip(*columns, strict=True))

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> "Spans": ...
    def __getitem__(self, index: int | slice) -> "Span | Spans":
        """A span, or the spans of a slice."""
        if isinstance(index, slice):
            return self.take(index)
        lane = self.lanes[int(self.lane[index])]
        return Span(self.row[index], int(self.rank[index]), lane, float(self.start_s[index]), float(self.end_s[index]))

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same spans in the same order."""
        if not isinstance(other, Sequence) or len(self) != len(other):
            return False
        return all(map(Span.__eq__, self, other))

    def __hash__(self) -> int:
        """Equal spans have equal hashes."""
        # Three of the arrays suffice: equal spans have equal arrays.
        return hash((self.row, self.start_s.tobytes(), self.end_s.tobytes()))
