"""Expert parallelism: each rank of a group has some experts of a layer, and tokens travel to the ranks of theirs.

A rank sorts its rows, one for each pair of a token and an expert, by expert. Rank i of n has the i-th of n equal parts
of the experts, so the rows of each other rank are a slice. In the forward, ranks first exchange how many rows they send
of each expert, then the rows, and after the experts the outputs, back to where the tokens are. In the backward the
gradients travel the same ways in the other direction.

Letters of shapes are those of ``model.experts``; S is the number of rows that arrive at this rank.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class ExpertGroup:
    """The ranks that share a layer's experts. This base class is for groups that never communicate.

    Attributes:
        size: number of ranks.
        index: of this rank in the group.
    """

    def __init__(self, size: int = 1, index: int = 0) -> None:
        self.size, self.index = size, index

    def exchange(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> None:
        """Send a slice of ``sent`` to each rank and receive one from each, in the order of the ranks; collective.

        Args:
            received: filled with what arrives, ``[sum of received_sizes, ...]``.
            sent: ``[sum of sent_sizes, ...]``.
            received_sizes: rows that arrive from each rank.
            sent_sizes: rows for each rank.
        """
        raise NotImplementedError

    def position(self) -> str:
        """The exchange in progress as text; empty without one."""
        return ""


@dataclass(frozen=True)
class Route:
    """Where the rows of a forward go, and what arrives.

    Attributes:
        group: the ranks.
        sent: rows for each rank.
        received: rows from each rank.
        sizes: of this rank's experts, the rows that arrive.
        order: the rows that arrive, which are sorted by rank, in the order of the experts.
    """

    group: ExpertGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]
    sizes: tuple[int, ...]
    order: Tensor

    def forth(self, rows_RH: Tensor) -> Tensor:
        """Rows in the order of all experts, to the ranks of these; ``[S, H]``, sorted by the rank that they are of."""
        return _Travel.apply(rows_RH, self.group, self.received, self.sent)

    def back(self, rows_SH: Tensor) -> Tensor:
        """The inverse of ``forth``."""
        return _Travel.apply(rows_SH, self.group, self.sent, self.received)


@dataclass(frozen=True)
class ExpertParallel:
    """Expert parallelism on one rank.

    Attributes:
        group: the ranks that share the experts of a layer.
    """

    group: ExpertGroup = field(default_factory=ExpertGroup)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def own(self, count: int) -> range:
        """This rank's experts of ``count``, which the number of ranks divides."""
        each = count // self.size
        return range(self.group.index * each, (self.group.index + 1) * each)

    def route(self, sizes: Sequence[int], like: Tensor) -> Route:
        """Find out what arrives; collective.

        Args:
            sizes: of every expert the rows of this rank.
            like: a tensor on the device of the rows. On meta as many rows arrive as leave.
        """
        each, sent_E = len(sizes) // self.size, torch.tensor(list(sizes))
        arriving_E = torch.empty_like(sent_E)
        if like.is_meta:
            arriving_E.copy_(sent_E)
        else:
            parts = [each] * self.size
            sent_E, arriving_E = sent_E.to(like.device), arriving_E.to(like.device)
            self.group.exchange(arriving_E, sent_E, parts, parts)
        leaving, arriving = sent_E.view(self.size, each), arriving_E.view(self.size, each)
        expert_S = torch.arange(each, device=arriving.device).repeat(self.size).repeat_interleave(arriving_E)
        return Route(
            self.group,
            tuple(leaving.sum(1).tolist()),
            tuple(arriving.sum(1).tolist()),
            tuple(arriving.sum(0).tolist()),
            expert_S.argsort(stable=True).to(like.device),
        )


ALL_EXPERTS = ExpertParallel()
"""Every rank has all experts."""


class _Travel(torch.autograd.Function):
    """Rows to other ranks; their gradients come back."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, rows, *ctx.way = args
        return _exchanged(rows, *ctx.way)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        group, received, sent = ctx.way
        return _exchanged(args[0], group, sent, received), None, None, None


def _exchanged(rows: Tensor, group: ExpertGroup, received: Sequence[int], sent: Sequence[int]) -> Tensor:
    found = rows.new_empty(sum(received), rows.shape[1])
    if not rows.is_meta:
        group.exchange(found, rows.contiguous(), received, sent)
    return found
