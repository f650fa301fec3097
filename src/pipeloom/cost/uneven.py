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

STARTS = 3
"""Cuts that are improved where the best is not known."""

PATIENCE = 1200
"""Moves in a row that find nothing better before a search ends, times stages: with few stages moves take less time."""


@dataclass(frozen=True)
class Uneven:
    """Pieces of any seconds for stages on ranks.

    A *cut* is the index of a stage's first piece; 0 and the number of pieces are cuts, too.

    Attributes:
        seconds: of each piece.
        owner: rank of each stage.
        slow: for each rank, by what seconds are multiplied.
    """

    seconds: Sequence[float]
    owner: Sequence[int]
    slow: Sequence[float]

    def best(self) -> tuple[int, ...]:
        """Pieces of each stage: slowest rank, slowest stage, squares of stages as small as can be, in that order."""
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
        return self._best_of(np.array([self._improved(start)[1:-1] for start in self._starts()]))

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
        """(stages, ranks): the slowness where a stage is on a rank, else 0."""
        return (np.asarray(self.owner)[:, None] == np.arange(len(self.slow))) * self._stage_slow[:, None]

    def _best_of(self, inner: Cuts) -> Cuts:
        """The best of lines of cuts, which come without both ends."""
        ends = np.zeros((len(inner), 1), dtype=np.int64)
        cuts = np.hstack([ends, inner, ends + len(self.seconds)])
        work = np.diff(self._total[cuts], axis=1)
        stages = work * self._stage_slow
        return cuts[_first([(work @ self._on_rank).max(1), stages.max(1), (stages * stages).sum(1)])]

    def _even(self, weight: Floats) -> Cuts:
        """The cuts with the smallest largest ``weight x work`` of a stage, then with the least sum of squares."""
        work = self._total[None, :] - self._total[:, None]  # [begin, end]
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
            loads = np.diff(self._total[cuts]) @ self._on_rank
            weight = weight * np.clip(loads / (loads.mean() or 1.0), 0.5, 2.0)[np.asarray(self.owner)]

    def _improved(self, cuts: Cuts) -> Cuts:
        """Better cuts: for the slowest rank and the ranks' squares, then, within that, for the slowest stage."""
        cuts = self._descend(cuts, self._on_rank, None)
        limit_s = (np.diff(self._total[cuts]) @ self._on_rank).max() * (1 + SAME)
        return self._descend(cuts, np.diag(self._stage_slow), limit_s)

    @cached_property
    def _moves(self) -> tuple[Cuts, Cuts, Cuts]:
        """Every way to shift neighboring cuts by one: 0 up or 1 down, the first inner cut, the one behind the last."""
        begin, end = np.triu_indices(len(self.owner) - 1)
        return np.repeat([0, 1], len(begin)), np.tile(begin, 2), np.tile(end + 1, 2)

    def _descend(self, cuts: Cuts, groups: Floats, limit_s: float | None) -> Cuts:
        """The best cuts on a walk that takes, each time, the best move to cuts where it has not been (tabu search).

        Best is the smallest largest of the groups' seconds, then the least sum of their squares. A piece goes over
        each boundary whose cut a move shifts; only moves that take seconds from the slowest group are looked at. The
        walk ends when moves have found nothing better for long (``PATIENCE``).

        Args:
            cuts: to begin with.
            groups: (stages, groups): the slowness where a stage is in a group.
            limit_s: for ranks, which no move may pass; ``None`` without limit.
        """
        best, best_key = cuts, self._key(cuts, groups)
        seen, since = {cuts.tobytes()}, 0
        while since * len(self.owner) < PATIENCE:
            moves = self._moves_from(cuts, groups, limit_s)
            found = next(((key, then) for key, then in moves if then.tobytes() not in seen), None)
            if found is None:
                break
            key, cuts = found
            seen.add(cuts.tobytes())
            since += 1
            if _is_less(key, best_key):
                best, best_key, since = cuts, key, 0
        return best

    def _key(self, cuts: Cuts, groups: Floats) -> tuple[float, float]:
        now = np.diff(self._total[cuts]) @ groups
        return float(now.max()), float(now @ now)

    def _moves_from(
        self, cuts: Cuts, groups: Floats, limit_s: float | None
    ) -> Iterator[tuple[tuple[float, float], Cuts]]:
        """Moves that take seconds from the slowest group, best first: what they lead to, its key and cuts."""
        work = np.diff(self._total[cuts])
        now = work @ groups
        over = np.array([self._pieces[cuts[1:-1]], -self._pieces[cuts[1:-1] - 1]])
        gained = _sums(over, groups)
        slowest = gained[..., now.argmax()]
        way, begin, end = self._moves
        helps = (slowest[way, end] < slowest[way, begin]) & (np.diff(cuts)[np.where(way, begin, end)] > 1)
        way, begin, end = way[helps], begin[helps], end[helps]
        after = now + gained[way, end] - gained[way, begin]
        most, squares = after.max(1), (after * after).sum(1)
        if limit_s is not None:
            on_rank = _sums(over, self._on_rank)
            ranks = work @ self._on_rank + on_rank[way, end] - on_rank[way, begin]
            most = np.where(ranks.max(1) <= limit_s, most, np.inf)
        for move in np.lexsort((squares, most)):
            if most[move] == np.inf:
                return
            then = cuts.copy()
            then[begin[move] + 1 : end[move] + 1] += -1 if way[move] else 1
            yield (float(most[move]), float(squares[move])), then


def _sums(over: Floats, groups: Floats) -> Floats:
    """(ways, boundaries + 1, groups): what groups gain when all boundaries before one are passed by ``over``."""
    gains = over[..., None] * (groups[:-1] - groups[1:])
    return np.concatenate([np.zeros_like(gains[:, :1]), np.cumsum(gains, axis=1)], axis=1)


def _first(keys: Sequence[Floats]) -> int:
    """Where the first key is least; where several are, the second one among them, and so on."""
    left = np.arange(len(keys[0]))
    for key in keys:
        left = left[key[left] <= key[left].min() * (1 + SAME)]
    return int(left[0])


def _is_less(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether the first numbers are less, or they are equal and the second ones are."""
    if abs(one[0] - other[0]) > SAME * other[0]:
        return one[0] < other[0]
    return one[1] < other[1] * (1 - SAME)
