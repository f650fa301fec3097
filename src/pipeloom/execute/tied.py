"""The matrix that embedding and head share, where they are in different stages: lent for a step, its gradient returned.

It belongs to the first stage like its other parameters. The head computes on a borrowed tensor outside the last stage's
parameters, whose gradient is collected here and becomes part of the first stage's. Between two ranks both travel as
messages of the schedule; on one rank they are handed over here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.execute.boundary import TensorSpec
from pipeloom.execute.stage_store import LentMatrix
from pipeloom.execute.weights import StageWeights
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, TIED_KINDS

_REPEATS = 5


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


class Tied:
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
        self._forget(Handover())

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Outside a step, lend the head zeros meanwhile, so that it can be timed."""
        if self._borrower is not None:
            self._forget(Handover(trains=True))
            self.take(Kind.RECV_TIED, torch.zeros_like(self.specs[Kind.RECV_TIED].empty(device)))
        try:
            yield
        finally:
            self.forget()

    def begin(self, handover: Handover) -> None:
        """Before a step, with what its schedule hands over."""
        self._forget(handover)
        if self._lent is not None:
            self._fill()
            self._room = self._lent.gradient

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

    def hand_over(self, slot: int) -> None:
        """Before the action of a slot, on a rank that has both stages: what is due between them.

        The weights when the first stage first computes, since they are here then; the gradient before it is reduced.
        """
        if slot == self._handover.lend_slot:
            if self._handover.updates_before:
                self._fill()
            self.take(Kind.RECV_TIED, self.given(Kind.SEND_TIED))
        if slot == self._handover.return_slot:
            self._return()

    def end(self) -> None:
        """After the row: what was not handed over yet. Nothing is lent any more."""
        now = self._handover
        if now.trains and now.lend_slot is not None and now.return_slot is None:
            self.return_gradient()
        self.forget()

    def return_gradient(self) -> None:
        """Let the head's gradient become part of the first stage's now, if it has not and no message carries it."""
        if self._handover.lend_slot is not None and not self._is_returned:
            self._return()

    def forget(self) -> None:
        """Take back what is lent."""
        if self._borrower is not None:
            self._borrower.borrow(None)
        self._forget(Handover())

    def _return(self) -> None:
        self._is_returned = True
        if self._room is not None and self._lent is not None:
            with self._lent.collected() as gradient:
                self.take(Kind.RECV_TIED_GRAD, gradient)
            return
        self.take(Kind.RECV_TIED_GRAD, self.given(Kind.SEND_TIED_GRAD))

    def given(self, kind: Kind) -> Tensor:
        """What a send of this kind takes: the weights, or the head's gradient so far."""
        if kind is Kind.SEND_TIED:
            assert self._lender is not None, "the matrix belongs to the first stage"
            return self._lender.lend(self._name) if self._lent is None else self._lent.weights
        assert self._gradient is not None, "the head has no gradient"
        return self._gradient

    def take(self, kind: Kind, tensor: Tensor) -> None:
        """Use what a receive of this kind brought: lend it to the head, or add it to the first stage's gradient."""
        if kind is Kind.RECV_TIED:
            assert self._borrower is not None, "the head is in the last stage"
            weights = tensor.detach()
            if self._handover.trains:
                weights.requires_grad_().register_post_accumulate_grad_hook(self._collect)
            self._borrower.borrow(weights)
        else:
            assert self._lender is not None, "the matrix belongs to the first stage"
            self._lender.add_to_gradient(self._name, tensor)

    def _collect(self, weights: Tensor) -> None:
        """Add a micro-batch's gradient to those before it, in the gradient's type."""
        assert weights.grad is not None
        if self._gradient is None and self._room is not None:
            self._gradient = self._room.copy_(weights.grad)
        elif self._gradient is None:
            self._gradient = weights.grad.to(self._gradient_dtype)
        else:
            self._gradient.add_(weights.grad)
        weights.grad = None
