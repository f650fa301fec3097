"""The memory ledger: entries of bytes that a rank allocates or frees at the start or at the end of an action.

Entries are made once from a schedule and sizes. With times of actions, simulated or measured, they give the memory of
each rank over time; in row order they give a peak that holds for any times.

An activation in transfer counts at both ends: an eviction allocates at the partner when it starts and frees its own
rank's memory when it ends, a load the other way round. Host memory is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.facts import Facts, Seconds
from pipeloom.schedule.kinds import COMPUTE_KINDS, LOAD_OF, OUT_OF, RECEIVE_KINDS, Kind
from pipeloom.schedule.peaks import Peaks
from pipeloom.schedule.row import Bools, Ints
from pipeloom.schedule.schedule import Schedule
from pipeloom.schedule.stage_swaps import Amounts, stage_stays

Bytes = NDArray[np.float64]

PARTS = (
    "always",
    "stage inputs",
    "accepted",
    "working",
    "gathered weights",
    "receive buffers",
    "resident stages",
)
"""Parts of a rank's memory; ``accepted``: activations that a partner evicted to it."""


class KeptBytes(NamedTuple):
    """For each stage its activation memory for a micro-batch, or for each token slice, in bytes or any other unit.

    Attributes:
        whole: from the forward to the end of the backward, or of its input gradient; empty for 1 each.
        pending: between input gradient and weight gradient; empty for the same as ``whole``. It never moves.
        recomputed: from the forward to the recomputation, where there is one; empty for 0.
        shares: for each token slice its fraction of what is given by micro-batch; empty for equal ones.
        caches: keys and values for later slices, from the forward of the first slice to the end of its backward; they
            never move. Empty for 0.
    """

    whole: "PerStage" = ()
    pending: "PerStage" = ()
    recomputed: "PerStage" = ()
    shares: Sequence[float] = ()
    caches: Sequence[float] = ()

    def by_stage(self, num_stages: int) -> list[float]:
        """For each stage ``whole`` of a micro-batch."""
        whole = np.asarray(self.whole if len(self.whole) else [1.0] * num_stages, np.float64)
        return (whole if whole.ndim == 1 else whole.sum(axis=1)).tolist()

    def slice_shares(self, schedule: Schedule) -> Bytes:
        """``shares``; equal ones where they are empty."""
        equal = [1 / schedule.num_slices] * schedule.num_slices
        return np.asarray(self.shares if len(self.shares) else equal, np.float64)

    def of_slices(self, schedule: Schedule, each: "PerStage", otherwise: float = 1.0) -> Bytes:
        """[stage, slice] one of the attributes, ``otherwise`` for each micro-batch where it is empty."""
        found = np.asarray(each if len(each) else [otherwise] * schedule.num_stages, np.float64)
        return found if found.ndim == 2 else found[:, None] * self.slice_shares(schedule)

    def moved(self, schedule: Schedule) -> Bytes:
        """[stage, micro-batch, slice] what may move: ``recomputed`` where it is recomputed, else ``whole``."""
        left, whole = self.of_slices(schedule, self.recomputed, 0.0), self.of_slices(schedule, self.whole)
        return np.where(schedule.facts.is_recomputed, left[:, None], whole[:, None])


PerStage = Sequence[float] | Sequence[Sequence[float]]
"""For each stage a number, or one for each token slice."""


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """Sizes from which the ledger of a schedule is made.

    Attributes:
        always_bytes: for each rank its constant memory: weights, gradients with their reduction buffers, optimizer
            state, reserve.
        kept: activations, from the start of a forward on; ``shares`` also applies to working memory and messages.
        working_bytes: for each stage further memory of a compute action while it runs; empty for 0, as below.
        gathered_bytes: for each stage its gathered weights, from the start of the gather to the release; 0 where they
            are part of ``always_bytes``.
        message_bytes: a received tensor, from the post of its receive to the end of the action that uses it.
        stages: for each stage the bytes of its contents, on the device from the start of a swap in to the end of the
            swap out; empty where no stage is swapped.
    """

    always_bytes: tuple[float, ...]
    kept: KeptBytes
    working_bytes: tuple[float, ...] = ()
    gathered_bytes: tuple[float, ...] = ()
    message_bytes: float = 0.0
    stages: tuple[Amounts, ...] = ()


