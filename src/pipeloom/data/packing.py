"""Windows of whole documents: best-fit packing, which cuts only documents that are longer than a window."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeloom.data.tokenizer import TokenArray
from pipeloom.data.windows import Check, TokenWindows, mark_begins


@dataclass(frozen=True)
class Pack:
    """Which parts of the tokens are in which window.

    Attributes:
        begins: first token of each part, in the order of the windows, int64 [parts].
        sizes: its tokens, int64 [parts].
        windows: the first part of each window and, behind those, the number of parts, int64 [windows + 1].
        repeats: whether the first token of each part is the last one of another part, bool [parts].
    """

    begins: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]
    repeats: npt.NDArray[np.bool_]

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return len(self.windows) - 1


def pack(ends: npt.NDArray[np.int64], size: int, overlap: int = 0) -> Pack:
    """Pack documents into windows, the largest first, each into the fullest window that has room for it.

    Documents that are longer than a window are cut into whole windows first, and their rest is packed. Source: H. Ding
    et al., "Fewer Truncations Improve Language Modeling" (ICML 2024).

    Args:
        ends: number of tokens up to the end of each document, rising, [documents].
        size: tokens of a window.
        overlap: tokens that the parts of a document have in common, 0 or 1.
    """
    sizes, step = np.diff(ends, prepend=0), size - overlap
    num_parts = np.maximum(1, -(-(sizes - overlap) // step))
    # Each document as parts of a window each and a last one.
    first = np.repeat(ends - sizes, num_parts)
    place = np.arange(len(first)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    begins = first + place * step
    lengths = np.minimum(size, np.repeat(ends, num_parts) - begins)
    order = np.argsort(-lengths, kind="stable")
    window_of = np.empty(len(order), np.int64)
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms, num_windows = 0, 0  # bit n of rooms: there are windows with room for n tokens
    for part, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, window = size, num_windows
            num_windows += 1
        window_of[part] = window
        if room > length:
            with_room[room - length].append(window)
            rooms |= 1 << (room - length)
    # Within a window in the order of the text.
    by_window = np.argsort(window_of, kind="stable")
    borders = np.searchsorted(window_of[by_window], np.arange(num_windows + 1))
    return Pack(begins[by_window], lengths[by_window], borders, (place[by_window] > 0) & (overlap > 0))


def with_targets(found: Pack, counts: npt.NDArray[np.bool_], *, by_document: bool = False) -> Pack:
    """The windows of a pack that have a target; the first token of a window is never one.

    Args:
        found: the pack.
        counts: for each token whether it is a target, [tokens].
        by_document: whether the first token of a document is never one either.
    """
    before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    of_parts = before[found.begins + found.sizes] - before[found.begins + found.repeats]
    first, of_first = found.windows[:-1], counts[found.begins] & ~found.repeats
    if by_document:
        is_kept = np.add.reduceat(of_parts - of_first, first) > 0
    else:
        is_kept = np.add.reduceat(of_parts, first) - of_first[first] > 0
    parts = np.repeat(is_kept, np.diff(found.windows))
    sizes = np.diff(found.windows)[is_kept]
    borders = np.concatenate([[0], np.cumsum(sizes)])
    return Pack(found.begins[parts], found.sizes[parts], borders, found.repeats[parts])


class PackedWindows(TokenWindows):
    """Windows of whole documents; what is left of a window is filled with tokens that are no target.

    Args:
        tokens: the stream, [tokens].
        seq_len: input tokens of a window.
        seed: determines the order of the windows. None: that of the pack.
        packed: of these tokens.
        filler: the token that fills windows.
        counts: for each token whether it is a target; ``None`` for all.
        by_document: whether windows mark where documents begin, and where what fills them up does.
        check: as of ``TokenWindows``.
    """

    def __init__(
        self,
        tokens: TokenArray,
        seq_len: int,
        seed: int | None,
        *,
        packed: Pack,
        filler: int,
        counts: npt.NDArray[np.bool_] | None = None,
        by_document: bool = False,
        check: Check | None = None,
    ) -> None:
        super().__init__(tokens, seq_len, seed, filler=filler, check=check)
        self.num_windows = packed.num_windows
        self.num_used = int(packed.sizes.sum())
        self._pack, self._fills, self._size, self._counts = packed, filler, seq_len + 1, counts
        self._by_document = by_document

    def read(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """The windows with these numbers in reading order: int64 [numbers, seq_len + 1]; ``~token`` is no target."""
        rows = np.full((len(numbers), self._size), ~self._fills, np.int64)
        for row, number in zip(rows, numbers, strict=True):
            window, at, begins = self._row(number), 0, list[int]()
            for part in range(self._pack.windows[window], self._pack.windows[window + 1]):
                begin, size = int(self._pack.begins[part]), int(self._pack.sizes[part])
                if self._check is not None:
                    self._check(begin, begin + size)
                own = self.tokens[begin : begin + size].astype(np.int64)
                if self._counts is not None:
                    own = np.where(self._counts[begin : begin + size], own, ~own)
                if self._pack.repeats[part]:
                    own[0] = min(own[0], ~own[0])  # a target in the window before
                row[at : at + size] = own
                begins.append(at)
                at += size
            if self._by_document:
                mark_begins(row, [*begins, at] if at < self._size else begins)
        return rows
