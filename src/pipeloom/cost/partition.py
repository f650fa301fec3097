"""Partition of pieces into contiguous stages that minimizes the seconds of the slowest pipeline rank.

A rank runs all of its stages in a step, so with several stages per rank the ranks must be balanced, not the stages: the
remainders of an uneven division must not all be on one rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, combinations, repeat
from math import comb

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.flops import piece_flops
from pipeloom.errors import UserError
from pipeloom.schedule import Placement
from pipeloom.workload.adapter import Adapter
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelConfig, shape_of

Floats = NDArray[np.float64]
Cuts = NDArray[np.int64]

SAME = 1e-9
"""Relative difference below which seconds are equal: sums in different orders differ by rounding."""

FEW = 5000
"""Largest number of cuts to enumerate, which takes some milliseconds."""

STARTS = 2
"""Number of cuts from which a search starts."""

PATIENCE = 600
"""A search ends after PATIENCE / stages moves in a row without improvement; with few stages moves are faster."""


def default_partition(
    model: ModelConfig,
    seq_len: int,
    placement: Placement,
    recompute: Sequence[Recompute],
    *,
    frozen_pieces: int = 0,
    adapter: Adapter | None = None,
) -> tuple[int, ...]:
    """The partition that minimizes the FLOPs of the slowest rank, with embedding, head and recomputation.

    Args:
        model: resolved.
        seq_len: tokens of a sequence.
        placement: stage -> pipeline rank.
        recompute: of each layer.
        frozen_pieces: pieces from the first on that train nothing.
        adapter: of the layers that train; ``None`` for none.

    Raises:
        UserError: more stages than pieces.
    """
    return fastest_partition(piece_flops(shape_of(model), seq_len, recompute, frozen_pieces, adapter), placement)


def fastest_partition(
    seconds: Sequence[float], placement: Placement, slowness: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Cut the pieces into stages of at least one contiguous piece each.

    With equal layers, or one stage per rank, it minimizes, in this order: the seconds of the slowest rank, summed over
    its stages; those of the slowest stage; the sum of the stages' squared seconds, so that the others are balanced,
    too. Of equal stages, later ones get the remaining layers: early stages keep activations of more micro-batches, and
    ranks then run their longer stages at the same time.

    With uneven layers and several stages per rank, balanced ranks may still wait for each other all the time, since
    their long stages run at different times. The first stages of all ranks are one round, their second stages the next;
    the slowest stage of a round limits its throughput. So the first criterion is the sum over rounds of the slowest
    stage's seconds, which is never below the slowest rank's; then the slowest rank, then the squares.

    The result is optimal

    - where all pieces except the first and the last are equal (embedding, equal layers, head): each layer goes to the
      stage that is fastest with one more, within the limit of its rank. Limits of stages are nested in those of ranks,
      and for such bounds this greedy algorithm is optimal (they make a laminar matroid);
    - where every rank has one stage: dynamic programming over (stages, pieces);
    - where there are at most ``FEW`` cuts: by enumeration.

    Otherwise a tabu search improves even stages, without a guarantee (docs/plan.md has its success rate on small
    cases).

    Args:
        seconds: of each piece, in order, not negative; for one micro-batch or for the whole step.
        placement: stage -> pipeline rank.
        slowness: for each rank a factor of the seconds, above 0; ``None`` if all ranks are equally fast.

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
    # First minimize the slowest rank's seconds, then divide layers among stages within the limits of ranks that follow.
    rank_room = ranks.room(ranks.poured(left).slowest_s(), left)
    # With equal ranks, the stage that is fastest with one layer more is also the one whose square grows least.
    if len(set(slow)) == 1:
        best = stages.poured(left, owner, rank_room)
    else:
        slowest_s = stages.poured(left, owner, rank_room).slowest_s()
        best = stages.poured(left, owner, rank_room, stages.room(slowest_s, left), by_squares=True)
    return best.held[0] + 1, *best.held[1:-1], best.held[-1] + 1


@dataclass
class _Places:
    """Stages, or ranks, with their layers.

    Attributes:
        base: for each place its seconds without layers.
        step: for each place the seconds of a layer.
        held: for each place its number of layers.
    """

    base: list[float]
    step: list[float]
    held: list[int]

    def slowest_s(self) -> float:
        """Seconds of the slowest place."""
        return max(base + step * held for base, step, held in zip(self.base, self.step, self.held, strict=True))

    def room(self, limit_s: float, most: int) -> list[int]:
        """For each place the number of layers, at most ``most``, that it can add without exceeding ``limit_s``."""
        # Rounding may put a sum slightly above the limit, which would cost a place one layer.
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
        """The places with ``amount`` more layers, each added where it costs least; of equal places, at the last.

        Args:
            amount: number of layers, within the limits.
            group: for each place its group, if groups have limits.
            group_room: for each group the number of layers that it may add.
            room: for each place the number of layers that it may add; ``None`` for no limit.
            by_squares: whether the cost of a layer is the increase of the place's squared seconds, instead of the
                place's seconds with the layer.
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
        # Negative indices, so that the heap returns the last of equal places.
        heap = [(first[place] + more[place] * held[place], -place) for place in range(count)]
        heapify(heap)
        while amount:
            place = -heap[0][1]
            # Limits only shrink, so a full place stays full.
            if not left[place_of[place]] or held[place] == full[place]:
                heappop(heap)
                continue
            held[place] += 1
            left[place_of[place]] -= 1
            amount -= 1
            heapreplace(heap, (first[place] + more[place] * held[place], -place))
        return _Places(self.base, self.step, held)


