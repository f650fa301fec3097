"""Keys and values of the earlier token slices of a sequence, and the gradients that they collect in the backward.

A token attends to the tokens before it, so a stage can run a sequence slice by slice if attention caches its keys and
values (TeraPipe, arXiv 2102.07988, section 3.2). Forwards run in order, backwards in reverse. The backward of a later
slice accumulates gradients of the keys and values of earlier ones, which the earlier slices' backwards add to their
own. The total is the gradient of the whole sequence.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of one micro-batch in the layers of one stage.

    Args:
        num_tokens: of a whole sequence.

    Attributes:
        begin: position of the next slice's first token. Set it back before an earlier slice is recomputed.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.begin = 0
        self._kept: dict[str, tuple[_Kept, _Kept]] = defaultdict(lambda: (_Kept(num_tokens), _Kept(num_tokens)))

    def take(self, num_tokens: int) -> int:
        """Advance ``begin`` by a slice of so many tokens; returns the position of its first token."""
        assert self.begin + num_tokens <= self.num_tokens, "more tokens than the sequences have"
        begin, self.begin = self.begin, self.begin + num_tokens
        return begin

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all keys and values."""
        return sum(one.nbytes for pair in self._kept.values() for one in pair)

    def earlier(self, layer: str, begin: int) -> "EarlierTokens":
        """The keys and values before position ``begin``, for the attention of a layer."""
        return EarlierTokens(*self._kept[layer], begin)


class EarlierTokens(NamedTuple):
    """Cached keys and values of one layer, of the tokens before a slice.

    Attributes:
        keys, values: caches.
        begin: position of the slice's first token.
    """

    keys: "_Kept"
    values: "_Kept"
    begin: int

    def extend(self, key_BKTD: Tensor, value_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add the slice's keys and values; returns those of all tokens up to its end, [B, K, S, D].

        Idempotent, for recomputation.
        """
        key_BKSD = _Extend.apply(key_BKTD, self.keys, self.begin)
        value_BKSD = _Extend.apply(value_BKTD, self.values, self.begin)
        return key_BKSD, value_BKSD


class _Kept:
    """Keys, or values, of a layer in one tensor for the whole sequence.

    Every slice's attention saves a view of the same memory. Values are never overwritten by others, so writes are
    hidden from autograd, which would report saved tensors as modified.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._whole_BTKD: Tensor | None = None
        self._gradient_BKSD: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Allocated bytes, for the whole sequence; 0 before the first slice."""
        return 0 if self._whole_BTKD is None else self._whole_BTKD.nbytes

    def write(self, own_BKTD: Tensor, begin: int) -> Tensor:
        """Store the slice's own; returns a view of all up to its end."""
        if self._whole_BTKD is None:
            sequences, heads, _, size = own_BKTD.shape
            # Tokens before heads, the order of attention's output; slices are then contiguous along tokens.
            self._whole_BTKD = own_BKTD.new_empty(sequences, self._num_tokens, heads, size)
        end = begin + own_BKTD.shape[2]
        # `data` does not bump the version counter, so that writes do not invalidate tensors saved by earlier slices.
        whole_BTKD = self._whole_BTKD.data
        whole_BTKD[:, begin:end].copy_(own_BKTD.transpose(1, 2))
        return whole_BTKD[:, :end].transpose(1, 2)

    def add_gradient(self, gradient_BKSD: Tensor, begin: int) -> Tensor:
        """Add a slice's gradient to that of later slices; returns the sum for the slice's own part, [B, K, T, D]."""
        total_BKSD = gradient_BKSD if self._gradient_BKSD is None else self._gradient_BKSD + gradient_BKSD
        # The first slice has none before it, so the gradient is freed.
        self._gradient_BKSD = total_BKSD[:, :, :begin] if begin else None
        # A copy: a view would keep the earlier tokens' part alive until the second half of a split backward.
        return total_BKSD[:, :, begin:].clone() if begin else total_BKSD


class _Extend(torch.autograd.Function):
    """From a slice's keys or values to those of all tokens up to its end."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, own_BKTD, ctx.kept, ctx.begin = args
        return ctx.kept.write(own_BKTD, ctx.begin)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        return ctx.kept.add_gradient(args[0], ctx.begin), None, None
