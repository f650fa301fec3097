"""Tensor parallelism inside a stage: slices of parameters, and collectives of the ranks.

Matrices come in pairs: the first is column-parallel, so each rank has some heads or inner elements, the second
row-parallel, so each rank has a partial sum of every output. Between the pairs is the residual stream. Every rank has
all of its tokens or, with *sequence parallelism*, some of them (arXiv 1909.08053, section 3; arXiv 2205.05198, section
4.2.2). In both cases a rank sends only its own share of the tokens to the next stage, and keeps only that as the stage
input.

Letters of shapes are those of ``model.transformer``; ``t`` is this rank's share of T.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeloom.model.graph_breaks import graph_break


@dataclass(frozen=True)
class TensorSlice:
    """The slice of a parameter that a tensor-parallel rank holds.

    Attributes:
        whole: shape of the whole parameter.
        begin: index of the slice's first element along each dim; zeros for a replicated parameter.
    """

    whole: tuple[int, ...]
    begin: tuple[int, ...]

    def of(self, whole: Tensor, part: torch.Size) -> Tensor:
        """View of the whole tensor at this slice, which has the shape ``part``."""
        for dim, (begin, size) in enumerate(zip(self.begin, part, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return whole


class TensorGroup:
    """The tensor-parallel ranks of a stage. All methods are collective.

    A result may be used when the method returns; on CUDA, by work issued to the current stream afterwards. This base
    class is for groups that never communicate: a single rank, or meta tensors.

    Attributes:
        size: number of ranks.
        index: of this rank in the group.
    """

    def __init__(self, size: int = 1, index: int = 0) -> None:
        self.size, self.index = size, index

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """All-gather every rank's ``part`` into ``whole``, in the order of the ranks. ``[size * n]`` from ``[n]``."""
        raise NotImplementedError

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Sum ``whole`` over the ranks and store this rank's part in ``part``. ``[n]`` from ``[size * n]``."""
        raise NotImplementedError

    def sum(self, tensor: Tensor) -> None:
        """All-reduce in place: sum over the ranks."""
        raise NotImplementedError

    def max(self, tensor: Tensor) -> None:
        """All-reduce in place: maximum over the ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class TensorParallel:
    """Tensor parallelism on one rank. In a group of one, every method returns its argument.

    Attributes:
        group: the tensor-parallel ranks.
        splits_sequence: sequence parallelism: each rank has only its share of the tokens of the residual stream.
    """

    group: TensorGroup = field(default_factory=TensorGroup)
    splits_sequence: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def share(self, whole: int) -> range:
        """This rank's rows or columns of ``whole``; numbers differ by at most one between ranks."""
        # A vocabulary need not be a multiple of tp.
        return range(whole * self.group.index // self.size, whole * (self.group.index + 1) // self.size)

    def enter(self, x: Tensor) -> Tensor:
        """From the residual stream to the input of a column-parallel matrix, all tokens, [B, T, H]."""
        if self.size == 1:
            return x
        # Megatron's g and f: an all-gather whose backward is a reduce-scatter (arXiv 2205.05198, section 4.2.2), or an
        # identity whose backward is an all-reduce (arXiv 1909.08053, section 3).
        return self._exchange(x, _gathered, _scattered) if self.splits_sequence else self._exchange(x, _same, _summed)

    def leave(self, x: Tensor) -> Tensor:
        """From the partial sums of a row-parallel matrix, [B, T, H], to the residual stream."""
        if self.size == 1:
            return x
        # The conjugates of the two in `enter`.
        return self._exchange(x, _scattered, _gathered) if self.splits_sequence else self._exchange(x, _summed, _same)

    def shared(self, weight: Tensor) -> Tensor:
        """A replicated weight for the heads of this rank: its gradient is summed over the ranks, which have others."""
        # With sequence parallelism the gradients of all replicated parameters are summed after the backward.
        return weight if self.size == 1 or self.splits_sequence else self._exchange(weight, _same, _summed)

    def total(self, part: Tensor) -> Tensor:
        """The sum of the ranks' parts, which each rank uses for other heads: the backward sums over them, too."""
        return part if self.size == 1 else self._exchange(part, _summed, _summed)

    def from_boundary(self, x_BtH: Tensor) -> Tensor:
        """From this rank's share of the stage input, [B, t, H], to the residual stream."""
        if self.size == 1 or self.splits_sequence:
            return x_BtH
        # Megatron's scatter-gather (arXiv 2104.04473, section 4.1): messages carry 1 / tp of the tokens. Without
        # sequence parallelism every rank already has the whole gradient, so the backward takes its share.
        return self._exchange(x_BtH, _gathered, _own)

    def to_boundary(self, x: Tensor) -> Tensor:
        """From the residual stream to this rank's share of the stage output, [B, t, H]."""
        if self.size == 1 or self.splits_sequence:
            return x
        return self._exchange(x, _own, _gathered)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of values per token that every rank has, [..., T], those of the tokens of this rank's residual stream."""
        return x.chunk(self.size, -1)[self.group.index] if self.splits_sequence else x

    def every_token(self, x: Tensor) -> Tensor:
        """Of values per token of this rank's residual stream, [B, t, ...], those of all tokens; without gradient."""
        return _gathered(x, self.group) if self.splits_sequence and self.size > 1 else x

    @property
    def shares_only(self) -> "TensorParallel":
        """The same shares of parameters, for layers between one ``enter`` and one ``leave`` that are not theirs."""
        return self if self.size == 1 else _SharesOnly(self.group)

    @graph_break  # graph break: collectives are not compiled
    def _exchange(self, x: Tensor, forth: "_Op", back: "_Op") -> Tensor:
        return _Exchange.apply(x, self.group, forth, back)


class _SharesOnly(TensorParallel):
    """Ranks that exchange nothing around a pair of matrices."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, x: Tensor) -> Tensor:
        return x


WHOLE = TensorParallel()
"""No tensor parallelism."""

_Op = Callable[[Tensor, TensorGroup], Tensor]


def _gathered(x_BtH: Tensor, group: TensorGroup) -> Tensor:
    """All-gather of tokens, [B, T, H]."""
    # The collective concatenates along the first dim; tokens are the second one, hence the transposition.
    pieces = x_BtH.new_empty(group.size, *x_BtH.shape)
    # Meta tensors have no process group.
    if not x_BtH.is_meta:
        group.gather(pieces.view(-1), x_BtH.contiguous().view(-1))
    # With one token on each rank the result would be a view, which each product would copy and keep.
    return pieces.transpose(0, 1).flatten(1, 2).contiguous()


def _scattered(x_BTH: Tensor, group: TensorGroup) -> Tensor:
    """Reduce-scatter over tokens, [B, t, H]."""
    pieces = x_BTH.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    own_BtH = torch.empty_like(pieces[0])
    if not x_BTH.is_meta:
        group.reduce_scatter(own_BtH.view(-1), pieces.view(-1))
    return own_BtH


def _summed(x: Tensor, group: TensorGroup) -> Tensor:
    # A copy: the group sums in place, and autograd may have saved x. gloo and NCCL need contiguous memory.
    total = x.clone(memory_format=torch.contiguous_format)
    if not x.is_meta:
        group.sum(total)
    return total


def _own(x_BTH: Tensor, group: TensorGroup) -> Tensor:
    """This rank's share of the tokens, as a copy."""
    # A copy: a view would keep the other ranks' tokens alive until the backward.
    return x_BTH.chunk(group.size, 1)[group.index].clone(memory_format=torch.contiguous_format)


def _same(x: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG001
    return x.view_as(x)


class _Exchange(torch.autograd.Function):
    """Applies one collective in the forward, another in the backward."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, ctx.group, forth, ctx.back = args
        return forth(x, ctx.group)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        return ctx.back(args[0], ctx.group), None, None, None
