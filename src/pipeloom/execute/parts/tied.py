"""The matrix that embedding and head share, where they are in different stages: lent for a step, its gradient returned.

It belongs to the first stage like its other parameters. The head computes on a borrowed tensor outside the last stage's
parameters, whose gradient is collected here and becomes part of the first stage's. Between two ranks both travel as
messages of the schedule; on one rank they are handed over here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.transport import Transfer
from pipeloom.execute.parts.part import Held, MessagePart, RankRow, Service
from pipeloom.execute.stages.stage_store import LentMatrix
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, TIED_KINDS, TIED_SEND_KINDS


class Handover(NamedTuple):
    """What becomes of the shared matrix in the steps of a schedule, on the first stage's rank.

    Attributes:
        trains: whether the head's gradient is returned.
        lend_slot: before which action the weights are handed over, where no message carries them.
        return_slot: before which action the gradient is, in the same case; ``None`` for the end of the step.
        updates_before: whether the first stage is updated in the step before the weights are handed over.
    """

    trains: bool = False
    lend_slot: int | None = None
    return_slot: int | None = None
    updates_before: bool = False


def handover(schedule: Schedule, rank: int) -> Handover:
    """What a rank has to do about the shared matrix beside sending and receiving it.

    Raises:
        UserError: the schedule lacks the messages; or, where none is needed, reduces the first stage's gradient for the
            last time, or completes it for an update, before the head's is complete.
    """
    owner, last_stage = schedule.placement.rank_by_stage, schedule.num_stages - 1
    trains = schedule.first_backward_stage == 0
    if owner[0] != owner[-1]:
        if not schedule.rows[owner[0]].is_kind(*TIED_KINDS).any():
            raise UserError("embedding and head share a matrix that the schedule does not send; call add_tied first")
        return Handover(trains)
    if rank != owner[0]:
        return Handover(trains)
    forwards = _slots(schedule, 0, Kind.FORWARD)
    reductions = _slots(schedule, 0, Kind.REDUCE_GRAD) if trains else []
    if reductions and reductions[-1] < _slots(schedule, last_stage, *ADDS_TO_GRADIENT)[-1]:
        raise UserError(
            f"the last 0REDUCE_GRAD stands before a backward of stage {last_stage}, whose head shares a matrix with it"
        )
    adds = [_slots(schedule, stage, *ADDS_TO_GRADIENT) for stage in (0, last_stage)] if trains else []
    if trains and _slots(schedule, 0, Kind.UPDATE) and adds[0][-1] < adds[1][-1]:
        raise UserError(
            f"0UPDATE follows a gradient that stage {last_stage}, whose head shares a matrix with it, has yet to add to"
        )
    updates_before = any(slot < forwards[0] for slot in _slots(schedule, 0, Kind.UPDATE))
    return Handover(trains, forwards[0], reductions[-1] if reductions else None, updates_before)


def _slots(schedule: Schedule, stage: int, *kinds: Kind) -> list[int]:
    """The slots of a stage's actions of some kinds in its row."""
    row = schedule.rows[schedule.placement.rank_by_stage[stage]]
    return (row.is_kind(*kinds) & (row.stage == stage)).nonzero()[0].tolist()


class Borrower(Protocol):
    """The last stage's module."""

    def borrow(self, weight_VH: Tensor | None) -> None:  # noqa: N803 (upper-case letters in names are shapes)
        """Project with these weights, or with none any more."""
        ...


