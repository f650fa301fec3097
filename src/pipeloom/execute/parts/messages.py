"""Sends and receives between stages on different ranks."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.coding import decode_blocks, encode_blocks, wire_spec
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.parts.part import MessagePart, RankRow
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.kinds import RECEIVE_KINDS, SEND_KINDS
from pipeloom.workload.boundary import Boundary


class Messages(MessagePart):
    """Sends and receives of activations and gradients.

    Tensors are coded behind the action that makes them, and decoded before the one that uses them, within their spans:
    coding is work of the compute lane, and what waits for its user is small.

    Args:
        outputs: for every stage the agreed spec of its output.
        slices: token slices of a micro-batch; ``None`` for whole sequences.
        boundary: the code of what travels; ``None``: as it is.
    """

    kinds = SEND_KINDS | RECEIVE_KINDS

    def __init__(
        self, outputs: Sequence[TensorSpec], slices: TokenSlices | None = None, boundary: Boundary | None = None
    ) -> None:
        self._outputs, self._slices, self._boundary = outputs, slices, boundary

    def bind(self, row: RankRow) -> None:
        """Code what is sent behind its action, and decode what is received before the action that uses it."""
        for slot, source in enumerate(row.sources):
            if source is None:
                continue
            if row.actions[slot].kind in SEND_KINDS and self._boundary is not None:
                row.after[source].append(partial(_encode, row, source))
            elif row.actions[source].kind in RECEIVE_KINDS:
                spec = self._received(row.actions[source])
                if self._is_coded(spec):
                    row.before[slot].append(partial(_decode, row, source, spec))

    def starter(self, row: RankRow, slot: int) -> Callable[[], UnderWay]:
        """Send the result of a compute action, or receive the input of one."""
        action = row.actions[slot]
        if action.kind in SEND_KINDS:
            source = row.sources[slot]
            assert source is not None
            return lambda: row.send(slot, row.values.pop(source))
        return partial(row.receive, slot, wire_spec(self._received(action), self._boundary))

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Store a received tensor for the action that uses it."""
        if tensor is not None:  # a send has no result
            row.values[slot] = tensor

    def _received(self, action: Action) -> TensorSpec:
        spec = self._outputs[action.stage - 1 if action.kind is Kind.RECV_F else action.stage]
        return spec if self._slices is None else self._slices.spec(spec, action.slice)

    def _is_coded(self, spec: TensorSpec) -> bool:
        return wire_spec(spec, self._boundary) is not spec


def _encode(row: RankRow, source: int) -> None:
    if row.values[source].is_floating_point():
        row.values[source] = encode_blocks(row.values[source])


def _decode(row: RankRow, source: int, spec: TensorSpec) -> None:
    row.values[source] = decode_blocks(row.values[source], spec)
