"""Tensor parallelism inside a stage: what each rank holds of a parameter, and what the ranks exchange.

Matrices come in pairs: the first is column-parallel, so that each rank has some heads or inner elements, the second
row-parallel, so that each rank has a part of every sum. Between the pairs runs the residual stream. Every
rank has all of it, or, with *sequence parallelism*, some of its tokens (arXiv 1909.08053, section 3; arXiv 2205.05198,
section 4.2.2). What leaves a stage is in both cases the rank's own tokens only: a message between stages carries a
slice, and so do the inputs that a stage keeps.

Letters of shapes are those of ``model.transformer``; ``t`` is this rank's share of T.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSlice:
    """Where the part of a parameter that a tensor-parallel rank holds lies in the whole parameter.

    Attributes:
        whole: shape of the whole parameter.
        begin: index of the part's first element along each dim; zeros where the rank holds all of it.
    """

    whole: tuple[int, ...]
    begin: tuple[int, ...]

    def of(self, whole: Tensor, part: torch.Size) -> Tensor:
        """The view of a whole tensor that a part of this shape covers."""
        for dim, (begin, size) in enumerate(zip(self.begin, part, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return whole


class TensorGroup:
    """The ranks that share the matrices of a stage; each calls the same methods in the same order.

    A method returns when its result may be used; on CUDA, by what is issued to the current stream afterwards. This
    class stands for ranks that exchange nothing: a single one, or those of meta tensors.

    Attributes:
        size: number of ranks.
        index: this rank's place among them.
    """

    def __init__(self, size: int = 1, index: int = 0) -> None:
        self.size, self.index = size, index

    def gather(self, whole: Tensor, part: Tensor) -> None:
        """Put every rank's part into ``whole``, in the order of the ranks. ``[size * n]`` from ``[n]``."""
        raise NotImplementedError

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> None:
        """Add up ``whole`` over the ranks and put this rank's part into ``part``. ``[n]`` from ``[size * n]``."""
        raise NotImplementedError

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the ranks."""
        raise NotImplementedError

    def max(self, tensor: Tensor) -> None:
        """Replace each element by the largest one over the ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class TensorParallel:
    """A rank's part in tensor parallelism. With one rank, every method returns what it is given.

    Attributes:
        group: the ranks that share the matrices.
        splits_sequence: whether each rank has only its own tokens of the residual stream (sequence parallelism).
    """

    group: TensorGroup = field(default_factory=TensorGroup)
    splits_sequence: bool = False

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def share(self, whole: int) -> range:
        """Which of ``whole`` rows or columns are this rank's; ranks differ by one at most."""
        # Integer bounds cover `whole` without gaps for any size; a vocabulary need not be a multiple of tp.
        return range(whole * self.group.index // self.size, whole * (self.group.index + 1) // self.size)

    def enter(self, x: Tensor) -> Tensor:
        """From the residual stream to all of its tokens, [B, T, H], for a column-parallel matrix."""
        if self.size == 1:
            return x
        # Megatron's g and f: an all-gather whose backward is a reduce-scatter (arXiv 2205.05198, section 4.2.2), or an
        # identity whose backward is an all-reduce (arXiv 1909.08053, section 3).
        return self._exchange(x, _gathered, _scattered) if self.splits_sequence else self._exchange(x, _same, _summed)

    def leave(self, x: Tensor) -> Tensor:
        """From this rank's part of each sum, [B, T, H] behind a row-parallel matrix, to the residual stream."""
        if self.size == 1:
            return x
        # The conjugates of the two in `enter`.
        return self._exchange(x, _scattered, _gathered) if self.splits_sequence else self._exchange(x, _summed, _same)

    def from_boundary(self, x_BtH: Tensor) -> Tensor:
        """From this rank's tokens, as they come from another stage, to the residual stream."""
        if self.size == 1 or self.splits_sequence:
            return x_BtH
        # Messages carry 1 / tp of the tokens; joining them here is Megatron's scatter-gather (arXiv 2104.04473, 4.1).
        # Every rank's gradient is already the whole one without sequence parallelism, so the backward takes a part of
        # it.
        return self._exchange(x_BtH, _gathered, _own)

    def to_boundary(self, x: Tensor) -> Tensor:
        """From the residual stream to this rank's tokens, [B, t, H]."""
        if self.size == 1 or self.splits_sequence:
            return x
        return self._exchange(x, _own, _gathered)

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of something that every rank has for each token, [T, ...], what the residual stream here has tokens for."""
        return x.chunk(self.size)[self.group.index] if self.splits_sequence else x

    @torch.compiler.disable  # an exchange is no code to generate; compiled code begins again behind it
    def _exchange(self, x: Tensor, forth: "_Op", back: "_Op") -> Tensor:
        return _Exchange.apply(x, self.group, forth, back)


WHOLE = TensorParallel()
"""One rank has everything."""

_Op = Callable[[Tensor, TensorGroup], Tensor]


def _gathered(x_BtH: Tensor, group: TensorGroup) -> Tensor:
    """Every rank's tokens, [B, T, H]."""
    # A collective joins along the first dim; tokens are the second one, so
    # the ranks' parts are put in order afterwards.
    pieces = x_BtH.new_empty(group.size, *x_BtH.shape)
    # On "meta" shapes are enough, and there is no process group.
    if not x_BtH.is_meta:
        group.gather(pieces.view(-1), x_BtH.contiguous().view(-1))
    return pieces.transpose(0, 1).flatten(1, 2)


def _scattered(x_BTH: Tensor, group: TensorGroup) -> Tensor:
    """The sum over the ranks, of this rank's tokens, [B, t, H]."""
    pieces = x_BTH.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    own_BtH = torch.empty_like(pieces[0])
    if not x_BTH.is_meta:
        group.reduce_scatter(own_BtH.view(-1), pieces.view(-1))
    return own_BtH


def _summed(x: Tensor, group: TensorGroup) -> Tensor:
    # The group sums in place, and autograd may have saved x; gloo and NCCL need contiguous memory.
    total = x.clone(memory_format=torch.contiguous_format)
    if not x.is_meta:
        group.sum(total)
    return total


def _own(x_BTH: Tensor, group: TensorGroup) -> Tensor:
    """This rank's tokens, in memory of their own."""
    # A copy: a view would keep the other ranks' tokens alive until the backward.
    return x_BTH.chunk(group.size, 1)[group.index].clone(memory_format=torch.contiguous_format)


def _same(x: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG001
    return x.view_as(x)


class _Exchange(torch.autograd.Function):
    """Forward one exchange, backward another."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, ctx.group, forth, ctx.back = args
        return forth(x, ctx.group)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        return ctx.back(args[0], ctx.group), None, None, None
