"""The matrix that embedding and head share (tied weights), where they are in different stages.

The matrix is a parameter of the first stage. In each step the last stage gets a copy or a reference, outside of its own
parameters, and its gradient is added to that of the first stage. Between two ranks both are messages of the schedule;
on one rank this module passes them on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.parts.part import Held, MessagePart, RankRow, Service
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, TIED_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.stage_swaps import Content


class Borrower(Protocol):
    """The last stage's module."""

    def borrow(self, weight_VH: Tensor | None) -> None:  # noqa: N803 (upper-case letters in names are shapes)
        """Project with these weights; ``None`` removes them."""
        ...


class Head:
    """The head with borrowed weights, and its gradient for them in a step.

    Args:
        module: of the last stage.
        dtype: in which gradients are summed over micro-batches.

    Attributes:
        held: bytes of the borrowed weights and of their gradient in this step.
    """

    def __init__(self, module: Borrower, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self.begin(trains=False)

    def begin(self, *, trains: bool, room: Tensor | None = None) -> None:
        """Reset before a step, without weights.

        Args:
            trains: whether backwards follow.
            room: memory for the gradient; ``None``: it is allocated.
        """
        self._module.borrow(None)
        self._trains, self._room = trains, room
        self._gradient: Tensor | None = None
        self.held = Held()

    def take(self, weights: Tensor) -> None:
        """Set the borrowed weights."""
        weights = weights.detach()
        gradient_bytes = weights.numel() * self._dtype.itemsize if self._trains else 0
        self.held = Held(lent_bytes=weights.nbytes, lent_gradient_bytes=gradient_bytes)
        if self._trains:
            # A separate leaf, so that its gradient is only that of the head.
            weights.requires_grad_().register_post_accumulate_grad_hook(self._collect)
        self._module.borrow(weights)

    def gradient(self) -> Tensor:
        """The sum of this step's gradients."""
        assert self._gradient is not None, "the head has no gradient"
        return self._gradient

    def _collect(self, weights: Tensor) -> None:
        """Add a micro-batch's gradient to the sum, in the dtype of the sum."""
        assert weights.grad is not None
        if self._gradient is not None:
            self._gradient.add_(weights.grad)
        elif self._room is not None:
            self._gradient = self._room.copy_(weights.grad)
        else:
            # Without a copy if the dtypes are equal; safe, since autograd does not keep the tensor.
            self._gradient = weights.grad.to(self._dtype)
        # Otherwise autograd would add the next micro-batch to it, and this one would count twice.
        weights.grad = None


class Loan:
    """Passes the matrix and its gradient between two stages of one rank, without copies.

    Attributes:
        room: memory for the gradient; ``None``: it is allocated.
    """

    room: Tensor | None = None

    def fill(self, owned: Callable[[], Tensor]) -> None:
        """Copy the values of the first stage, before the borrower is on the device; here nothing."""

    def weights(self, owned: Callable[[], Tensor]) -> Tensor:
        """The weights of the borrower."""
        return owned()

    @contextmanager
    def collected(self, gradient: Callable[[], Tensor]) -> Iterator[Tensor]:
        """Context with the borrower's gradient on the device."""
        yield gradient()


class SwappedLoan(Loan):
    """Passes them where stages are swapped: both are swapped in and out with the borrower.

    Args:
        store: of both stages.
        borrower: the last stage.
        weights: memory for the matrix, on the device; the store takes it.
        gradient: memory for its gradient, on the device; the store takes it.
    """

    def __init__(self, store: StageStore, borrower: int, weights: Tensor, gradient: Tensor) -> None:
        self._store, self._borrower, self._weights, self.room = store, borrower, weights, gradient
        store.add(borrower, Content.BORROWED, weights)
        store.add(borrower, Content.LENT_GRADIENT, gradient)

    def fill(self, owned: Callable[[], Tensor]) -> None:
        """Copy the values of the first stage, from the device or the host; the borrower must be at rest."""
        self._store.at_rest(self._weights).copy_(self._store.now(0, Content.WEIGHTS, owned()))

    def weights(self, owned: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002  ``fill`` copied them
        """The borrower's copy."""
        return self._weights

    @contextmanager
    def collected(self, gradient: Callable[[], Tensor]) -> Iterator[Tensor]:
        """Context with the gradient on the device; waits until the borrower is swapped out."""
        room = gradient()
        self._store.settle()
        found = self._store.now(self._borrower, Content.LENT_GRADIENT, room)
        with self._store.room(room.nbytes if found is not room else 0):
            yield found.to(room.device)


class Handover(NamedTuple):
    """What a rank does with the tied matrix in the steps of a schedule, apart from its messages.

    Attributes:
        trains: whether the head's gradient is returned.
        is_here: whether both stages are on this rank, so that there are no messages.
        updates_before: whether the first stage is updated in the step before the last one gets the weights.
    """

    trains: bool = False
    is_here: bool = False
    updates_before: bool = False


class Tied(MessagePart):
    """Implements the messages of the tied matrix on one rank, and passes it on where both stages are on the rank.

    Args:
        name: of the parameter of the first stage.
        spec: of its weights.
        gradient_dtype: in which the head's gradient is summed over micro-batches, and sent.
        lender: the first stage, on its rank.
        borrower: the last stage, on its rank.
        loan: passes the matrix and its gradient between stages of one rank.
        is_trained: whether the matrix has a gradient.

    Attributes:
        specs: kind -> spec of its message.
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
        loan: Loan | None = None,
        is_trained: bool = True,
    ) -> None:
        self._is_trained = is_trained
        gradient = TensorSpec(spec.shape, gradient_dtype)
        self.specs = {
            Kind.SEND_TIED: spec,
            Kind.RECV_TIED: spec,
            Kind.SEND_TIED_GRAD: gradient,
            Kind.RECV_TIED_GRAD: gradient,
        }
        self._head = None if borrower is None else Head(borrower, gradient_dtype)
        self._loan = loan or Loan()
        # The tensor of a send, and the use of a received one, for the stages on this rank.
        self._given: dict[Kind, Callable[[], Tensor]] = {}
        self._use: dict[Kind, Callable[[Tensor], None]] = {}
        if lender is not None:
            self._given[Kind.SEND_TIED] = partial(lender.lend, name)
            self._use[Kind.RECV_TIED_GRAD] = partial(lender.add_to_gradient, name)
        if self._head is not None:
            self._given[Kind.SEND_TIED_GRAD] = self._head.gradient
            self._use[Kind.RECV_TIED] = self._head.take
        self._handovers: dict[RankRow, Handover] = {}
        self._handover = Handover()
        self._is_returned = False
        self._received = Held()
        self._lends_copy = lender is not None and lender.lends_copy

    @property
    def matrix(self) -> TensorSpec:
        """The spec of the shared matrix."""
        return self.specs[Kind.SEND_TIED]

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Context outside a step in which the head has weights of zeros, so that it can be timed."""
        if self._head is not None:
            self._head.begin(trains=self._is_trained)
            self._head.take(torch.zeros_like(self.specs[Kind.RECV_TIED].empty(device)))
        try:
            yield
        finally:
            self.forget()

    def bind(self, row: RankRow) -> None:
        """Find the slots where the matrix and its gradient are passed on, if both stages are on this rank.

        Raises:
            UserError: the schedule lacks the messages; or, with both stages on a rank, it reduces the first stage's
                gradient for the last time, or completes it for an update, before the head's is complete.
        """
        owner = row.schedule.placement.rank_by_stage
        trains = self._is_trained and row.schedule.first_backward_stage == 0
        needed = (Kind.SEND_TIED, Kind.RECV_TIED_GRAD) if trains else (Kind.SEND_TIED,)
        if owner[0] != owner[-1] and not all(row.schedule.rows[owner[0]].is_kind(kind).any() for kind in needed):
            raise UserError("embedding and head share a matrix that the schedule does not send; call add_tied first")
        is_here = owner[0] == owner[-1] == row.rank
        self._handovers[row] = self._bind_here(row, trains=trains) if is_here else Handover(trains)

    def _bind_here(self, row: RankRow, *, trains: bool) -> Handover:
        def slots(stage: int, *kinds: Kind) -> list[int]:
            return [slot for slot in row.slots_of(*kinds) if row.actions[slot].stage == stage]

        (lends_at, *_), updates = slots(0, Kind.FORWARD), slots(0, Kind.UPDATE)
        # Not earlier: only now is the first stage on the device, and updated if its update was deferred to this step.
        row.before[lends_at].append(self._lend)
        if trains:
            last, reductions = row.schedule.num_stages - 1, slots(0, Kind.REDUCE_GRAD)
            the_head = f"stage {last}, whose head shares a matrix with it"
            complete_at, head_complete_at = (slots(stage, *ADDS_TO_GRADIENT)[-1] for stage in (0, last))
            if reductions and reductions[-1] < head_complete_at:
                raise UserError(f"the last 0REDUCE_GRAD precedes a backward of {the_head}")
            if updates and complete_at < head_complete_at:
                raise UserError(f"0UPDATE follows a gradient that {the_head}, has yet to add to")
            if updates:
                row.after[complete_at].append(self._return_gradient)
            if reductions:
                row.before[reductions[-1]].append(self._return_gradient)
        return Handover(trains, is_here=True, updates_before=any(slot < lends_at for slot in updates))

    def begin(self, row: RankRow) -> Sequence[Service]:
        """Before a step: the head has no weights."""
        now, self._is_returned = self._handovers[row], False
        self._received = Held()
        self._handover = now
        if now.is_here:
            self._loan.fill(self._given[Kind.SEND_TIED])
        if self._head is not None:
            self._head.begin(trains=now.trains, room=self._loan.room)
        return ()

    def start(self, row: RankRow, slot: int) -> UnderWay:
        """Send the weights or the head's gradient, or receive them."""
        kind = row.actions[slot].kind
        return row.send(slot, self._given[kind]()) if kind in TIED_SEND_KINDS else row.receive(slot, self.specs[kind])

    def take(self, row: RankRow, slot: int, tensor: Tensor | None) -> None:
        """Use a received tensor."""
        if tensor is not None:
            if row.actions[slot].kind is Kind.RECV_TIED_GRAD:
                self._received = Held(lent_gradient_bytes=tensor.nbytes)
            self._use[row.actions[slot].kind](tensor)

    def _lend(self) -> None:
        """Pass the weights to the head, on a rank with both stages."""
        owned = self._given[Kind.SEND_TIED]
        if self._handover.updates_before:
            self._loan.fill(owned)
        self._use[Kind.RECV_TIED](self._loan.weights(owned))

    def _return_gradient(self) -> None:
        """Add the head's gradient to that of the first stage, on a rank with both stages, once in a step."""
        if not self._is_returned:
            self._is_returned = True
            with self._loan.collected(self._given[Kind.SEND_TIED_GRAD]) as gradient:
                self._use[Kind.RECV_TIED_GRAD](gradient)

    def held(self) -> Held:
        """Bytes of the borrowed matrix and its gradient, where they are separate memory."""
        if self._loan.room is not None:
            return Held()  # counted by the store
        lent = self._received if self._head is None else self._head.held
        return replace(lent, lent_bytes=0) if self._handover.is_here and not self._lends_copy else lent

    def end(self, row: RankRow) -> None:  # noqa: ARG002
        """After the row: add the gradient if that is pending, and remove the weights."""
        if self._handover.trains and self._handover.is_here:
            self._return_gradient()
        self.forget()

    def forget(self) -> None:
        """Remove the borrowed weights and their gradient."""
        if self._head is not None:
            self._head.begin(trains=False)
