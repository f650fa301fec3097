"""The keys that a query sees: those of earlier tokens, of a window, and of its own document, in which positions count
from 0.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeloom.model.graph_breaks import graph_break


class Documents:
    """Documents of the tokens of a micro-batch, or of one of its slices, with the masks made of them.

    A stage keeps it from the forward to the backward, so that all layers and stages of a rank share the masks.

    Attributes:
        firsts_BT: for each token the place in the sequence of the first token of its document, int64.
    """

    def __init__(self, firsts_BT: Tensor) -> None:
        self.firsts_BT = firsts_BT
        self._added: Tensor | None = None
        self._blocks: dict[int | None, Any] = {}

    def positions(self, places_T: Tensor) -> Tensor:
        """The position of each token in its document, int64 [B, T], from their places in the sequence."""
        return places_T - self.firsts_BT

    @graph_break  # a graph break: the first layer makes the mask, others find it
    def added(self, visible: "VisibleKeys", query: Tensor) -> Tensor:
        """Added to scores: 0 where the query sees the key, else minus infinity, [B, 1, T, S], of the queries' type.

        The same at every call, for keys without a window.
        """
        if self._added is None:
            num_queries = query.shape[2]
            is_seen = visible.mask(range(num_queries), range(visible.begin + num_queries), query.device)
            # Not a bool mask: PyTorch would make a tensor of numbers from it in every layer, and keep each of them.
            added = torch.zeros(is_seen.shape, dtype=query.dtype, device=query.device)
            self._added = added.masked_fill_(~is_seen, -torch.inf)
        return self._added

    def blocks(self, visible: "VisibleKeys", query: Tensor, key: Tensor) -> Any:
        """The block mask of ``flex_attention``: which blocks of keys are skipped. The same for each window."""
        from torch.nn.attention.flex_attention import create_block_mask

        def sees(sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible.sees(query + visible.begin, key) & (key >= self.firsts_BT[sequence, query])

        if visible.window not in self._blocks:
            sizes = query.shape[0], None, query.shape[2], key.shape[2]
            self._blocks[visible.window] = create_block_mask(sees, *sizes, device=str(query.device))
        return self._blocks[visible.window]


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys queries see: those of their own token and of earlier ones; or the last few of these, or of a document.

    Attributes:
        begin: position of the first query; keys begin at position 0 and end with the last query's.
        window: most keys that a query sees, its own included; ``None`` for no limit.
        documents: of the tokens: a query sees keys of its own only; ``None`` for one document.
    """

    begin: int = 0
    window: int | None = None
    documents: Documents | None = None

    def within(self, num_keys: int) -> "VisibleKeys":
        """The same keys, without a window that is at least as wide as all keys."""
        return replace(self, window=None) if self.window is not None and self.window >= num_keys else self

    def of_queries(self, queries: range) -> range:
        """The keys that some of these queries see; queries count from the first one."""
        first = 0 if self.window is None else max(0, self.begin + queries.start - self.window + 1)
        return range(first, self.begin + queries.stop)

    def mask(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """Whether a query sees a key, bool [queries, keys], or [B, 1, queries, keys] with documents."""
        position = torch.arange(queries.start, queries.stop, device=device).unsqueeze(1) + self.begin
        key = torch.arange(keys.start, keys.stop, device=device)
        is_seen = self.sees(position, key)
        if self.documents is None:
            return is_seen
        firsts_BT = self.documents.firsts_BT[:, queries.start : queries.stop]
        return (is_seen & (key >= firsts_BT.unsqueeze(-1))).unsqueeze(1)

    def sees(self, position: Tensor, key: Tensor) -> Tensor:
        """Whether queries at these positions see these keys."""
        is_before = key <= position
        return is_before if self.window is None else is_before & (position - key < self.window)
