"""The moments at which a rank may hold the most, of a whole schedule: many runs have schedules alike."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Schedule

Counts = NDArray[np.float64]

_HALVES = (
    (Kind.FORWARD, (Kind.BACKWARD, Kind.BACKWARD_INPUT)),
    (Kind.BACKWARD_INPUT, (Kind.BACKWARD_WEIGHT,)),
)
"""What begins and what ends that an input is kept: whole, and what of it waits for the weight gradient."""

_AT_ONCE = 4096
"""Actions whose states are looked at together."""


class Peaks(NamedTuple):
    """What the ranks of a schedule hold at the moments of which one is the fullest, whatever micro-batches keep.

    The states in between hold no more of anything. Where nothing is moved, recomputed or cut into slices, no other
    moments decide how much memory the schedule takes, and many runs have schedules alike.

    Attributes:
        placement: stage -> rank.
        whole: for each rank [moment, local stage] inputs until the end of the backward or of its input gradient.
        pending: the same between the halves of split backwards.
    """

    placement: Placement
    whole: tuple[Counts, ...]
    pending: tuple[Counts, ...]

    @classmethod
    def of(cls, schedule: Schedule) -> "Peaks":
        """Of a schedule's rows, on which nothing is moved or recomputed."""
        states = [_states(row, schedule.placement.stages_of(rank)) for rank, row in enumerate(schedule.rows)]
        return cls(schedule.placement, *zip(*states, strict=True))

    @property
    def stage_inputs(self) -> tuple[int, ...]:
        """For each rank the most stage inputs that it holds, ``Schedule.peak_stage_inputs``."""
        both = zip(self.whole, self.pending, strict=True)
        return tuple(int((whole + pending).sum(axis=1).max()) for whole, pending in both)

    def most(self, kept: KeptBytes) -> list[float]:
        """The same as ``most_in_rows``, of whole sequences."""
        whole = np.asarray(kept.whole if len(kept.whole) else [1.0] * self.placement.num_stages, np.float64)
        pending = np.asarray(kept.pending, np.float64) if len(kept.pending) else whole
        own = (list(self.placement.stages_of(rank)) for rank in range(self.placement.num_ranks))
        both = zip(self.whole, self.pending, own, strict=True)
        return [float((counts @ whole[mine] + waiting @ pending[mine]).max()) for counts, waiting, mine in both]


def _states(row: Row, stages: Sequence[int]) -> tuple[Counts, Counts]:
    """What a row holds, whole and pending, where its last action added something and the next one is no forward."""
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
        different.update(dict.fromkeys(state.tobytes() for state in states[is_chosen[here]]))
        now = states[-1]
    found = np.frombuffer(b"".join(different), np.int32).reshape(-1, 2, len(stages)).astype(np.float64)
    return found[:, 0], found[:, 1]
