"""Which keys a query sees: all tokens up to itself, or those of its own document.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

import torch
from torch import Tensor


class Sight:
    """What the tokens of a micro-batch, or of one of its slices, see where attention ends at documents.

    A stage keeps it from the forward to the backward, and all layers and stages of a rank share its mask.

    Args:
        firsts_BT: for each token the place in the sequence of the first token of its document, int64.
    """

    def __init__(self, firsts_BT: Tensor) -> None:
        self._firsts_BT = firsts_BT
        self._mask: Tensor | None = None

    def positions(self, begin: int) -> Tensor:
        """The position of each token in its document, int64 [B, T]; the first one is ``begin`` in the sequence."""
        return self._places(begin) - self._firsts_BT

    def mask(self, begin: int, dtype: torch.dtype) -> Tensor:
        """Added to the scores: 0 where the query sees the key, else minus infinity, [B, 1, T, S].

        The memory-efficient kernel of GPUs and the fused one of CPUs take it: neither stores scores, but both compute
        all of them. FlashAttention takes no mask.

        Args:
            begin: place in the sequence of the first query.
            dtype: of queries and keys.
        """
        if self._mask is None:
            queries_T = self._places(begin)
            keys_S = torch.arange(begin + len(queries_T), device=queries_T.device)
            is_seen_BTS = (keys_S >= self._firsts_BT[..., None]) & (keys_S <= queries_T[:, None])
            # Not a bool mask: PyTorch would make a tensor of numbers from it in every layer, and keep each of them.
            mask_BTS = torch.zeros(is_seen_BTS.shape, dtype=dtype, device=queries_T.device)
            self._mask = mask_BTS.masked_fill_(~is_seen_BTS, -torch.inf).unsqueeze(1)
        return self._mask

    def _places(self, begin: int) -> Tensor:
        return torch.arange(begin, begin + self._firsts_BT.shape[1], device=self._firsts_BT.device)
