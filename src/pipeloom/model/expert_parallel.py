"""Expert parallelism: each rank of a group has some experts of a layer, and tokens travel to the ranks of theirs.

A rank sorts its rows, one for each pair of a token and an expert, by expert. Rank i of n has the i-th of n equal parts
of the experts, so the rows of each other rank are a slice. In the forward, ranks first exchange how many rows they send
of each expert, then the rows, and after the experts the outputs, back to where the tokens are. In the backward the
gradients travel the same ways in the other direction.

An exchange begins at one place of the computation and ends at a later one; what is between them is computed while rows
travel. Autograd runs nodes in the reverse order of the forward, so that in the backward gradients travel while the
backward of the same parts is computed (``Travel``).

Letters of shapes are those of ``model.experts``; S is the number of rows that arrive at this rank.
"""

# ruff: noqa: N806 (upper-case letters in names are shapes)

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

_Value = TypeVar("_Value")


class ExpertGroup:
    """The ranks that share a layer's experts. This base class is for groups that never communicate.

    Attributes:
        size: number of ranks.
        index: of this rank in the group.
    """

    def __init__(self, size: int = 1, index: int = 0) -> None:
        self.size, self.index = size, index

    def start(
        self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Send a slice of ``sent`` to each rank and receive one from each, in the order of the ranks; collective.

        Args:
            received: filled with what arrives, ``[sum of received_sizes, ...]``.
            sent: ``[sum of sent_sizes, ...]``.
            received_sizes: rows that arrive from each rank.
            sent_sizes: rows for each rank.

        Returns:
            Waits for the end. Several exchanges may be under way; ranks start them in one order.
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

    def forth(self) -> "Travel":
        """Of rows in the order of all experts to the ranks of these; what arrives is sorted by the rank it is of."""
        return Travel(self.group, self.received, self.sent)

    def back(self) -> "Travel":
        """The inverse of ``forth``."""
        return Travel(self.group, self.sent, self.received)


@dataclass(frozen=True)
class ExpertParallel:
    """Expert parallelism on one rank.

    Attributes:
        group: the ranks that share the experts of a layer.
        overlaps: whether a stage computes the halves of a micro-batch in turns, each while tokens of the other travel.
    """

    group: ExpertGroup = field(default_factory=ExpertGroup)
    overlaps: bool = False

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
            self.group.start(arriving_E, sent_E, parts, parts)()
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


class Travel:
    """One exchange of rows, whose gradients travel back.

    Args:
        group: the ranks.
        received: rows from each rank.
        sent: rows for each rank.
    """

    def __init__(self, group: ExpertGroup, received: Sequence[int], sent: Sequence[int]) -> None:
        self._group, self._received, self._sent = group, received, sent
        self._under_way: tuple[Tensor, Callable[[], None]] | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Begin; what is returned has no content, and stands for the rows in autograd's graph until ``end``."""
        return _Start.apply(rows, self)

    def end(self, token: Tensor) -> Tensor:
        """Wait; returns what has arrived, for what ``start`` returned."""
        return _End.apply(token, self)

    def begin(self, rows: Tensor, *, is_back: bool = False) -> None:
        """Start the exchange of rows, or of their gradients in the other direction."""
        received, sent = (self._sent, self._received) if is_back else (self._received, self._sent)
        found, rows = rows.new_empty(sum(received), rows.shape[1]), rows.contiguous()
        finish = (lambda: None) if rows.is_meta else self._group.start(found, rows, received, sent)
        self._under_way = found, finish

    def arrived(self) -> Tensor:
        """Wait for what was started."""
        assert self._under_way is not None, "an exchange that has not begun"
        (found, finish), self._under_way = self._under_way, None
        finish()
        return found


class _Start(torch.autograd.Function):
    """Begins an exchange; the backward ends that of the gradients."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, rows, ctx.travel = args
        ctx.travel.begin(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:  # noqa: ARG004  the gradient of nothing
        return ctx.travel.arrived(), None


class _End(torch.autograd.Function):
    """Ends an exchange; the backward begins that of the gradients."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, _, ctx.travel = args
        return ctx.travel.arrived()

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        ctx.travel.begin(args[0], is_back=True)
        return args[0].new_empty(0), None


Steps = Generator[None, None, _Value]
"""A computation that pauses after each start of an exchange."""


def finished(steps: Steps[_Value]) -> _Value:
    """The result, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def in_turns(first: Steps[_Value], second: Steps[_Value]) -> tuple[_Value, _Value]:
    """The results of two computations with equally many pauses; each continues where the other pauses."""
    while True:
        try:
            next(first)
        except StopIteration as end:
            return end.value, finished(second)
        next(second)
