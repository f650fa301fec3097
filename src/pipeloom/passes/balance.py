"""BPipe (Kim et al., ICML 2023) for any schedule: full pipeline ranks keep a part of what they hold on empty ones."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor

import numpy as np

from pipeloom.errors import UserError
from pipeloom.passes.budget import checked, kept_on, refuse_missing, sizes_of
from pipeloom.passes.lower import lower
from pipeloom.passes.room import Clock, Move, Plan, RowClock, lane_times, make_room, row_clock, settle
from pipeloom.schedule.clock import SecondsOf, nominal_s, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import LOAD_OF, Kind
from pipeloom.schedule.ledger import Balance, Bytes, HeldBytes, KeptBytes, peak_of
from pipeloom.schedule.schedule import Schedule


def balance(
    schedule: Schedule,
    kept: KeptBytes | None = None,
    *,
    seconds_of: SecondsOf = nominal_s,
    always_bytes: Sequence[float] | None = None,
    budget_bytes: Sequence[float] | None = None,
    partners: Sequence[int] | None = None,
) -> Schedule:
    """Pair the ranks, and let the fuller one of each pair evict to the other what it needs last.

    The fullest rank is paired with the emptiest, the next with the next, by the peak of what they hold; with 1F1B that
    is ``s`` with ``P - 1 - s``. Without budgets, the fuller rank of a pair keeps what both hold together, and one input
    that is under way, halved, in whole inputs: at most ``ceil((P + 2) / 2)`` micro-batches with 1F1B, as BPipe does. It
    keeps more where its partner would otherwise be the fuller one, or where a transfer would be late.

    The order of compute is untouched. An eviction stands as late as it is in time for what needs its room, a load one
    compute action before its backward (in a pause right before it, if there is no other time). Everything is in
    time on the clock of ``seconds_of``; with another machine, loads may be late and evictions take longer, which costs
    time or memory, never correctness.

    Args:
        schedule: at any level, without evictions; compute actions alone are lowered first.
        kept: what stages keep of micro-batches; ``None`` for 1 each.
        seconds_of: seconds of every action, of ``EVICT`` and ``LOAD`` too. By default a backward is two forwards, and a
            transfer takes one.
        always_bytes: for each rank what it holds besides, in the profile and in the budget. ``None`` for nothing.
        budget_bytes: for each rank the most that it may hold, what it accepts and what is under way included: evictions
            are then only as many as that takes. ``None``: balance each pair.
        partners: pairs to take instead of those of the profile; see ``Schedule.partners``.

    Returns:
        The schedule with evictions, loads and ``partners``, at the level with communication.

    Raises:
        UserError: it evicts already, arguments have a wrong length, or the budget cannot be kept: who lacks what.
    """
    if any(row.is_kind(Kind.EVICT).any() for row in schedule.rows):
        raise UserError("the schedule evicts already; balance one without EVICT and LOAD")
    schedule = lower(schedule)
    sizes = sizes_of(schedule, kept, always_bytes)
    pairs = _partners(schedule, seconds_of, sizes) if partners is None else _checked(partners, schedule.num_ranks)
    balancer = _Balancer(replace(schedule, partners=pairs), seconds_of, sizes)
    if budget_bytes is None:
        return balancer.balanced()
    return balancer.within(checked("budget_bytes", budget_bytes, schedule.num_ranks))


def find_partners(
    schedule: Schedule,
    kept: KeptBytes | None = None,
    *,
    seconds_of: SecondsOf = nominal_s,
    always_bytes: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The pairs that ``balance`` would choose, for which no transfer needs to have a price yet.

    Raises:
        UserError: arguments have a wrong length.
    """
    sizes = sizes_of(schedule, kept, always_bytes)
    return _partners(schedule, seconds_of, sizes)


def _partners(schedule: Schedule, seconds_of: SecondsOf, sizes: HeldBytes) -> tuple[int, ...]:
    held = kept_on(schedule, times(schedule, seconds_of), sizes)
    return pair_ranks([always + held.peak(rank) for rank, always in enumerate(sizes.always_bytes)])


def pair_ranks(profile: Sequence[float]) -> tuple[int, ...]:
    """For each rank its partner: the fullest has the emptiest, and so on; an odd one in the middle has itself.

    Args:
        profile: for each rank the bytes that it holds; of equally full ranks the lower ones come first.
    """
    # By rank where the profile is equal, so that one schedule has one set of pairs.
    order = sorted(range(len(profile)), key=lambda rank: (-profile[rank], rank))
    partner = dict(zip(order, reversed(order), strict=True))
    return tuple(partner[rank] for rank in range(len(profile)))


