"""Keys and values of the earlier token slices of a sequence, and the gradients that they collect in the backward.

A token attends to the tokens before it, so a stage may run a sequence slice by slice if attention keeps its keys and
values (TeraPipe, arXiv 2102.07988, section 3.2). Slices go forward in order and back in reverse. What a later slice's
backward finds for the keys and values of earlier ones is kept, and becomes part of the gradient that those give to
their own projections: the sum is that of the whole sequence.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor


class KeyValueCache:
    """Of one micro-batch, of sequences of so many tokens, in the layers of one stage.

    Attributes:
        begin: position of the next slice's first token: behind the slice before it, unless it is set to that of one
            which goes forward again.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.begin = 0
        self._kept: dict[str, tuple[_Kept, _Kept]] = defaultdict(lambda: (_Kept(num_tokens), _Kept(num_tokens)))

    def take(self, num_tokens: int) -> int:
        """Note that a slice of so many tokens goes forward; the position of its first one."""
        assert self.begin + num_tokens <= self.num_tokens, "more tokens than the sequences have"
        begin, self.begin = self.begin, self.begin + num_tokens
        return begin

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(one.nbytes for pair in self._kept.values() for one in pair)

    def earlier(self, layer: str, begin: int) -> "EarlierTokens":
        """What the attention of a layer takes for a slice that begins at a position."""
        return EarlierTokens(*self._kept[layer], begin)


class EarlierTokens(NamedTuple):
    """Keys and values of one layer of the tokens before a slice.

    Attributes:
        keys, values: what is kept.
        begin: position of the slice's first token.
    """

    keys: "_Kept"
    values: "_Kept"
    begin: int

    def extend(self, key_BKTD: Tensor, value_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the end of the slice, [B, K, S, D], from the slice's own.

        A second time with the same ones, as a recomputation has it, changes nothing.
        """
        key_BKSD = _Extend.apply(key_BKTD, self.keys, self.begin)
        value_BKSD = _Extend.apply(value_BKTD, self.values, self.begin)
        return key_BKSD, value_BKSD


class _Kept:
    """Keys, or values, of a layer in one tensor for the whole sequence, filled from its beginning.

    So every slice's attention saves a view of the same memory; what it has seen is never written again with other
    numbers. The writing is hidden from autograd, since it would take any write for a change of what it saved.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._whole_BTKD: Tensor | None = None
        self._gradient_BKSD: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes for the whole sequence; 0 before the first slice."""
        return 0 if self._whole_BTKD is None else self._whole_BTKD.nbytes

    def write(self, own_BKTD: Tensor, begin: int) -> Tensor:
        """Add the slice's own; all up to its end, a view."""
        if self._whole_BTKD is None:
            sequences, heads, _, size = own_BKTD.shape
            # Tokens before heads: slices are then contiguous along tokens, and the order is that of attention's output.
            self._whole_BTKD = own_BKTD.new_empty(sequences, self._num_tokens, heads, size)
        end = begin + own_BKTD.shape[2]
        # `data` has no version counter: otherwise the next slice's write would invalidate what earlier slices saved.
        whole_BTKD = self._whole_BTKD.data
        whole_BTKD[:, begin:end].copy_(own_BKTD.transpose(1, 2))
        return whole_BTKD[:, :end].transpose(1, 2)

    def add_gradient(self, gradient_BKSD: Tensor, begin: int) -> Tensor:
        """Add what a slice's attention found to what later slices did; the sum for the slice's own, [B, K, T, D]."""
        total_BKSD = gradient_BKSD if self._gradient_BKSD is None else self._gradient_BKSD + gradient_BKSD
        # The first slice has none before it: what was collected is complete and is freed.
        self._gradient_BKSD = total_BKSD[:, :, :begin] if begin else None
        # A copy: a view would keep the earlier tokens' part as long as the slice's own waits for a second half.
        return total_BKSD[:, :, begin:].clone() if begin else total_BKSD


class _Extend(torch.autograd.Function):
    """A slice's keys or values -> those of all tokens up to its end."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, own_BKTD, ctx.kept, ctx.begin = args
        return ctx.kept.write(own_BKTD, ctx.begin)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        return ctx.kept.add_gradient(args[0], ctx.begin), None, None


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys each of the last queries sees: those up to its own position, [queries, keys].

    On a GPU it is a value that selects fused kernels; otherwise a matrix of bools.
    """
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        # A bias object instead of a matrix: with an explicit mask,
        # scaled_dot_product_attention cannot use FlashAttention.
        return causal_lower_right(num_queries, num_keys)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)