def peak_of(times: Seconds, more: Bytes) -> float:
    """Peak of changes in any order; of changes at one time, releases are first."""
    return float(np.cumsum(more[np.lexsort((more, times))]).max(initial=0.0))


class Balance(NamedTuple):
    """Entries of all ranks with times: ordered by rank, then time; of entries at one time, releases are first.

    Attributes:
        first: for each rank the number of its first entry; then the number of all entries.
        part: indices into ``PARTS``.
        times: seconds.
        more: bytes; negative for releases.
    """

    first: NDArray[np.intp]
    part: Ints
    times: Seconds
    more: Bytes

    def entries_of(self, rank: int) -> tuple[Ints, Seconds, Bytes]:
        """Part, time and bytes of one rank's entries."""
        own = slice(*self.first[rank : rank + 2])
        return self.part[own], self.times[own], self.more[own]

    def of(self, rank: int) -> tuple[Seconds, Bytes]:
        """Times and bytes of one rank's entries."""
        return self.entries_of(rank)[1:]

    def peak(self, rank: int) -> float:
        """Peak memory of a rank, in bytes."""
        return float(np.cumsum(self.of(rank)[1]).max(initial=0.0))


class Ledger(NamedTuple):
    """Entries: changes of ranks' memory at actions.

    Attributes:
        rank: whose memory.
        part: indices into ``PARTS``.
        node: the action; -1 for the step itself.
        at_end: whether the change is at the action's end; otherwise at its start.
        more: bytes; negative for releases.
    """

    rank: Ints
    part: Ints
    node: Ints
    at_end: Bools
    more: Bytes

    @classmethod
    def of(cls, schedule: Schedule, held: HeldBytes) -> "Ledger":
        """All entries of a schedule."""
        entries = _Entries(schedule)
        entries.add_kept(held.kept)
        entries.add_accepted(held.kept)
        entries.add_working(held)
        entries.add_gathered(held.gathered_bytes)
        entries.add_resident(held)
        entries.add_messages(held)
        return entries.ledger()

    @classmethod
    def of_kept(cls, schedule: Schedule, kept: KeptBytes) -> "Ledger":
        """Entries of activations only: own ones, and those that partners evicted to a rank."""
        entries = _Entries(schedule)
        entries.add_kept(kept)
        entries.add_accepted(kept)
        return entries.ledger()

    def on(self, num_ranks: int, start_s: Seconds, end_s: Seconds, span_s: tuple[float, float] = (0.0, 0.0)) -> Balance:
        """The entries with times.

        Args:
            num_ranks: of the schedule.
            start_s: of every action, row after row.
            end_s: the same.
            span_s: begin and end of the step.
        """
        # The step itself follows all actions, where -1 finds it.
        starts, ends = np.append(start_s, span_s[0]), np.append(end_s, span_s[1])
        times = np.where(self.at_end, ends[self.node], starts[self.node])
        order = np.lexsort((self.more, times, self.rank))
        first = np.searchsorted(self.rank[order], np.arange(num_ranks + 1))
        return Balance(first, self.part[order], times[order], self.more[order])

    def most_in_rows(self, schedule: Schedule) -> list[float]:
        """For each rank its peak in row order, which holds for any times of actions.

        Args:
            schedule: of these entries. Each entry must be about the rank of its action.
        """
        is_action = self.node >= 0
        moments = 2 * self.node[is_action].astype(np.int64) + self.at_end[is_action]
        change = np.bincount(moments, self.more[is_action], 2 * schedule.num_actions)
        bounds = (2 * schedule.facts.columns.first).tolist()
        # One sum per row, so that the rounding of a row does not depend on the rows before it.
        return [float(np.cumsum(change[a:b]).max(initial=0.0)) for a, b in pairwise(bounds)]


