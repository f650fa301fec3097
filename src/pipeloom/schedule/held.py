"""What each rank holds between forward and backward, in bytes on a clock: of its own, and of those who evicted to it.

What is evicted is on its rank until the eviction ends and on the partner from when it starts; it is on the partner
until the load ends and on its rank from when it starts. So what is under way counts at both ends. What is offloaded is
on the host, which is not counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import COMPUTE_KINDS, LOAD_OF, OUT_OF, Kind
from pipeloom.schedule.graph import Seconds
from pipeloom.schedule.schedule import Schedule

Bytes = NDArray[np.float64]


class Changes(NamedTuple):
    """When somebody holds more or less.

    Attributes:
        ranks: who.
        times: when, in seconds.
        more: bytes, negative where they are fewer.
    """

    ranks: NDArray[np.int32]
    times: Seconds
    more: Bytes

    def of(self, rank: int) -> tuple[Seconds, Bytes]:
        """Times and bytes of one rank, in any order."""
        own = self.ranks == rank
        return self.times[own], self.more[own]

    def peak(self, rank: int) -> float:
        """The most bytes that a rank holds."""
        return peak_of(*self.of(rank))

    @classmethod
    def join(cls, parts: Sequence["Changes"]) -> "Changes":
        """One after the other."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def peak_of(times: Seconds, more: Bytes) -> float:
    """The most bytes; at one time, what goes goes first."""
    order = np.lexsort((more, times))
    return float(np.cumsum(more[order]).max(initial=0.0))


def input_changes(
    schedule: Schedule,
    start_s: Seconds,
    end_s: Seconds,
    input_bytes: Sequence[float],
    recomputed_bytes: Sequence[float] = (),
) -> Changes:
    """What forwards keep until their backwards, on the rank that does both.

    Args:
        schedule: whose actions they are.
        start_s: of every action, row after row.
        end_s: the same.
        input_bytes: for each stage what it keeps of a micro-batch.
        recomputed_bytes: the same until it is recomputed, where it is; empty for nothing.
    """
    row, ranks = schedule.facts.row, schedule.facts.ranks
    kept = np.asarray(input_bytes, np.float64)[row.stage] / schedule.num_slices
    ends_early = row.is_kind(Kind.FORWARD) & (row.stage < schedule.first_backward_stage)
    ends = row.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    takes = row.is_kind(Kind.FORWARD, *OUT_OF)
    gives = ends | row.is_kind(*LOAD_OF) | ends_early
    again, own = row.is_kind(Kind.RECOMPUTE), kept
    if again.any():
        left = np.asarray(recomputed_bytes or [0.0] * len(input_bytes), np.float64)[row.stage] / schedule.num_slices
        own = np.where(_is_recomputed(schedule) & ~again, left, kept)
        kept = np.where(again, kept - left, np.where(ends, kept, own))
    return Changes(
        np.concatenate([ranks[takes], ranks[again], ranks[gives]]),
        np.concatenate([start_s[takes], start_s[again], end_s[gives]]),
        np.concatenate([own[takes], kept[again], -kept[gives]]),
    )


def _is_recomputed(schedule: Schedule) -> NDArray[np.bool_]:
    """For each action whether it concerns a part of the batch that its stage recomputes as a whole."""
    row = schedule.facts.row
    is_keyed = row.is_kind(*COMPUTE_KINDS, *LOAD_OF, *OUT_OF)
    found = np.zeros(len(row), np.bool_)
    found[is_keyed] = schedule.facts.is_recomputed[tuple(array[is_keyed] for array in row.arrays[1:])]
    return found


def accepted_changes(schedule: Schedule, start_s: Seconds, end_s: Seconds, input_bytes: Sequence[float]) -> Changes:
    """What ranks hold for their partners, see ``input_changes``; nothing where the schedule names no partners."""
    row, ranks = schedule.facts.row, schedule.facts.ranks
    if schedule.partners is None:
        nobody = np.zeros(len(row), np.bool_)
        return _changes(ranks, np.zeros(len(row)), (nobody, start_s), (nobody, end_s))
    kept = np.asarray(input_bytes, np.float64)[row.stage] / schedule.num_slices
    holder = np.asarray(schedule.partners, np.int32)[ranks]
    return _changes(holder, kept, (row.is_kind(Kind.EVICT), start_s), (row.is_kind(Kind.LOAD), end_s))


def all_changes(schedule: Schedule, start_s: Seconds, end_s: Seconds, input_bytes: Sequence[float]) -> Changes:
    """Both, see ``input_changes``."""
    arguments = (schedule, start_s, end_s, input_bytes)
    return Changes.join([input_changes(*arguments), accepted_changes(*arguments)])


def _changes(
    ranks: NDArray[np.int32],
    kept: Bytes,
    taken: tuple[NDArray[np.bool_], Seconds],
    given: tuple[NDArray[np.bool_], Seconds],
) -> Changes:
    (takes, taken_s), (gives, given_s) = taken, given
    return Changes(
        np.concatenate([ranks[takes], ranks[gives]]),
        np.concatenate([taken_s[takes], given_s[gives]]),
        np.concatenate([kept[takes], -kept[gives]]),
    )
