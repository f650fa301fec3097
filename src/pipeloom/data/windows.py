"""Windows of tokens in a reproducible order: of one text, and of several in given shares."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pipeloom.data.order import SLOW, Order
from pipeloom.data.tokenizer import TokenArray
from pipeloom.errors import UserError

Check = Callable[[int, int], None]
_BEGINS = 1 << 40
"""Marks a token that begins a document; more than any token."""


class TokenWindows:
    """Windows of ``seq_len + 1`` tokens, in an order determined by a seed.

    Every epoch visits each window once; with a seed, each epoch in another order. A batch is a pure function of its
    index, so the whole state of the reader is one integer. Without ``overlap``, windows have no token in common, and
    the first of each is no target.

    Args:
        tokens: the stream, [tokens]; may be a memory-mapped file.
        seq_len: input tokens of a window, which has one more, the last target.
        seed: determines the order. None: the order of the text.
        begins: places in the stream where documents begin, rising, if windows mark them; such a token is no target.
        filler: the token that fills the last window; it is no target. None: tokens after the last full window are not
            used.
        overlap: tokens that a window has in common with the next one, 0 or 1; with 1, every token but the first is a
            target once.
        check: called with the first token of a part of the stream that is read, and the one behind its last; raises a
            ``UserError`` if the part is damaged.

    Raises:
        UserError: there is no window.
    """

    def __init__(
        self,
        tokens: TokenArray,
        seq_len: int,
        seed: int | None = None,
        *,
        begins: npt.NDArray[np.int64] | None = None,
        filler: int | None = None,
        overlap: int = 0,
        check: Check | None = None,
    ) -> None:
        size, self._step = seq_len + 1, seq_len + 1 - overlap
        least = size if filler is None else 2
        if len(tokens) < least:
            raise UserError(f"data.seq_len {seq_len} needs at least {least} tokens, found {len(tokens)}")
        self.tokens = tokens
        # Still a view of the memory-mapped file: only the rows of a batch are read.
        whole = sliding_window_view(tokens, size)[:: self._step] if len(tokens) >= size else tokens[:0].reshape(0, size)
        num_full = len(whole)
        self._windows, self._rest, self._filler = whole, tokens[num_full * self._step :], filler
        # A single token has none before it that would predict it.
        self.num_windows = num_full + (filler is not None and len(self._rest) > 1)
        self._seed = seed
        self._begins = begins
        self._check = check
        self._first = 0
        self._orders: dict[int, Order] = {}

    def batch(self, index: int, batch_size: int) -> npt.NDArray[np.int64]:
        """A batch of windows.

        Args:
            index: of the batch, from 0; after the last window the next epoch begins.
            batch_size: windows of a batch.

        Returns:
            Tokens, int64 [batch_size, seq_len + 1]: inputs are ``[:, :-1]``, targets are ``[:, 1:]``. One that is no
            target is stored as ``~token``, which is negative; ``without_marks`` and ``document_begins`` read them.
        """
        first = self._first + index * batch_size
        return self.read(range(first, first + batch_size))

    def read(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """The windows with these numbers in reading order, counted over all epochs: int64 [numbers, seq_len + 1]."""
        places = [self._row(number) for number in numbers]
        rows = self._rows(places)
        if self._begins is not None:
            for row, place in zip(rows, places, strict=True):
                at = place * self._step
                first, behind = np.searchsorted(self._begins, (at, at + len(row)))
                begins = self._begins[first:behind] - at
                # What fills the window up is a document of its own, as in packed windows.
                mark_begins(row, np.append(begins, len(self._rest)) if place == len(self._windows) else begins)
        return rows

    def _rows(self, places: Sequence[int]) -> npt.NDArray[np.int64]:
        if self._check is not None:
            for place in places:
                self._check(place * self._step, min(place * self._step + self._windows.shape[1], len(self.tokens)))
        if len(self._windows) not in places:
            return np.asarray(self._windows[places], dtype=np.int64)
        assert self._filler is not None
        rest = self._rest.astype(np.int64)
        last = np.append(rest, np.full(self._windows.shape[1] - len(rest), ~self._filler, np.int64))
        return np.stack([last if place == len(self._windows) else self._windows[place] for place in places])

    def resumed(self, num_read: int) -> "TokenWindows":
        """The same windows; batch 0 begins behind those that were read, in batches of any size."""
        other = copy(self)
        other._first = num_read  # noqa: SLF001  a copy of this object
        return other

    def position(self, _num_windows: int) -> list[dict[str, Any]]:
        """What a checkpoint stores of several sources: nothing here, since the number of windows is enough."""
        return []

    def _row(self, number: int) -> int:
        epoch, place = divmod(number, self.num_windows)
        if self._seed is None:
            return place
        if place * 2 > self.num_windows > SLOW:
            # A thread sorts the next epoch's windows, so that its first batch does not wait.
            self._order(epoch + 1).begin()
        return int(self._order(epoch).places[place])

    def _order(self, epoch: int) -> Order:
        if epoch not in self._orders:
            assert self._seed is not None
            # Of a batch at the border of two epochs both are needed.
            self._orders = {one: self._orders[one] for one in (epoch - 1, epoch + 1) if one in self._orders}
            self._orders[epoch] = Order(self._seed, epoch, self.num_windows)
        return self._orders[epoch]


@dataclass(frozen=True)
class _Read:
    """What a checkpoint stores of a source.

    Attributes:
        text: fingerprint, which finds the source again.
        path: the same, if the text has changed.
        weight: 0 for a source that is not read any more, whose number of windows is kept.
        windows: read so far.
        before: read before the present weights began.
    """

    text: str
    path: str
    weight: float
    windows: int
    before: int


class Mixture:
    """Windows of several sources, in shares that follow their weights from the first window on.

    Which source is next follows from the numbers of windows read of each since the weights began (:class:`Turns`), and
    the next window of a source from their number alone. So new weights neither skip nor repeat a window.

    Args:
        parts: windows of each source.
        weights: of each source; above 0.
        names: fingerprint and path of each source.
    """

    def __init__(
        self, parts: Sequence[TokenWindows], weights: Sequence[float], names: Sequence[tuple[str, str]]
    ) -> None:
        self.num_windows = sum(part.num_windows for part in parts)
        self._parts, self._weights, self._names = parts, weights, names
        self._turns = Turns(weights)
        self._before = self._begin = (0,) * len(parts)
        self._gone: list[_Read] = []
        self._reached = 0, list(self._begin)

    def batch(self, index: int, batch_size: int) -> npt.NDArray[np.int64]:
        """A batch of windows, as :meth:`TokenWindows.batch`; reading in order is fast, going back is not."""
        counts = self._counts(index * batch_size)
        rows: list[npt.NDArray[np.int64]] = []
        for _ in range(batch_size):
            source = self._turns.next([count - before for count, before in zip(counts, self._before, strict=True)])
            rows.append(self._parts[source].read([counts[source]]))
            counts[source] += 1
        self._reached = (index + 1) * batch_size, counts
        return np.concatenate(rows)

    def resumed(self, num_read: int, stored: Sequence[Mapping[str, Any]], text: str) -> "Mixture":
        """The same sources, behind the windows that were read before a checkpoint.

        Args:
            num_read: windows read in all.
            stored: of the checkpoint, from :meth:`position`; empty if it was of one text.
            text: fingerprint of that text.
        """
        earlier = [_Read(**one) for one in stored] or [_Read(text, "", 1.0, num_read, 0)]
        found = _found(earlier, self._names)
        other = copy(self)
        other._begin = tuple(0 if one is None else one.windows for one in found)  # noqa: SLF001  a copy of this object
        other._gone = [_gone(one) for one in earlier if one not in found and one.windows]  # noqa: SLF001
        is_same = len(stored) > 0 and not any(one.weight for one in earlier if one not in found)
        weights = [0.0 if one is None else one.weight for one in found]
        is_same = is_same and all(weights) and Turns(weights).weights == self._turns.weights
        # Shares count from where their weights began: new weights make up for nothing that was read with others.
        before = tuple(0 if one is None else one.before for one in found)
        other._before = before if is_same else other._begin  # noqa: SLF001
        other._reached = 0, list(other._begin)  # noqa: SLF001
        return other

    def position(self, num_windows: int) -> list[dict[str, Any]]:
        """What a checkpoint stores after so many windows, counted from batch 0."""
        every = zip(self._names, self._weights, self._counts(num_windows), self._before, strict=True)
        found = [_Read(*name, weight, count, before) for name, weight, count, before in every]
        return [asdict(one) for one in (*found, *self._gone)]

    def _counts(self, num_windows: int) -> list[int]:
        """Windows read of each source after so many, counted from batch 0."""
        reached, counts = self._reached
        if reached > num_windows:
            reached, counts = 0, list(self._begin)
        counts = list(counts)
        for _ in range(num_windows - reached):
            counts[self._turns.next([count - before for count, before in zip(counts, self._before, strict=True)])] += 1
        self._reached = num_windows, list(counts)
        return counts


def _found(earlier: Sequence[_Read], names: Sequence[tuple[str, str]]) -> list[_Read | None]:
    """What was read of each source: of its text, or else of its path; of equal texts, that of the same path first."""
    found: list[_Read | None] = [None] * len(names)
    left = list(earlier)
    ways = ((True, True), (True, False), (False, True))
    for by_text, by_path in ways:
        for number, (text, path) in enumerate(names):
            fits = (one for one in left if (one.text == text or not by_text) and (one.path == path or not by_path))
            if found[number] is None and (one := next(fits, None)) is not None:
                found[number] = one
                left.remove(one)
    return found


def _gone(read: _Read) -> _Read:
    return _Read(read.text, read.path, 0.0, read.windows, read.before)


class Turns:
    """Whose turn it is, so that each count stays within one of its share at every draw.

    The rule of R. Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): after any number of
    draws a count differs from its share by at most 1 - 1 / (2 n - 2), for n sources.

    Args:
        weights: of each source; above 0.

    Attributes:
        weights: the same as the smallest whole numbers.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # By their decimal digits, so that 0.1 is a tenth, and in whole numbers: sums of floats would drift.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(one.denominator for one in exact))
        whole = [int(one * scale) for one in exact]
        divisor = gcd(*whole)
        self.weights = tuple(one // divisor for one in whole)
        self._total = sum(self.weights)
        self._scale = max(1, 2 * len(whole) - 2)

    def next(self, counts: Sequence[int]) -> int:
        """The source of the next draw, after so many draws of each."""
        number = sum(counts) + 1
        best, best_late, best_weight = 0, None, 1
        for source, weight in enumerate(self.weights):
            # What the source lacks of its share after this draw, in parts of the total.
            lacks = self._scale * (weight * number - self._total * counts[source])
            if lacks < self._total:
                continue
            # Draws until it would lack too much, as a fraction late / weight; the earliest is next.
            late = (self._scale - 1) * self._total - lacks
            if best_late is None or late * best_weight < best_late * weight:
                best, best_late, best_weight = source, late, weight
        return best


def without_marks(windows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The tokens of windows, a copy."""
    return np.where(windows < 0, ~windows, windows) & (_BEGINS - 1)


def mark_begins(row: npt.NDArray[np.int64], places: npt.NDArray[np.int64] | Sequence[int]) -> None:
    """Mark, in place, the tokens of a window that begin a document; they are no targets."""
    row[places] = ~(without_marks(row[places]) | _BEGINS)


def document_begins(windows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each token of windows whether a document is marked to begin there."""
    return (windows < 0) & ((~windows & _BEGINS) > 0)


Windows = TokenWindows | Mixture
"""What a run reads its batches from."""


def resumed(
    windows: Windows, name: tuple[str, str], num_read: int, stored: Sequence[Mapping[str, Any]], text: str
) -> Windows:
    """The windows of a run behind those that were read before a checkpoint.

    Args:
        windows: of the run.
        name: fingerprint and path of its text, if it is one.
        num_read: windows read in all.
        stored: what the checkpoint has of several sources (``position``); empty if it was of one text.
        text: fingerprint of that text.
    """
    if isinstance(windows, TokenWindows):
        if not stored:
            return windows.resumed(num_read)
        # One of the sources before, or a new one: its own windows alone count. Those of the others stay stored.
        windows = Mixture([windows], [1.0], [name])
    return windows.resumed(num_read, stored, text)
