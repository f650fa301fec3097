"""Cuts of uneven pieces into stages: by dynamic programming, all of them tried, or improved move by move."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Cuts = NDArray[np.int64]

SAME = 1e-9
"""Relative difference below which seconds count as equal: sums in another order differ by rounding."""

FEW = 5000
"""Cuts that are tried one by one: some milliseconds."""

STARTS = 2
"""Cuts that are improved where the best is not known."""

PATIENCE = 600
"""Moves in a row that find nothing better before a search ends, times stages: with few stages moves take less time."""


@dataclass(frozen=True)
class Uneven:
    """Pieces of any seconds for stages on ranks.

    A *cut* is the index of a stage's first piece; 0 and the number of pieces are cuts, too. The first stages of all
    ranks are the first *round*, the second ones the second round, and so on. What is minimised is the sum of the
    rounds' slowest stages, then the slowest rank, then the sum of the stages' squares.

    Attributes:
        seconds: of each piece.
        owner: rank of each stage.
        slow: for each rank, by what seconds are multiplied.
    """

    seconds: Sequence[float]
    owner: Sequence[int]
    slow: Sequence[float]

    def best(self) -> tuple[int, ...]:
        """Pieces of each stage."""
        pieces, stages = len(self.seconds), len(self.owner)
        if len(self.slow) == stages:
            cuts = self._even(self._stage_slow)
        elif comb(pieces - 1, stages - 1) <= FEW:
            cuts = self.tried()
        else:
            cuts = self.searched()
        return tuple(int(size) for size in np.diff(cuts))

    def tried(self) -> Cuts:
        """The best of all cuts."""
        return self._best_of(np.array(list(combinations(range(1, len(self.seconds)), len(self.owner) - 1))))

    def searched(self) -> Cuts:
        """The best cuts that a search finds, which may not be the best there are."""
        return self._best_of(np.array([self._walked(start)[1:-1] for start in self._starts()]))

    def judged(self, stages: Floats) -> tuple[Floats, Floats, Floats]:
        """For each line of stages' seconds: the rounds, the slowest rank, the sum of squares; the less, the better."""
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
        """The stages in the order of their rounds, and where each round begins there."""
        number = [self.owner[:stage].count(rank) for stage, rank in enumerate(self.owner)]
        return np.argsort(number, kind="stable"), np.searchsorted(np.sort(number), np.arange(max(number) + 1))

    def _stages(self, cuts: Cuts) -> Floats:
        """Seconds of the stages, for cuts or lines of them."""
        return np.diff(self._total[cuts], axis=-1) * self._stage_slow

    def _best_of(self, inner: Cuts) -> Cuts:
        """The best of lines of cuts, which come without both ends."""
        ends = np.zeros((len(inner), 1), dtype=np.int64)
        cuts = np.hstack([ends, inner, ends + len(self.seconds)])
        return cuts[_first(self.judged(self._stages(cuts)))]

    def _even(self, weight: Floats) -> Cuts:
        """The cuts with the smallest largest ``weight x work`` of a stage, then with the least sum of squares."""
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
        """Even stages first; then those of ranks that had more than their share get less, and the other way round."""
        weight = self._stage_slow
        for _ in range(STARTS):
            cuts = self._even(weight)
            yield cuts
            loads = self._stages(cuts) @ self._on_rank
            weight = weight * np.clip(loads / (loads.mean() or 1.0), 0.5, 2.0)[np.asarray(self.owner)]

    @cached_property
    def _moves(self) -> tuple[Cuts, Cuts, Cuts]:
        """Every way to shift neighboring cuts by one: 0 up or 1 down, the first inner cut, the one behind the last."""
        begin, end = np.triu_indices(len(self.owner) - 1)
        return np.repeat([0, 1], len(begin)), np.tile(begin, 2), np.tile(end + 1, 2)

    def _walked(self, cuts: Cuts) -> Cuts:
        """The best cuts on a walk that takes, each time, the best move to cuts where it has not been (tabu search).

        A piece goes over each boundary whose cut a move shifts; only moves that take seconds from the slowest stage of
        a round are looked at. The walk ends when moves have found nothing better for long (``PATIENCE``).
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
        """Moves that take seconds from the slowest stage of a round, best first: how the cuts are judged, the cuts."""
        now = self._stages(cuts)
        over = np.array([self._pieces[cuts[1:-1]], -self._pieces[cuts[1:-1] - 1]])
        gained = _sums(over, np.diag(self._stage_slow))
        way, begin, end = self._moves
        order, starts = self._rounds
        slowest = [part[now[part].argmax()] for part in np.split(order, starts[1:])]
        helps = (gained[way, end][:, slowest] < gained[way, begin][:, slowest]).any(1)
        # The stage that gives a piece must keep one.
        helps &= np.diff(cuts)[np.where(way, begin, end)] > 1
        way, begin, end = way[helps], begin[helps], end[helps]
        rounds, ranks, squares = self.judged(now + gained[way, end] - gained[way, begin])
        # lexsort takes its last key as the first.
        for move in np.lexsort((squares, rounds)):
            then = cuts.copy()
            then[begin[move] + 1 : end[move] + 1] += -1 if way[move] else 1
            yield (float(rounds[move]), float(ranks[move]), float(squares[move])), then


def _sums(over: Floats, groups: Floats) -> Floats:
    """(ways, boundaries + 1, groups): what groups gain when all boundaries before one are passed by ``over``."""
    gains = over[..., None] * (groups[:-1] - groups[1:])
    return np.concatenate([np.zeros_like(gains[:, :1]), np.cumsum(gains, axis=1)], axis=1)


def _first(keys: Sequence[Floats]) -> int:
    """Where the first key is least; where several are, the second one among them, and so on."""
    left = np.arange(len(keys[0]))
    for key in keys:
        # Equal up to rounding, or the first key would always decide.
        left = left[key[left] <= key[left].min() * (1 + SAME)]
    return int(left[0])


def _is_less(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the first numbers that differ are less in ``one``."""
    for mine, theirs in zip(one, other, strict=True):
        if abs(mine - theirs) > SAME * theirs:
            return mine < theirs
    return False
