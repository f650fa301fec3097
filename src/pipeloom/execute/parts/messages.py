"""Sends and receives between stages on different ranks."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.parts.part import MessagePart, RankRow
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import RECEIVE_KINDS, SEND_KINDS


class Messages(MessagePart):
    """Sends and receives of activations and gradients.

    Args:
        outputs: for every stage the agreed spec of its output.
        slices: token slices of a micro-batch; ``None`` for whole sequences.
    """

    kinds = SEND_KINDS | RECEIVE_KINDS

    def __init__(self, outputs: Sequence[TensorSpec], slices: TokenSlices | None = None) -> None:
        self._outputs, self._slices = outputs, slices

    def starter(self, row: RankRow, slot: int) -> Callable[[], UnderWay]:
        """Send the result of a compute action, or receive the input of one."""
        action = row.actions[slot]
        if action.kind in SEND_KINDS:
            source = row.sources[slot]
            assert source is not None
            return lambda: row.send(slot, row.values.pop(source))
        spec = self._outputs[action.stage - 1 if action.kind is Kind.RECV_F else action.stage]
        return partial(row.receive, slot, spec if self._slices is None else self._slices.spec(spec, action.slice))

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Store a received tensor for the action that uses it."""
        if tensor is not None:  # a send has no result
            row.values[slot] = tensor
