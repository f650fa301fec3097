"""What each rank holds between forward and backward, in bytes on a clock: of its own, and of those who evicted to it.

What is evicted is on its rank until the eviction ends and on the partner from when it starts; it is on the partner
until the load ends and on its rank from when it starts. So what is under way counts at both ends. What is offloaded is
on the host, which is not counted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import LOAD_OF, OUT_OF, STAGE_KINDS, Kind
from pipeloom.schedule.row import Row
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


class KeptBytes(NamedTuple):
    """For each stage what it keeps of a micro-batch, in bytes or any other unit.

    Attributes:
        whole: from the forward to the end of the backward, or of its first half; empty for 1 each.
        pending: between the halves of the backward; empty for as much as before. It never moves.
        recomputed: from the forward until it is recomputed, where it is; empty for nothing.
        shares: of each token slice in that; empty where they are alike.
    """

    whole: Sequence[float] = ()
    pending: Sequence[float] = ()
    recomputed: Sequence[float] = ()
    shares: Sequence[float] = ()

    def whole_of(self, stages: Sequence[int]) -> Bytes:
        """For some stages what they keep of a micro-batch that is neither recomputed nor between two halves."""
        return np.array([self.whole[stage] for stage in stages] if len(self.whole) else [1.0] * len(stages), np.float64)

    def slice_shares(self, schedule: Schedule) -> Bytes:
        """Of each token slice."""
        return shares_of(schedule, self.shares)

    def moved(self, schedule: Schedule) -> Bytes:
        """For each stage, micro-batch and slice what is kept of it, until it is recomputed if it is."""
        left = np.asarray(self.recomputed or [0.0] * schedule.num_stages, np.float64)[:, None, None]
        whole = self.whole_of(range(schedule.num_stages))[:, None, None]
        return np.where(schedule.facts.is_recomputed, left, whole) * self.slice_shares(schedule)


def shares_of(schedule: Schedule, shares: Sequence[float]) -> Bytes:
    """Of each token slice in a micro-batch; equal ones where there are none."""
    return np.asarray(shares if len(shares) else [1 / schedule.num_slices] * schedule.num_slices, np.float64)


class _Bytes(NamedTuple):
    """For each action that names a micro-batch what its stage keeps of it, by ``KeptBytes``."""

    whole: Bytes
    pending: Bytes
    moved: Bytes

    @classmethod
    def of(cls, schedule: Schedule, kept: KeptBytes) -> "_Bytes":
        """Of all rows."""
        return cls.of_row(schedule, schedule.facts.row, kept)

    @classmethod
    def of_row(cls, schedule: Schedule, row: Row, kept: KeptBytes) -> "_Bytes":
        """Of some of the schedule's actions."""
        shares = kept.slice_shares(schedule)[row.slice]
        whole = kept.whole_of(range(schedule.num_stages))[row.stage] * shares
        pending, moved = whole, whole
        if len(kept.pending):
            pending = np.asarray(kept.pending, np.float64)[row.stage] * shares
        if schedule.facts.is_recomputed.any():
            is_keyed, moved = ~row.is_kind(*STAGE_KINDS), whole.copy()
            moved[is_keyed] = kept.moved(schedule)[tuple(array[is_keyed] for array in row.arrays[1:])]
        return cls(whole, pending, moved)


def most_in_row(schedule: Schedule, rank: int, kept: KeptBytes) -> float:
    """The most that a rank's row holds at once of what micro-batches keep between forward and backward.

    Without a clock: what is evicted or offloaded counts as held, since it leaves while the rank goes on.
    """
    row = schedule.rows[rank]
    sizes = set(kept.whole_of(schedule.placement.stages_of(rank)).tolist())
    is_plain = not row.is_kind(Kind.BACKWARD_INPUT, Kind.RECOMPUTE).any()
    # The usual case is a count, which the schedule knows already.
    if len(sizes) == 1 and is_plain and len(kept.shares) <= 1:
        return schedule.peak_stage_inputs[rank] * sizes.pop()
    whole, pending, moved = _Bytes.of_row(schedule, row, kept)
    change = moved * row.is_kind(Kind.FORWARD) + (whole - moved) * row.is_kind(Kind.RECOMPUTE)
    change -= whole * row.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)
    change += pending * (row.is_kind(Kind.BACKWARD_INPUT).astype(float) - row.is_kind(Kind.BACKWARD_WEIGHT))
    return float(np.cumsum(change).max(initial=0.0))


def input_changes(schedule: Schedule, start_s: Seconds, end_s: Seconds, kept: KeptBytes) -> Changes:
    """What forwards keep until their backwards, on the rank that does both.

    Args:
        schedule: whose actions they are.
        start_s: of every action, row after row.
        end_s: the same.
        kept: how large it is.
    """
    row, ranks = schedule.facts.row, schedule.facts.ranks
    whole, pending, moved = _Bytes.of(schedule, kept)
    # Stages that are frozen have no backward to keep anything for.
    ends_early = row.is_kind(Kind.FORWARD) & (row.stage < schedule.first_backward_stage)
    starting = (
        (row.is_kind(Kind.FORWARD, *OUT_OF), moved),
        (row.is_kind(Kind.RECOMPUTE), whole - moved),
    )
    ending = (
        (row.is_kind(*LOAD_OF) | ends_early, -moved),
        (row.is_kind(Kind.BACKWARD), -whole),
        (row.is_kind(Kind.BACKWARD_INPUT), pending - whole),
        (row.is_kind(Kind.BACKWARD_WEIGHT), -pending),
    )
    changes = [Changes(ranks[chosen], start_s[chosen], more[chosen]) for chosen, more in starting]
    return Changes.join(changes + [Changes(ranks[chosen], end_s[chosen], more[chosen]) for chosen, more in ending])


def accepted_changes(schedule: Schedule, start_s: Seconds, end_s: Seconds, kept: KeptBytes) -> Changes:
    """What ranks hold for their partners, see ``input_changes``; nothing where the schedule names no partners."""
    row = schedule.facts.row
    moved = _Bytes.of(schedule, kept).moved
    has_partners = schedule.partners is not None
    holder = np.asarray(schedule.partners or [0] * schedule.num_ranks, np.int32)[schedule.facts.ranks]
    takes, gives = row.is_kind(Kind.EVICT) & has_partners, row.is_kind(Kind.LOAD) & has_partners
    return Changes.join(
        [
            Changes(holder[takes], start_s[takes], moved[takes]),
            Changes(holder[gives], end_s[gives], -moved[gives]),
        ]
    )


def all_changes(schedule: Schedule, start_s: Seconds, end_s: Seconds, kept: KeptBytes) -> Changes:
    """Both, see ``input_changes``."""
    return Changes.join([changes(schedule, start_s, end_s, kept) for changes in (input_changes, accepted_changes)])
