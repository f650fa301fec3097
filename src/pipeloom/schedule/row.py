"""A row: the actions of one pipeline rank in a step, a sequence that is stored in arrays.

A step of a large run has millions of actions. Arrays let compiled loops make, check and price them; the sequence
interface returns ``Action`` tuples.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import starmap
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import KINDS, Kind

# The least int32: no text of an action has a number below 0.
NO_MICROBATCH = -(2**31)
"""Micro-batch ``None`` in arrays."""

_MOST_SHOWN = 64
"""Actions that a row's repr lists."""
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@lru_cache(maxsize=256)
def is_one_of(kinds: tuple[Kind, ...]) -> Bools:
    """[code] whether a kind is one of these. The table is shared: callers must not write to it."""
    wanted = np.zeros(len(KINDS), np.bool_)
    wanted[[kind.code for kind in kinds]] = True
    return wanted


class Row(Sequence[Action]):
    """Actions in the order in which a rank issues them; immutable, equal to any sequence of the same actions.

    Attributes:
        kind: for each action the code of its kind (``Kind.code``).
        stage: for each action its stage.
        microbatch: for each action its micro-batch, ``NO_MICROBATCH`` for none.
        slice: for each action its token slice.
    """

    __slots__ = ("kind", "microbatch", "slice", "stage")

    def __init__(self, kind: Ints, stage: Ints, microbatch: Ints, part: Ints) -> None:
        self.kind, self.stage, self.microbatch, self.slice = kind, stage, microbatch, part

    @classmethod
    def of(cls, actions: Iterable[Action]) -> "Row":
        """The row of some actions.

        Raises:
            ScheduleTextError: a number is beyond 32 bits.
        """
        if isinstance(actions, Row):
            return actions
        actions = list(actions)
        numbers = [
            (kind.code, stage, NO_MICROBATCH if microbatch is None else microbatch, part)
            for kind, stage, microbatch, part in actions
        ]
        try:
            table = np.array(numbers, dtype=np.int32).reshape(-1, 4)
        except OverflowError:
            found = next(a for a in actions if max(map(abs, (a.stage, a.microbatch or 0, a.slice))) >= 2**31)
            raise ScheduleTextError(f"expected stages and micro-batches below 2 ** 31, found {found}") from None
        # Columns that are contiguous: kernels run over each of them.
        return cls(*np.ascontiguousarray(table.T))

    @classmethod
    def grid(cls, kind: Kind, stages: Sequence[int], microbatches: Sequence[int]) -> "Row":
        """One kind of action, stage after stage, in each stage for all micro-batches."""
        count = len(stages) * len(microbatches)
        return cls(
            np.full(count, kind.code, np.int32),
            np.repeat(np.asarray(stages, np.int32), len(microbatches)),
            np.tile(np.asarray(microbatches, np.int32), len(stages)),
            np.zeros(count, np.int32),
        )

    @classmethod
    def join(cls, rows: Sequence["Row"]) -> "Row":
        """One row after the other."""
        return cls(*(np.concatenate(parts) for parts in zip(*(row.arrays for row in rows), strict=True)))

    def alternate(self, other: "Row") -> "Row":
        """The first action of this row, the first of the other, the second of this, and so on; both equally long."""
        pairs = zip(self.arrays, other.arrays, strict=True)
        return Row(*(np.stack([mine, theirs], axis=1).reshape(-1) for mine, theirs in pairs))

    def insert(self, after: Sequence[int], actions: "Row") -> "Row":
        """The row with actions inserted.

        Args:
            after: for each action the slot that it follows, ascending; -1: before the first.
            actions: as many; those behind the same slot keep their order.
        """
        places = np.asarray(after, np.intp) + np.arange(1, len(actions) + 1)
        is_own = np.ones(len(self) + len(actions), np.bool_)
        is_own[places] = False
        arrays = [np.empty(len(is_own), np.int32) for _ in self.arrays]
        for array, mine, theirs in zip(arrays, self.arrays, actions.arrays, strict=True):
            array[is_own], array[places] = mine, theirs
        return Row(*arrays)

    def with_actions(self, added: Iterable[tuple[int, float, Action]]) -> "Row":
        """The row with actions inserted, given in any order as (slot that it follows, order there, action).

        Those with the same slot and order keep their order.
        """
        added = sorted(added, key=lambda entry: entry[:2])
        return self.insert([slot for slot, _, _ in added], Row.of(action for _, _, action in added))

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Kind, stage, micro-batch and slice of every action."""
        return self.kind, self.stage, self.microbatch, self.slice

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_] | slice) -> "Row":
        """The actions at some places."""
        return Row(*(array[index] for array in self.arrays))

    def is_kind(self, *kinds: Kind) -> NDArray[np.bool_]:
        """For each action whether it is of one of these kinds."""
        return is_one_of(kinds)[self.kind]  # a look-up in a small table; np.isin would sort the row

    def __len__(self) -> int:
        """Number of actions."""
        return len(self.kind)

    def __iter__(self) -> Iterator[Action]:
        """The actions."""
        kinds = map(KINDS.__getitem__, self.kind.tolist())
        microbatches = (None if number == NO_MICROBATCH else number for number in self.microbatch.tolist())
        return starmap(Action, zip(kinds, self.stage.tolist(), microbatches, self.slice.tolist(), strict=True))

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> "Row": ...
    def __getitem__(self, index: int | slice) -> "Action | Row":
        """One action, or a part of the row."""
        if isinstance(index, slice):
            return self.take(index)
        kind, stage, microbatch, part = (int(array[index]) for array in self.arrays)
        return Action(KINDS[kind], stage, None if microbatch == NO_MICROBATCH else microbatch, part)

    def __add__(self, other: "Row") -> "Row":
        """This row, then the other."""
        return Row.join([self, other])

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same actions in the same order."""
        if isinstance(other, Row):
            return all(map(np.array_equal, self.arrays, other.arrays))
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Action.__eq__, self, other))

    def __hash__(self) -> int:
        """Equal rows have equal hashes; a row's is not that of a tuple of its actions."""
        return hash(tuple(array.tobytes() for array in self.arrays))

    def __repr__(self) -> str:
        """The actions' texts; of a long row those of its two ends."""
        if len(self) <= _MOST_SHOWN:
            return f"Row({' '.join(map(str, self))})"
        begin, end = (" ".join(map(str, part)) for part in (self[:8], self[-8:]))
        return f"Row({begin} ... {end}; {len(self):,} actions)"


class Columns(NamedTuple):
    """All rows of a schedule, one after the other: what compiled loops run over.

    Attributes:
        kind, stage, microbatch, part: as in ``Row``, for each action.
        first: for each rank the number of its first action; behind them the number of all actions.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    part: Ints
    first: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Columns":
        """The rows, joined."""
        first = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        return cls(*Row.join(rows).arrays, first) if rows else cls(*Row.of([]).arrays, first)
