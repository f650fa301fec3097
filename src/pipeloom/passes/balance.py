"""BPipe (Kim et al., ICML 2023) for any schedule: full pipeline ranks evict activations to empty ones."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor

import numpy as np

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.passes.budget import checked_budget, checked_kept, kept_on, refuse_missing
from pipeloom.passes.lower_messages import lower
from pipeloom.passes.room import Clock, Move, Plan, RowClock, lane_times, make_room, row_clock, settle
from pipeloom.schedule.clock import SecondsOf, nominal_s, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.ledger import Balance, Bytes, KeptBytes, peak_of
from pipeloom.schedule.schedule import Schedule


@checked
def balance(
    schedule: Schedule,
    kept: KeptBytes | None = None,
    *,
    seconds_of: SecondsOf = nominal_s,
    budget_bytes: Sequence[float] | None = None,
    partners: Sequence[int] | None = None,
) -> Schedule:
    """Pair the ranks; the fuller one of each pair evicts the activations with the latest backwards to the other.

    Pairs follow the peaks of activation memory: the fullest rank with the emptiest, and so on; with 1F1B that is ``s``
    with ``P - 1 - s``. Without budgets the fuller rank keeps half of what both hold together plus one input in
    transfer, in whole inputs: at most ``ceil((P + 2) / 2)`` micro-batches with 1F1B, as BPipe. It keeps more where its
    partner would otherwise be the fuller one, or where a transfer would be late.

    The order of compute does not change. An eviction starts as late as it can while it frees its memory in time; a load
    ends one compute action before its backward, or in idle time right before it. Transfers are in time on the clock of
    ``seconds_of``. On a machine with other times loads may be late and evictions take longer, which costs time or
    memory, never correctness.

    Args:
        schedule: at any level, without evictions; a compute-only schedule is lowered first.
        kept: activation memory of each stage for a micro-batch; ``None`` for 1 each.
        seconds_of: seconds of every action, of ``EVICT`` and ``LOAD`` too. By default a backward is two forwards, and a
            transfer takes one.
        budget_bytes: for each rank its limit, which includes accepted activations and those in transfer; only as many
            are evicted as it takes. ``None``: balance each pair.
        partners: pairs to use instead; see ``Schedule.partners``.

    Returns:
        The schedule with evictions, loads and ``partners``, at the level with communication.

    Raises:
        UserError: it evicts already, arguments have a wrong length, or ranks cannot keep the budget; names them.
    """
    if schedule.facts.has(Kind.EVICT):
        raise UserError("the schedule evicts already; balance one without EVICT and LOAD")
    schedule, kept = lower(schedule), checked_kept(schedule, kept)
    pairs = _partners(schedule, kept, seconds_of) if partners is None else _checked(partners, schedule.num_ranks)
    balancer = _Balancer(replace(schedule, partners=pairs), seconds_of, kept)
    if budget_bytes is None:
        return balancer.balanced()
    return balancer.within(checked_budget(schedule, budget_bytes))


def find_partners(
    schedule: Schedule, kept: KeptBytes | None = None, *, seconds_of: SecondsOf = nominal_s
) -> tuple[int, ...]:
    """The pairs that ``balance`` would choose; needs no seconds of transfers.

    Raises:
        UserError: arguments have a wrong length.
    """
    return _partners(schedule, checked_kept(schedule, kept), seconds_of)


def _partners(schedule: Schedule, kept: KeptBytes, seconds_of: SecondsOf) -> tuple[int, ...]:
    held = kept_on(schedule, times(schedule, seconds_of), kept)
    return pair_ranks([held.peak(rank) for rank in range(schedule.num_ranks)])


def pair_ranks(profile: Sequence[float]) -> tuple[int, ...]:
    """For each rank its partner: the fullest with the emptiest, and so on; an odd rank in the middle gets itself.

    Args:
        profile: for each rank its peak in bytes. Ties: the lower rank counts as fuller.
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
    """A lowered schedule with partners, its seconds and bytes."""

    schedule: Schedule
    seconds_of: SecondsOf
    kept: KeptBytes

    def balanced(self) -> Schedule:
        """Each pair balanced."""
        return self._settled(lambda clock, held, one, other: (self._pair_plan(clock, held, one, other), Plan()))

    def within(self, budget: Sequence[float]) -> Schedule:
        """Every rank within its budget, on the clock of the result."""

        def plans_of(clock: Clock, held: Balance, one: int, other: int) -> tuple[Plan, Plan]:
            row = self._row(clock, held, one)
            plan = make_room(row, budget[one], allows_late=True)
            # Accepted activations count for the other rank, too, which may then have to evict in turn.
            accepting = self._row(clock, held, other).with_more(*_accepted(row, plan.moves))
            return plan, make_room(accepting, budget[other], allows_late=True)

        found = self._settled(plans_of)
        refuse_missing(found, self.seconds_of, self.kept, budget)
        return found

    def _settled(self, plans_of: Callable[[Clock, Balance, int, int], tuple[Plan, Plan]]) -> Schedule:
        """The schedule with the plans of both ranks of each pair, made on the clock that results from them."""
        assert self.schedule.partners is not None
        pairs = [(rank, other) for rank, other in enumerate(self.schedule.partners) if rank < other]

        def plan(clock: Clock) -> list[Plan]:
            held = kept_on(self.schedule, clock, self.kept)
            plans = [Plan()] * self.schedule.num_ranks
            for pair in pairs:
                one, other = pair if held.peak(pair[0]) >= held.peak(pair[1]) else pair[::-1]
                plans[one], plans[other] = plans_of(clock, held, one, other)
            return plans

        return settle(self.schedule, self.seconds_of, Kind.EVICT, plan)

    def _pair_plan(self, clock: Clock, held: Balance, one: int, other: int) -> Plan:
        """The plan with the smallest peak of both ranks, over limits in whole inputs from half of both peaks up.

        A smaller limit makes the other rank fuller: the best is where both meet, or the one below.
        """
        row, mine = self._row(clock, held, one), held.peak(one)
        unit = max((kept.size for kept in row.kept), default=0.0)
        if unit == 0:
            return Plan()
        half = (mine + held.peak(other) + unit) / 2
        caps = [*(unit * n for n in range(max(1, floor(half / unit + 1e-9)), ceil(mine / unit))), mine]

        @cache
        def ends_at(number: int) -> tuple[float, float]:
            """Peaks of both ranks with a limit."""
            plan = make_room(row, caps[number])
            both = zip(held.of(other), _accepted(row, plan.moves), strict=True)
            return caps[number] + plan.missing_bytes, peak_of(*map(np.concatenate, both))

        def is_even(number: int) -> bool:
            mine_then, beside = ends_at(number)
            return beside <= mine_then * (1 + 1e-9)

        # A plan takes a pass over the row, so bisection instead of trying all limits.
        meeting = bisect_left(range(len(caps) - 1), True, key=is_even)
        best = min(range(max(0, meeting - 1), meeting + 1), key=lambda number: (max(ends_at(number)), -number))
        return make_room(row, caps[best])

    def _row(self, clock: Clock, held: Balance, rank: int) -> RowClock:
        sizes = self.kept.moved(self.schedule)
        return row_clock(
            self.schedule, rank, clock, held.of(rank), sizes=sizes, out=Kind.EVICT, seconds_of=self.seconds_of
        )


def _accepted(row: RowClock, moves: Sequence[Move]) -> tuple[Seconds, Bytes]:
    """Times and bytes (positive or negative) of the changes that a rank's moves make at its partner."""
    starts = [start_s for start_s, _ in lane_times(row, moves, row.out)]
    ends = [end_s for _, end_s in lane_times(row, moves, row.back)]
    sizes = np.array([move.kept.size for move in moves])
    return np.array(starts + ends), np.append(sizes, -sizes)
