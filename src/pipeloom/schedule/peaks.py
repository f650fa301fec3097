"""States in which a rank's memory may peak, computed once for a schedule that many layouts share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row

Counts = NDArray[np.float64]

_HALVES = (
    (Kind.FORWARD, (Kind.BACKWARD, Kind.BACKWARD_INPUT)),
    (Kind.BACKWARD_INPUT, (Kind.BACKWARD_WEIGHT,)),
)
"""Kinds that begin and end the lifetime of a stage input, and of what its weight gradient needs."""

_AT_ONCE = 4096
"""Actions whose states are computed together."""


@dataclass(frozen=True, eq=False)
class Peaks:
    """For each rank the states of which one is its peak, for any sizes of activations.

    All other states hold no more of anything. For schedules without moves, recomputation and slices these states decide
    the activation memory.

    Attributes:
        placement: stage -> rank.
        whole: for each rank [state, local stage] inputs until the end of the backward or of its input gradient.
        pending: the same between input gradient and weight gradient.
    """

    placement: Placement
    whole: tuple[Counts, ...]
    pending: tuple[Counts, ...]

    @classmethod
    def of(cls, rows: Sequence[Row], placement: Placement) -> "Peaks":
        """The states of rows without recomputation and slices; of what moves they hold all."""
        states = [_states(row, placement.stages_of(rank)) for rank, row in enumerate(rows)]
        return cls(placement, *zip(*states, strict=True))

    @property
    def stage_inputs(self) -> tuple[int, ...]:
        """For each rank its most stage inputs, as ``Schedule.peak_stage_inputs``."""
        both = zip(self.whole, self.pending, strict=True)
        return tuple(int((whole + pending).sum(axis=1).max()) for whole, pending in both)

    def most(self, whole: ArrayLike, pending: ArrayLike) -> list[float]:
        """For each rank the most that its stages hold.

        Args:
            whole: for each stage what it keeps of a micro-batch until the end of its backward or input gradient.
            pending: the same between input gradient and weight gradient.
        """
        until, between = (np.asarray(each, np.float64).reshape(self.placement.num_stages) for each in (whole, pending))
        stages, first, counts, waiting = self._of_all_ranks
        held = np.einsum("ij,ij->i", counts, until[stages])
        if waiting.any():
            held += np.einsum("ij,ij->i", waiting, between[stages])
        return np.maximum.reduceat(held, first).tolist()

    @cached_property
    def _of_all_ranks(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Counts, Counts]:
        """The states of all ranks in one array: [state, local stage] stages, the first state of each rank, counts."""
        own = np.array([list(self.placement.stages_of(rank)) for rank in range(self.placement.num_ranks)], np.intp)
        sizes = [len(counts) for counts in self.whole]
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp)
        return np.repeat(own, sizes, axis=0), first, np.concatenate(self.whole), np.concatenate(self.pending)


def _states(row: Row, stages: Sequence[int]) -> tuple[Counts, Counts]:
    """Whole and pending inputs after each action that adds some and precedes an action other than a forward."""
    local = np.searchsorted(stages, row.stage)
    changes = [row.is_kind(begin).astype(np.int32) - row.is_kind(*ends) for begin, ends in _HALVES]
    is_last = ~np.append(row.is_kind(Kind.FORWARD)[1:], False)
    is_chosen = row.is_kind(Kind.FORWARD, Kind.BACKWARD_INPUT) & is_last
    different: dict[bytes, None] = {}
    now = np.zeros((2, len(stages)), np.int32)
    for begin in range(0, len(row), _AT_ONCE):  # not all at once: a long row has millions of actions
        here = slice(begin, begin + _AT_ONCE)
        states = np.zeros((len(row.kind[here]), 2, len(stages)), np.int32)
        for half, change in enumerate(changes):
            states[np.arange(len(states)), half, local[here]] = change[here]
        states = now + np.cumsum(states, axis=0, dtype=np.int32)
        # Thousands of micro-batches pass through few different states: in the steady phase always the same ones.
        chosen = states[is_chosen[here]].reshape(-1, 2 * len(stages))
        # A state's bytes as one value, which numpy sorts much faster than Python hashes them.
        as_bytes = np.ascontiguousarray(chosen).view(np.dtype((np.void, chosen.itemsize * chosen.shape[1]))).ravel()
        different.update(dict.fromkeys(np.unique(as_bytes).tolist()))
        now = states[-1]
    found = np.frombuffer(b"".join(different), np.int32).reshape(-1, 2, len(stages)).astype(np.float64)
    return found[:, 0], found[:, 1]
