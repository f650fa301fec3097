"""Pieces -> stages: cut a list of seconds into contiguous stages, the slowest pipeline rank as fast as possible.

A rank's work in a step is that of all its stages, so with loops it is ranks that have to be even, not stages: pieces
that do not divide evenly must not all land on one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import repeat

from pipeloom.cost.uneven import SAME, Uneven
from pipeloom.errors import UserError
from pipeloom.schedule import Placement


def fastest_partition(
    seconds: Sequence[float], placement: Placement, slowness: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Cut the pieces into one run of at least one piece for each stage.

    With equal layers, or one stage for each rank, it minimises, in this order: the seconds of the slowest rank, which
    has the work of all its stages; those of the slowest stage; the sum of the stages' squared seconds, so that the rest
    is even too. Where layers may go to several stages all the same, the later ones get them: the first ones keep what
    they need for more micro-batches, and ranks have their longer stages at the same time.

    With uneven layers and several stages on a rank the ranks' sums can be even while ranks wait for each other all
    the time, because their long stages come at different times. The first stages of all ranks are one round, the second
    ones the next; micro-batches go through a round at the pace of its slowest stage. So there the sum of the rounds'
    slowest stages comes first, which is never below the slowest rank; then the slowest rank, then the squares.

    Exact

    - where all pieces but the first and the last one are equal (embedding, equal layers, head): layers are given, one
      by one, to the stage that is fastest with one more, within what its rank may have. A stage's room is part of its
      rank's, and for such nested bounds this greedy algorithm is optimal (they make a laminar matroid);
    - where every rank has one stage: dynamic programming over (stages, pieces);
    - where there are at most ``uneven.FEW`` ways to cut: all are tried.

    Otherwise even stages are improved by a tabu search: good, and not always the best (docs/plan.md says how often it
    is on small cases).

    Args:
        seconds: of each piece, in order, not negative; for one micro-batch or for the whole step.
        placement: stages, and the rank of each.
        slowness: for each rank, by what seconds are multiplied there, above 0; ``None`` where ranks are alike.

    Returns:
        Number of pieces of each stage.

    Raises:
        UserError: more stages than pieces.
    """
    owner, num_stages, pieces = placement.rank_by_stage, placement.num_stages, len(seconds)
    if num_stages > pieces:
        raise UserError(f"cannot cut {pieces} pieces into {num_stages} stages of at least one piece each")
    slow = tuple(slowness) if slowness is not None else (1.0,) * placement.num_ranks
    assert len(slow) == placement.num_ranks, "a slowness for each rank"
    # ``first`` and ``last`` would be the same piece.
    if num_stages == 1:
        return (pieces,)
    first, *layers, last = seconds
    # The usual model has equal layers, for which the greedy algorithm is exact.
    if not layers or layers.count(layers[0]) == len(layers):
        return _equal_layers((first, last), layers[0] if layers else 0.0, len(layers), owner, slow)
    return Uneven(seconds, owner, slow).best()


def _equal_layers(
    ends: tuple[float, float], layer: float, layers: int, owner: tuple[int, ...], slow: tuple[float, ...]
) -> tuple[int, ...]:
    """The partition of [first end, layer, ..., layer, last end] for at least two stages."""
    inner = len(owner) - 2
    stage_slow = [slow[rank] for rank in owner]
    base = [stage_slow[0] * ends[0], *[0.0] * inner, stage_slow[-1] * ends[1]]
    stages = _Places(base, [each * layer for each in stage_slow], [0, *[1] * inner, 0])
    ranks = _Places([0.0] * len(slow), [each * layer for each in slow], [0] * len(slow))
    for stage, rank in enumerate(owner):
        ranks.base[rank] += base[stage]
        ranks.held[rank] += stages.held[stage]
    left = layers - inner
    # First how fast the slowest rank can be, then stages within what that leaves each rank.
    rank_room = ranks.room(ranks.poured(left).slowest_s(), left)
    if len(set(slow)) == 1:  # the stage that is fastest with one more is also the one whose square grows least
        best = stages.poured(left, owner, rank_room)
    else:
        slowest_s = stages.poured(left, owner, rank_room).slowest_s()
        best = stages.poured(left, owner, rank_room, stages.room(slowest_s, left), by_squares=True)
    return best.held[0] + 1, *best.held[1:-1], best.held[-1] + 1


@dataclass
class _Places:
    """Stages or ranks that hold layers.

    Attributes:
        base: of each place its seconds without layers.
        step: of each place the seconds of a layer.
        held: layers of each place.
    """

    base: list[float]
    step: list[float]
    held: list[int]

    def slowest_s(self) -> float:
        """Seconds of the slowest place."""
        return max(base + step * held for base, step, held in zip(self.base, self.step, self.held, strict=True))

    def room(self, limit_s: float, most: int) -> list[int]:
        """For each place the layers, at most ``most``, that it can take without being slower than a limit."""
        # A sum in another order may be above the limit by rounding, and a place would lose a layer.
        limit_s *= 1 + SAME
        return [
            most if step <= 0 else max(0, min(most, int((limit_s - base) / step) - held))
            for base, step, held in zip(self.base, self.step, self.held, strict=True)
        ]

    def poured(
        self,
        amount: int,
        group: Sequence[int] | None = None,
        group_room: Sequence[int] = (),
        room: Sequence[int] | None = None,
        *,
        by_squares: bool = False,
    ) -> "_Places":
        """The places with ``amount`` more layers, each where it costs least; of equals, at the last place.

        Args:
            amount: that there is room for.
            group: of each place, if groups have limited room.
            group_room: layers that each group may get.
            room: layers that each place may get; ``None`` without limit.
            by_squares: a layer costs what the square of the place's seconds grows by, not the seconds with it.
        """
        held, count = list(self.held), len(self.held)
        full = (
            [amount + have for have in held]
            if room is None
            else [have + more for have, more in zip(held, room, strict=True)]
        )
        if by_squares:
            first = [step * (2 * base + step) for base, step in zip(self.base, self.step, strict=True)]
            more = [2 * step * step for step in self.step]
        else:
            first, more = [base + step for base, step in zip(self.base, self.step, strict=True)], self.step
        place_of, left = group or range(count), list(group_room or repeat(amount, count))
        # The negative number makes the last of equal places come first.
        heap = [(first[place] + more[place] * held[place], -place) for place in range(count)]
        heapify(heap)
        while amount:
            place = -heap[0][1]
            # Room never grows again, so a place that is full once is full for good.
            if not left[place_of[place]] or held[place] == full[place]:
                heappop(heap)
                continue
            held[place] += 1
            left[place_of[place]] -= 1
            amount -= 1
            heapreplace(heap, (first[place] + more[place] * held[place], -place))
        return _Places(self.base, self.step, held)
