"""What each rank holds between forward and backward, in bytes on a clock: of its own, and of those who evicted to it.

What is evicted is on its rank until the eviction ends and on the partner from when it starts; it is on the partner
until the load ends and on its rank from when it starts. So what is under way counts at both ends. What is offloaded is
on the host, which is not counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import LOAD_OF, OUT_OF, STAGE_KINDS, Kind
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


def moved_bytes(
    schedule: Schedule,
    input_bytes: Sequence[float],
    recomputed_bytes: Sequence[float] = (),
    *,
    slice_shares: Sequence[float] = (),
) -> Bytes:
    """For each stage, micro-batch and slice what is kept of it, until it is recomputed if it is.

    Args:
        schedule: which says what is recomputed.
        input_bytes: for each stage what it keeps of a micro-batch.
        recomputed_bytes: the same where it is recomputed; empty for nothing.
        slice_shares: of each token slice in that; empty where they are alike.
    """
    kept = np.asarray(input_bytes, np.float64)[:, None, None]
    left = np.asarray(recomputed_bytes or [0.0] * schedule.num_stages, np.float64)[:, None, None]
    return np.where(schedule.facts.is_recomputed, left, kept) * _shares(schedule, slice_shares)


def _shares(schedule: Schedule, slice_shares: Sequence[float]) -> Bytes:
    return np.asarray(slice_shares or [1 / schedule.num_slices] * schedule.num_slices, np.float64)


def input_changes(
    schedule: Schedule,
    start_s: Seconds,
    end_s: Seconds,
    input_bytes: Sequence[float],
    recomputed_bytes: Sequence[float] = (),
    *,
    slice_shares: Sequence[float] = (),
) -> Changes:
    """What forwards keep until their backwards, on the rank that does both.

    Args:
        schedule: whose actions they are.
        start_s: of every action, row after row.
        end_s: the same.
        input_bytes: for each stage what it keeps of a micro-batch.
        recomputed_bytes: the same where it is recomputed, until it is; empty for nothing.
        slice_shares: of each token slice in that; empty where they are alike.
    """
    row, ranks = schedule.facts.row, schedule.facts.ranks
    whole, moved = _bytes_of(schedule, input_bytes, recomputed_bytes, slice_shares)
    ends_early = row.is_kind(Kind.FORWARD) & (row.stage < schedule.first_backward_stage)
    takes = row.is_kind(Kind.FORWARD, *OUT_OF)
    again, ends = row.is_kind(Kind.RECOMPUTE), row.is_kind(Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    gives = row.is_kind(*LOAD_OF) | ends_early
    return Changes.join(
        [
            Changes(ranks[takes], start_s[takes], moved[takes]),
            Changes(ranks[again], start_s[again], (whole - moved)[again]),
            Changes(ranks[gives], end_s[gives], -moved[gives]),
            Changes(ranks[ends], end_s[ends], -whole[ends]),
        ]
    )


def accepted_changes(
    schedule: Schedule,
    start_s: Seconds,
    end_s: Seconds,
    input_bytes: Sequence[float],
    recomputed_bytes: Sequence[float] = (),
    *,
    slice_shares: Sequence[float] = (),
) -> Changes:
    """What ranks hold for their partners, see ``input_changes``; nothing where the schedule names no partners."""
    row = schedule.facts.row
    _, moved = _bytes_of(schedule, input_bytes, recomputed_bytes, slice_shares)
    has_partners = schedule.partners is not None
    holder = np.asarray(schedule.partners or [0] * schedule.num_ranks, np.int32)[schedule.facts.ranks]
    takes, gives = row.is_kind(Kind.EVICT) & has_partners, row.is_kind(Kind.LOAD) & has_partners
    return Changes.join(
        [
            Changes(holder[takes], start_s[takes], moved[takes]),
            Changes(holder[gives], end_s[gives], -moved[gives]),
        ]
    )


def all_changes(
    schedule: Schedule,
    start_s: Seconds,
    end_s: Seconds,
    input_bytes: Sequence[float],
    recomputed_bytes: Sequence[float] = (),
    *,
    slice_shares: Sequence[float] = (),
) -> Changes:
    """Both, see ``input_changes``."""
    arguments = (schedule, start_s, end_s, input_bytes, recomputed_bytes)
    both = (changes(*arguments, slice_shares=slice_shares) for changes in (input_changes, accepted_changes))
    return Changes.join(list(both))


def _bytes_of(
    schedule: Schedule, input_bytes: Sequence[float], recomputed_bytes: Sequence[float], slice_shares: Sequence[float]
) -> tuple[Bytes, Bytes]:
    """For each action that names a micro-batch what its stage keeps of it: as a whole, and until it is recomputed."""
    row = schedule.facts.row
    whole = np.asarray(input_bytes, np.float64)[row.stage] * _shares(schedule, slice_shares)[row.slice]
    moved = whole.copy()
    if schedule.facts.is_recomputed.any():
        is_keyed = ~row.is_kind(*STAGE_KINDS)
        place = tuple(array[is_keyed] for array in row.arrays[1:])
        moved[is_keyed] = moved_bytes(schedule, input_bytes, recomputed_bytes, slice_shares=slice_shares)[place]
    return whole, moved