@dataclass(frozen=True)
class Uneven:
    """Partitions of pieces with any seconds.

    A *cut* is the index of a stage's first piece; 0 and the number of pieces are cuts, too. The first stages of all
    ranks are the first *round*, their second stages the second round, and so on. The objective is the sum over rounds
    of the slowest stage's seconds, then the slowest rank's seconds, then the sum of the stages' squared seconds.

    Attributes:
        seconds: of each piece.
        owner: rank of each stage.
        slow: for each rank a factor of the seconds.
    """

    seconds: Sequence[float]
    owner: Sequence[int]
    slow: Sequence[float]

    def best(self) -> tuple[int, ...]:
        """Number of pieces of each stage."""
        pieces, stages = len(self.seconds), len(self.owner)
        if len(self.slow) == stages:
            cuts = self._even(self._stage_slow)
        elif comb(pieces - 1, stages - 1) <= FEW:
            cuts = self.tried()
        else:
            cuts = self.searched()
        return tuple(int(size) for size in np.diff(cuts))

    def tried(self) -> Cuts:
        """The best of all cuts, by enumeration."""
        return self._best_of(np.array(list(combinations(range(1, len(self.seconds)), len(self.owner) - 1))))

    def searched(self) -> Cuts:
        """The best cuts of tabu searches, not necessarily optimal."""
        return self._best_of(np.array([self._walked(start)[1:-1] for start in self._starts()]))

    def judged(self, stages: Floats) -> tuple[Floats, Floats, Floats]:
        """The objective for each row of stages' seconds: rounds, slowest rank, sum of squares."""
        order, starts = self._rounds
        rounds = np.maximum.reduceat(stages[:, order], starts, axis=1).sum(1)
        return rounds, (stages @ self._on_rank).max(1), (stages * stages).sum(1)

    @cached_property
    def _total(self) -> Floats:
        return np.array([0.0, *accumulate(self.seconds)])

    @cached_property
    def _pieces(self) -> Floats:
        return np.asarray(self.seconds, dtype=np.float64)

    @cached_property
    def _stage_slow(self) -> Floats:
        return np.asarray(self.slow, dtype=np.float64)[np.asarray(self.owner)]

    @cached_property
    def _on_rank(self) -> Floats:
        """(stages, ranks): 1 where a stage is on a rank."""
        return (np.asarray(self.owner)[:, None] == np.arange(len(self.slow))).astype(np.float64)

    @cached_property
    def _rounds(self) -> tuple[Cuts, Cuts]:
        """The stages ordered by round, and the index of each round's first stage in that order."""
        number = [self.owner[:stage].count(rank) for stage, rank in enumerate(self.owner)]
        return np.argsort(number, kind="stable"), np.searchsorted(np.sort(number), np.arange(max(number) + 1))

    def _stages(self, cuts: Cuts) -> Floats:
        """Seconds of the stages, for one array of cuts or for rows of cuts."""
        return np.diff(self._total[cuts], axis=-1) * self._stage_slow

    def _best_of(self, inner: Cuts) -> Cuts:
        """The best of several rows of cuts without both ends, with both ends."""
        ends = np.zeros((len(inner), 1), dtype=np.int64)
        cuts = np.hstack([ends, inner, ends + len(self.seconds)])
        return cuts[_first(self.judged(self._stages(cuts)))]

    def _even(self, weight: Floats) -> Cuts:
        """The cuts that minimize the maximum of a stage's ``weight x work``, then the sum of its squares."""
        work = self._total[None, :] - self._total[:, None]  # [begin, end]
        # A stage has at least one piece.
        work[np.tril_indices(len(work))] = np.inf
        most = np.full(len(work), np.inf)
        most[0] = 0.0
        for each in weight:
            most = np.maximum(most[:, None], each * work).min(0)
        squares = np.full(len(work), np.inf)
        begins: list[Cuts] = []
        squares[0] = 0.0
        for each in weight:
            scaled = each * work
            sums = squares[:, None] + np.where(scaled <= most[-1] * (1 + SAME), scaled * scaled, np.inf)
            begins.append(sums.argmin(0))
            squares = sums.min(0)
        cuts = [len(work) - 1]
        for begin in reversed(begins):
            cuts.append(int(begin[cuts[-1]]))
        return np.array(cuts[::-1])

    def _starts(self) -> Iterator[Cuts]:
        """Cuts of even stages, then of stages whose weights are corrected by the loads of their ranks."""
        weight = self._stage_slow
        for _ in range(STARTS):
            cuts = self._even(weight)
            yield cuts
            loads = self._stages(cuts) @ self._on_rank
            weight = weight * np.clip(loads / (loads.mean() or 1.0), 0.5, 2.0)[np.asarray(self.owner)]

    @cached_property
    def _moves(self) -> tuple[Cuts, Cuts, Cuts]:
        """All moves of adjacent cuts by one piece: direction (0 up, 1 down), first inner cut, last inner cut + 1."""
        begin, end = np.triu_indices(len(self.owner) - 1)
        return np.repeat([0, 1], len(begin)), np.tile(begin, 2), np.tile(end + 1, 2)

    def _walked(self, cuts: Cuts) -> Cuts:
        """The best cuts of a tabu search, which always takes the best move to cuts that it has not visited.

        A move shifts one piece over each of some adjacent cuts. Only moves that shorten the slowest stage of a round
        are considered. The search ends after moves without improvement (``PATIENCE``).
        """
        best, best_key = cuts, tuple(float(key[0]) for key in self.judged(self._stages(cuts)[None]))
        seen, since = {cuts.tobytes()}, 0
        while since * len(self.owner) < PATIENCE:
            found = next(((key, then) for key, then in self._moves_from(cuts) if then.tobytes() not in seen), None)
            if found is None:
                break
            key, cuts = found
            seen.add(cuts.tobytes())
            since += 1
            if _is_less(key, best_key):
                best, best_key, since = cuts, key, 0
        return best

    def _moves_from(self, cuts: Cuts) -> Iterator[tuple[tuple[float, ...], Cuts]]:
        """(objective, cuts) of the moves that shorten the slowest stage of a round, best first."""
        now = self._stages(cuts)
        over = np.array([self._pieces[cuts[1:-1]], -self._pieces[cuts[1:-1] - 1]])
        gained = _sums(over, np.diag(self._stage_slow))
        way, begin, end = self._moves
        order, starts = self._rounds
        slowest = [part[now[part].argmax()] for part in np.split(order, starts[1:])]
        helps = (gained[way, end][:, slowest] < gained[way, begin][:, slowest]).any(1)
        # A stage that loses a piece must keep one.
        helps &= np.diff(cuts)[np.where(way, begin, end)] > 1
        way, begin, end = way[helps], begin[helps], end[helps]
        rounds, ranks, squares = self.judged(now + gained[way, end] - gained[way, begin])
        # The last key of lexsort is the primary one.
        for move in np.lexsort((squares, rounds)):
            then = cuts.copy()
            then[begin[move] + 1 : end[move] + 1] += -1 if way[move] else 1
            yield (float(rounds[move]), float(ranks[move]), float(squares[move])), then


def _sums(over: Floats, groups: Floats) -> Floats:
    """(directions, boundaries + 1, groups): seconds that groups gain if ``over`` crosses all boundaries before one."""
    gains = over[..., None] * (groups[:-1] - groups[1:])
    return np.concatenate([np.zeros_like(gains[:, :1]), np.cumsum(gains, axis=1)], axis=1)


def _first(keys: Sequence[Floats]) -> int:
    """Index of the smallest row by the first key, of equal ones by the second, and so on."""
    left = np.arange(len(keys[0]))
    for key in keys:
        # Up to rounding, since otherwise the first key alone would decide.
        left = left[key[left] <= key[left].min() * (1 + SAME)]
    return int(left[0])


def _is_less(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether ``one`` precedes ``other`` in lexicographic order, up to rounding."""
    for mine, theirs in zip(one, other, strict=True):
        if abs(mine - theirs) > SAME * theirs:
            return mine < theirs
    return False