def _checked(partners: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    if sorted(partners) != list(range(num_ranks)) or any(partners[p] != r for r, p in enumerate(partners)):
        raise UserError(
            f"partners must pair ranks 0..{num_ranks - 1}, each with one that has it as its partner or with itself, "
            f"found {list(partners)}"
        )
    return tuple(partners)


@dataclass(frozen=True)
class _Balancer:
    """A lowered schedule with partners, and how large and slow things are."""

    schedule: Schedule
    seconds_of: SecondsOf
    sizes: HeldBytes

    def balanced(self) -> Schedule:
        """Each pair balanced."""

        def plan(clock: Clock) -> list[Plan]:
            held = kept_on(self.schedule, clock, self.sizes)
            plans = [Plan()] * self.schedule.num_ranks
            for one, other in self._pairs(held):
                plans[one] = self._pair_plan(clock, held, one, other)
            return plans

        return settle(self.schedule, self.seconds_of, Kind.EVICT, plan)

    def within(self, budget: Sequence[float]) -> Schedule:
        """Every rank within its budget, on the clock of the result."""
        limits = [most - always for most, always in zip(budget, self.sizes.always_bytes, strict=True)]

        def plan(clock: Clock) -> list[Plan]:
            held = kept_on(self.schedule, clock, self.sizes)
            plans = [Plan()] * self.schedule.num_ranks
            for one, other in self._pairs(held):
                row, back = self._row(clock, held, one), self._row(clock, held, other)
                plans[one] = make_room(row, limits[one], allows_late=True)
                # What it accepts counts for the other rank too, which may then have to evict in turn.
                accepting = back.with_more(*self._accepted(row, plans[one].moves))
                plans[other] = make_room(accepting, limits[other], allows_late=True)
            return plans

        found = settle(self.schedule, self.seconds_of, Kind.EVICT, plan)
        refuse_missing(found, self.seconds_of, self.sizes, budget)
        return found

    def _pairs(self, held: Balance) -> list[tuple[int, int]]:
        """The fuller rank of each pair, and the other."""
        assert self.schedule.partners is not None
        full = [always + held.peak(rank) for rank, always in enumerate(self.sizes.always_bytes)]
        pairs = [(rank, other) for rank, other in enumerate(self.schedule.partners) if rank < other]
        return [(one, other) if full[one] >= full[other] else (other, one) for one, other in pairs]

    def _pair_plan(self, clock: Clock, held: Balance, one: int, other: int) -> Plan:
        """The plan whose fuller rank is the least full, of those with a cap from the half of both on, in whole inputs.

        The smaller the cap, the fuller is the other rank: it is the one at which both meet, or the one below.
        """
        row, always = self._row(clock, held, one), self.sizes.always_bytes
        unit = max((kept.size for kept in row.kept), default=0.0)
        if unit == 0:
            return Plan()
        mine = held.peak(one)
        half = (always[one] + mine + always[other] + held.peak(other) + unit) / 2 - always[one]
        caps = [*(unit * n for n in range(max(1, floor(half / unit + 1e-9)), ceil(mine / unit))), mine]

        @cache
        def ends_at(number: int) -> tuple[float, float]:
            """What the two ranks hold at most with a cap."""
            plan = make_room(row, caps[number])
            beside = always[other] + self._peak_with(held, other, row, plan.moves)
            return always[one] + caps[number] + plan.missing_bytes, beside

        def is_even(number: int) -> bool:
            mine_then, beside = ends_at(number)
            return beside <= mine_then * (1 + 1e-9)

        # A plan takes a sweep over the row, so the caps are not all tried.
        meeting = bisect_left(range(len(caps) - 1), True, key=is_even)
        best = min(range(max(0, meeting - 1), meeting + 1), key=lambda number: (max(ends_at(number)), -number))
        return make_room(row, caps[best])

    def _row(self, clock: Clock, held: Balance, rank: int) -> RowClock:
        sizes = self.sizes.kept.moved(self.schedule)
        return row_clock(
            self.schedule, rank, clock, held.of(rank), sizes=sizes, out=Kind.EVICT, seconds_of=self.seconds_of
        )

    @staticmethod
    def _accepted(row: RowClock, moves: Sequence[Move]) -> tuple[Seconds, Bytes]:
        """When a rank's moves make its partner hold how many bytes more or fewer."""
        starts = [start_s for start_s, _ in lane_times(row, moves, Kind.EVICT)]
        ends = [end_s for _, end_s in lane_times(row, moves, LOAD_OF[Kind.EVICT])]
        sizes = [move.kept.size for move in moves]
        return np.array(starts + ends), np.array(sizes + [-size for size in sizes])

    def _peak_with(self, held: Balance, rank: int, row: RowClock, moves: Sequence[Move]) -> float:
        """What a rank holds at most when it accepts what another one's row moves."""
        parts = zip(held.of(rank), self._accepted(row, moves), strict=True)
        return peak_of(*(np.concatenate(both) for both in parts))
