"""Sends and receives between stages on different ranks."""

from collections.abc import Sequence

from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.transport import UnderWay
from pipeloom.execute.parts.part import MessagePart, RankRow
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import RECEIVE_KINDS, SEND_KINDS


class Messages(MessagePart):
    """What crosses the boundaries between stages.

    Args:
        outputs: the agreed spec of every stage's output, for all stages.
        slices: how micro-batches are cut, where the schedule cuts them.
    """

    kinds = SEND_KINDS | RECEIVE_KINDS

    def __init__(self, outputs: Sequence[TensorSpec], slices: TokenSlices | None = None) -> None:
        self._outputs, self._slices = outputs, slices

    def start(self, row: RankRow, slot: int) -> UnderWay:
        """Send what a compute action of the row made, or receive what one will take."""
        action = row.actions[slot]
        if action.kind in SEND_KINDS:
            tensor = row.input(slot)
            assert tensor is not None
            return row.send(slot, tensor)
        spec = self._outputs[action.stage - 1 if action.kind is Kind.RECV_F else action.stage]
        return row.receive(slot, spec if self._slices is None else self._slices.spec(spec, action.slice))

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Keep what was received for the action that takes it."""
        if tensor is not None:  # a send brings nothing
            row.values[row.actions[slot]] = tensor