def most_in_rows(schedule: Schedule | Peaks, kept: KeptBytes) -> list[float]:
    """For each rank its peak of activations in row order, from all of a schedule or from its peaks.

    Activations that move out count as held: without times, the end of a move is unknown.
    """
    peaks = schedule if isinstance(schedule, Peaks) else schedule.facts.peaks
    if peaks is not None:
        whole = kept.whole if len(kept.whole) else [1.0] * peaks.placement.num_stages
        return peaks.most(whole, kept.pending if len(kept.pending) else whole)
    assert isinstance(schedule, Schedule)
    entries = _Entries(schedule)
    entries.add_kept(kept, has_moves=False)
    return entries.ledger().most_in_rows(schedule)


def most_gathered(schedule: Schedule, by_stage: Sequence[float]) -> list[float]:
    """For each rank its peak of gathered weights in row order, from the bytes of each stage."""
    entries = _Entries(schedule)
    entries.add_gathered(by_stage)
    return entries.ledger().most_in_rows(schedule)


class _Entries:
    """Collects the entries of a schedule, part by part."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._facts = schedule, schedule.facts
        self._found: list[Ledger] = []

    def ledger(self) -> Ledger:
        """All entries."""
        return Ledger(*(np.concatenate(columns) for columns in zip(*self._found, strict=True)))

    def _add(self, part: str, node: Ints, at_end: bool, more: Bytes, rank: Ints | None = None) -> None:
        ranks = self._facts.ranks[node] if rank is None else rank
        parts = np.full(len(node), PARTS.index(part), np.int32)
        self._found.append(Ledger(ranks, parts, node, np.full(len(node), at_end), np.broadcast_to(more, len(node))))

    def add_kept(self, kept: KeptBytes, *, has_moves: bool = True) -> None:
        """Activations from forward to backward, on their own rank."""
        facts, each = self._facts, _Each(self._schedule, kept)
        forward, again, half = (facts.where(kind) for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT))
        whole, other = facts.where(Kind.BACKWARD), facts.where(Kind.BACKWARD_WEIGHT)
        self._add("stage inputs", forward, False, each.moved(forward))
        self._add("stage inputs", again, False, each.whole(again) - each.moved(again))
        self._add("stage inputs", whole, True, -each.whole(whole))
        self._add("stage inputs", half, True, each.pending(half) - each.whole(half))
        self._add("stage inputs", other, True, -each.pending(other))
        # A stage without backward frees its activations with the forward.
        frozen = forward[facts.columns.stage[forward] < facts.first_backward_stage]
        self._add("stage inputs", frozen, True, -each.moved(frozen))
        if len(kept.caches):
            self._add_caches(np.asarray(kept.caches, np.float64))
        if has_moves:
            back, out = facts.where(*OUT_OF), facts.where(*LOAD_OF)
            self._add("stage inputs", back, False, each.moved(back))
            self._add("stage inputs", out, True, -each.moved(out))

    def _add_caches(self, each: Bytes) -> None:
        """Caches for later slices, until the backward of the first slice, which is the last one."""
        facts, columns = self._facts, self._facts.columns
        takes, gives = facts.where(Kind.FORWARD), facts.where(Kind.BACKWARD, Kind.BACKWARD_INPUT)
        first, last = (takes[columns.part[takes] == number] for number in (0, self._schedule.num_slices - 1))
        ends = [gives[columns.part[gives] == 0], last[columns.stage[last] < facts.first_backward_stage]]
        self._add("stage inputs", first, False, each[columns.stage[first]])
        for nodes in ends:
            self._add("stage inputs", nodes, True, -each[columns.stage[nodes]])

    def add_accepted(self, kept: KeptBytes) -> None:
        """Activations that ranks hold for their partners; none where the schedule names no partners."""
        if self._schedule.partners is None:
            return
        holder, each = np.asarray(self._schedule.partners, np.int32), _Each(self._schedule, kept)
        out, back = self._facts.where(Kind.EVICT), self._facts.where(Kind.LOAD)
        self._add("accepted", out, False, each.moved(out), holder[self._facts.ranks[out]])
        self._add("accepted", back, True, -each.moved(back), holder[self._facts.ranks[back]])

    def add_working(self, held: HeldBytes) -> None:
        """Working memory of compute actions."""
        if held.working_bytes:
            _, stage, _, part, _ = self._facts.columns
            node = self._facts.where(*COMPUTE_KINDS)
            needed = np.asarray(held.working_bytes)[stage[node]] * held.kept.slice_shares(self._schedule)[part[node]]
            self._add("working", node, False, needed)
            self._add("working", node, True, -needed)

    def add_gathered(self, by_stage: Sequence[float]) -> None:
        """Gathered weights, from the start of the gather to the release or the end of the step."""
        if not len(by_stage):
            return
        gathers, drops = self._facts.where(Kind.UNSHARD), self._facts.where(Kind.RESHARD)
        stage, sizes = self._facts.columns.stage, np.asarray(by_stage, np.float64)
        self._add("gathered weights", gathers, False, sizes[stage[gathers]])
        self._add("gathered weights", drops, True, -sizes[stage[drops]])
        taken, given = (np.bincount(stage[nodes], minlength=len(sizes)) for nodes in (gathers, drops))
        left = np.flatnonzero(taken - given)
        step = np.full(len(left), -1, np.int32)
        self._add("gathered weights", step, True, -(sizes * (taken - given))[left], self._facts.owner[left])

    def add_resident(self, held: HeldBytes) -> None:
        """Stages on the device, from the start of their swap in to the end of their swap out."""
        if not held.stages:
            return
        for row, first in zip(self._facts.rows, self._facts.columns.first.tolist(), strict=False):
            stays = stage_stays(row)
            sizes = np.array([held.stages[stay.stage].of(stay.held) for stay in stays], np.float64)
            self._add("resident stages", first + np.array([stay.first for stay in stays], np.int32), False, sizes)
            self._add("resident stages", first + np.array([stay.last for stay in stays], np.int32), True, -sizes)

    def add_messages(self, held: HeldBytes) -> None:
        """Received tensors, from the posting of the receive, at its place in the row, to the end of what uses them."""
        if not held.message_bytes:
            return
        facts, node = self._facts, self._facts.where(*RECEIVE_KINDS)
        _, stage, microbatch, part, first = facts.columns
        computes = facts.where(*COMPUTE_KINDS)
        number = np.searchsorted(computes, node) - 1
        before = np.where(number >= 0, computes[number], -1)
        is_own = before >= first[facts.ranks[node]]
        place = stage[node], microbatch[node], part[node]
        forward = facts.columns.kind[node] == Kind.RECV_F.code
        user = np.where(forward, facts.node_of[Kind.FORWARD.code][place], facts.input_gradients[place])
        size = held.message_bytes * held.kept.slice_shares(self._schedule)[part[node]]
        # posted when the compute action before it in its row has ended, at first when the step begins
        self._add("receive buffers", before[is_own], True, size[is_own])
        step = np.full(int((~is_own).sum()), -1, np.int32)
        self._add("receive buffers", step, False, size[~is_own], facts.ranks[node][~is_own])
        self._add("receive buffers", user, True, -size)


class _Each:
    """For actions that name a micro-batch what their stage keeps of it."""

    def __init__(self, schedule: Schedule, kept: KeptBytes) -> None:
        self._facts: Facts = schedule.facts
        self._whole = kept.of_slices(schedule, kept.whole)
        self._pending = kept.of_slices(schedule, kept.pending) if len(kept.pending) else self._whole
        self._moved = kept.moved(schedule) if self._facts.has(Kind.RECOMPUTE) else None

    def whole(self, node: Ints) -> Bytes:
        """From the forward, or from where it runs again, to the end of the backward or of its input gradient."""
        _, stage, _, part, _ = self._facts.columns
        return self._whole[stage[node], part[node]]

    def pending(self, node: Ints) -> Bytes:
        """Between the halves of the backward."""
        _, stage, _, part, _ = self._facts.columns
        return self._pending[stage[node], part[node]]

    def moved(self, node: Ints) -> Bytes:
        """From the forward until it runs again, if it does."""
        _, stage, microbatch, part, _ = self._facts.columns
        return self.whole(node) if self._moved is None else self._moved[stage[node], microbatch[node], part[node]]
