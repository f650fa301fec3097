"""Documents of a window's tokens: a token sees those of its own document, in which positions count from 0.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N803 (upper-case letters in names are shapes)

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeloom.model.graph_breaks import graph_break

if TYPE_CHECKING:
    from pipeloom.model.core_attention import VisibleKeys


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