class Tied(MessagePart):
    """What one rank has to do with the shared matrix, which may be nothing.

    Args:
        name: of the parameter of the first stage.
        spec: of its weights.
        gradient_dtype: in which the head's gradient is added up over micro-batches, and sent.
        lender: the first stage, on its rank.
        borrower: the last stage, on its rank.
        lent: where the matrix and the head's gradient are if stages are swapped; both stages are then on one rank.

    Attributes:
        specs: by kind what its message carries.
    """

    kinds = TIED_KINDS

    def __init__(
        self,
        name: str,
        spec: TensorSpec,
        *,
        gradient_dtype: torch.dtype,
        lender: StageWeights | None,
        borrower: Borrower | None,
        lent: LentMatrix | None = None,
    ) -> None:
        self._lent = lent
        self._name = name
        self._gradient_dtype = gradient_dtype
        self._lender = lender
        self._borrower = borrower
        gradient = TensorSpec(spec.shape, gradient_dtype)
        self.specs = {
            Kind.SEND_TIED: spec,
            Kind.RECV_TIED: spec,
            Kind.SEND_TIED_GRAD: gradient,
            Kind.RECV_TIED_GRAD: gradient,
        }
        self._handovers: dict[RankRow, Handover] = {}
        self._forget(Handover())

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Outside a step, lend the head zeros meanwhile, so that it can be timed."""
        if self._borrower is not None:
            self._forget(Handover(trains=True))
            self._use(Kind.RECV_TIED, torch.zeros_like(self.specs[Kind.RECV_TIED].empty(device)))
        try:
            yield
        finally:
            self.forget()

    def bind(self, row: RankRow) -> None:
        """Find where the matrix and its gradient are handed over, where no message carries them.

        Raises:
            UserError: see ``handover``.
        """
        found = self._handovers[row] = handover(row.schedule, row.rank)
        if found.lend_slot is not None:
            # Not before: from then on the first stage is here, and updated where that was left to this step.
            row.before[found.lend_slot].append(self._lend)
            adds = [slot for slot in row.slots_of(*ADDS_TO_GRADIENT) if row.actions[slot].stage == 0]
            if adds and any(row.actions[slot].stage == 0 for slot in row.slots_of(Kind.UPDATE)):
                row.after[adds[-1]].append(self.return_gradient)
        if found.return_slot is not None:
            row.before[found.return_slot].append(self.return_gradient)

    def begin(self, row: RankRow) -> Sequence[Service]:
        """Before a step, lend nothing yet."""
        self._forget(self._handovers[row])
        if self._lent is not None:
            self._fill()
            self._room = self._lent.gradient
        return ()

    def start(self, row: RankRow, slot: int) -> Transfer:
        """Send the weights or the head's gradient, or receive them."""
        kind = row.actions[slot].kind
        return row.send(slot, self._given(kind)) if kind in TIED_SEND_KINDS else row.receive(slot, self.specs[kind])

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Use what a receive brought."""
        if tensor is not None:
            self._use(row.actions[slot].kind, tensor)

    def _fill(self) -> None:
        """Give the lent matrix, at rest, the values that the first stage has now."""
        if self._lent is not None:
            assert self._lender is not None
            self._lent.fill(self._lender.lend(self._name))

    def _forget(self, handover: Handover) -> None:
        self._handover = handover
        self._gradient: Tensor | None = None
        self._room: Tensor | None = None  # for the gradient; none where it takes memory of its own
        self._is_returned = False
        self._lent_bytes = self._gradient_bytes = 0

    def _lend(self) -> None:
        """Hand the weights to the head, on a rank that has both stages."""
        if self._handover.updates_before:
            self._fill()
        self._use(Kind.RECV_TIED, self._given(Kind.SEND_TIED))

    def held(self) -> Held:
        """The borrowed matrix, where it is a copy, and its gradient; nothing where stages are swapped."""
        return (
            Held()
            if self._lent is not None
            else Held(lent_bytes=self._lent_bytes, lent_gradient_bytes=self._gradient_bytes)
        )

    def end(self, row: RankRow) -> None:  # noqa: ARG002
        """After the row: what was not handed over yet. Nothing is lent any more."""
        now = self._handover
        if now.trains and now.lend_slot is not None:
            self.return_gradient()
        self.forget()

    def return_gradient(self) -> None:
        """On a rank that has both stages, let the head's gradient become part of the first stage's, if it has not."""
        if self._is_returned:
            return
        self._is_returned = True
        if self._room is not None and self._lent is not None:
            with self._lent.collected() as gradient:
                self._use(Kind.RECV_TIED_GRAD, gradient)
        else:
            self._use(Kind.RECV_TIED_GRAD, self._given(Kind.SEND_TIED_GRAD))

    def forget(self) -> None:
        """Take back what is lent."""
        if self._borrower is not None:
            self._borrower.borrow(None)
        self._forget(Handover())

    def _given(self, kind: Kind) -> Tensor:
        """What a send of this kind takes: the weights, or the head's gradient so far."""
        if kind is Kind.SEND_TIED:
            assert self._lender is not None, "the matrix belongs to the first stage"
            return self._lender.lend(self._name) if self._lent is None else self._lent.weights
        assert self._gradient is not None, "the head has no gradient"
        return self._gradient

    def _use(self, kind: Kind, tensor: Tensor) -> None:
        """Use what a receive of this kind brought: lend it to the head, or add it to the first stage's gradient."""
        if kind is Kind.RECV_TIED:
            assert self._borrower is not None, "the head is in the last stage"
            weights = tensor.detach()
            is_own = self._lender is None or not self._lender.owns(tensor)
            self._lent_bytes = tensor.nbytes if is_own else 0
            if self._handover.trains:
                # A leaf of its own: its gradient is the head's part alone, and not yet the parameter's.
                weights.requires_grad_().register_post_accumulate_grad_hook(self._collect)
            self._borrower.borrow(weights)
        else:
            assert self._lender is not None, "the matrix belongs to the first stage"
            self._gradient_bytes = tensor.nbytes
            self._lender.add_to_gradient(self._name, tensor)

    def _collect(self, weights: Tensor) -> None:
        """Add a micro-batch's gradient to those before it, in the gradient's type."""
        assert weights.grad is not None
        if self._gradient is None and self._room is not None:
            self._gradient = self._room.copy_(weights.grad)
        elif self._gradient is None:
            # No copy where the types agree; that is safe since nobody else keeps the tensor.
            self._gradient = weights.grad.to(self._gradient_dtype)
        else:
            self._gradient.add_(weights.grad)
        self._gradient_bytes = self._gradient.nbytes
        # Else autograd would add the next micro-batch to it, and this one would be counted twice.
        weights.grad = None
