"""The matrix that embedding and head share, where they are in different stages: lent for a step, its gradient returned.

It belongs to the first stage like its other parameters. The head computes on a borrowed tensor outside the last stage's
parameters, whose gradient is collected here and becomes part of the first stage's. Between two ranks both travel as
messages of the schedule; on one rank they are handed over here.
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
from pipeloom.execute.communication.transport import UnderWay
from pipeloom.execute.parts.part import Held, MessagePart, RankRow, Service
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, TIED_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.stage_swaps import Content


class Borrower(Protocol):
    """The last stage's module."""

    def borrow(self, weight_VH: Tensor | None) -> None:  # noqa: N803 (upper-case letters in names are shapes)
        """Project with these weights, or with none any more."""
        ...


class Head:
    """The head, which computes with borrowed weights, and what it adds to their gradient in a step.

    Args:
        module: of the last stage.
        dtype: in which its gradient is added up over micro-batches.

    Attributes:
        held: what is lent in this step, and its gradient.
    """

    def __init__(self, module: Borrower, dtype: torch.dtype) -> None:
        self._module, self._dtype = module, dtype
        self.begin(trains=False)

    def begin(self, *, trains: bool, room: Tensor | None = None) -> None:
        """Before a step: nothing is lent. The gradient lies in ``room`` if there is one, else in memory of its own."""
        self._module.borrow(None)
        self._trains, self._room = trains, room
        self._gradient: Tensor | None = None
        self.held = Held()

    def take(self, weights: Tensor) -> None:
        """Compute with these weights from now on."""
        weights = weights.detach()
        self.held = Held(lent_bytes=weights.nbytes, lent_gradient_bytes=weights.numel() * self._dtype.itemsize)
        if self._trains:
            # A leaf of its own: its gradient is the head's part alone, and not yet the parameter's.
            weights.requires_grad_().register_post_accumulate_grad_hook(self._collect)
        self._module.borrow(weights)

    def gradient(self) -> Tensor:
        """What was collected in this step."""
        assert self._gradient is not None, "the head has no gradient"
        return self._gradient

    def _collect(self, weights: Tensor) -> None:
        """Add a micro-batch's gradient to those before it, in the gradient's type."""
        assert weights.grad is not None
        if self._gradient is not None:
            self._gradient.add_(weights.grad)
        elif self._room is not None:
            self._gradient = self._room.copy_(weights.grad)
        else:
            # No copy where the types agree; that is safe since nobody else keeps the tensor.
            self._gradient = weights.grad.to(self._dtype)
        # Else autograd would add the next micro-batch to it, and this one would be counted twice.
        weights.grad = None


class Loan:
    """How the matrix and its gradient pass between two stages of one rank: as they are.

    Attributes:
        room: for the gradient; ``None`` where it takes memory of its own.
    """

    room: Tensor | None = None

    def fill(self, owned: Callable[[], Tensor]) -> None:
        """Take the values of the owner, the first stage, while the borrower has none."""

    def weights(self, owned: Callable[[], Tensor]) -> Tensor:
        """What the borrower computes with."""
        return owned()

    @contextmanager
    def collected(self, gradient: Callable[[], Tensor]) -> Iterator[Tensor]:
        """The borrower's gradient, on the device meanwhile."""
        yield gradient()


class SwappedLoan(Loan):
    """Where stages are swapped: the matrix and its gradient come and go with the borrower.

    Args:
        store: of both stages.
        borrower: the last stage.
        weights: like the matrix, on the device; taken over.
        gradient: like its gradient, on the device; taken over.
    """

    def __init__(self, store: StageStore, borrower: int, weights: Tensor, gradient: Tensor) -> None:
        self._store, self._borrower, self._weights, self.room = store, borrower, weights, gradient
        store.add(borrower, Content.BORROWED, weights)
        store.add(borrower, Content.LENT_GRADIENT, gradient)

    def fill(self, owned: Callable[[], Tensor]) -> None:
        """Take the values of the first stage, wherever it is; the borrower is at rest."""
        self._store.at_rest(self._weights).copy_(self._store.now(0, Content.WEIGHTS, owned()))

    def weights(self, owned: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002  they were taken by ``fill``
        """The matrix, wherever the borrower is."""
        return self._weights

    @contextmanager
    def collected(self, gradient: Callable[[], Tensor]) -> Iterator[Tensor]:
        """The gradient that was collected.

        The borrower brings it for backwards alone, which are over; its way out is waited for here.
        """
        room = gradient()
        self._store.settle()
        found = self._store.now(self._borrower, Content.LENT_GRADIENT, room)
        with self._store.room(room.nbytes if found is not room else 0):
            yield found.to(room.device)


class Handover(NamedTuple):
    """What a rank has to do about the shared matrix in the steps of a schedule beside its messages.

    Attributes:
        trains: whether the head's gradient is returned.
        is_here: whether both stages are on this rank, so that no message carries the matrix.
        updates_before: whether the first stage is updated in the step before the weights are handed over.
    """

    trains: bool = False
    is_here: bool = False
    updates_before: bool = False


class Tied(MessagePart):
    """What one rank has to do with the shared matrix, which may be nothing.

    Args:
        name: of the parameter of the first stage.
        spec: of its weights.
        gradient_dtype: in which the head's gradient is added up over micro-batches, and sent.
        lender: the first stage, on its rank.
        borrower: the last stage, on its rank.
        loan: passes the matrix and its gradient between stages of one rank.

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
        loan: Loan | None = None,
    ) -> None:
        gradient = TensorSpec(spec.shape, gradient_dtype)
        self.specs = {
            Kind.SEND_TIED: spec,
            Kind.RECV_TIED: spec,
            Kind.SEND_TIED_GRAD: gradient,
            Kind.RECV_TIED_GRAD: gradient,
        }
        self._head = None if borrower is None else Head(borrower, gradient_dtype)
        self._loan = loan or Loan()
        # What a send of this rank takes, and what becomes of what a receive brings: by the stages that are here.
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

    @contextmanager
    def rehearsal(self, device: torch.device) -> Iterator[None]:
        """Outside a step, lend the head zeros meanwhile, so that it can be timed."""
        if self._head is not None:
            self._head.begin(trains=True)
            self._head.take(torch.zeros_like(self.specs[Kind.RECV_TIED].empty(device)))
        try:
            yield
        finally:
            self.forget()

    def bind(self, row: RankRow) -> None:
        """Find where the matrix and its gradient are handed over, where no message carries them.

        Raises:
            UserError: the schedule lacks the messages; or, where none is needed, reduces the first stage's gradient for
                the last time, or completes it for an update, before the head's is complete.
        """
        owner, trains = row.schedule.placement.rank_by_stage, row.schedule.first_backward_stage == 0
        if owner[0] != owner[-1] and not row.schedule.rows[owner[0]].is_kind(*TIED_KINDS).any():
            raise UserError("embedding and head share a matrix that the schedule does not send; call add_tied first")
        is_here = owner[0] == owner[-1] == row.rank
        self._handovers[row] = self._bind_here(row, trains=trains) if is_here else Handover(trains)

    def _bind_here(self, row: RankRow, *, trains: bool) -> Handover:
        def slots(stage: int, *kinds: Kind) -> list[int]:
            return [slot for slot in row.slots_of(*kinds) if row.actions[slot].stage == stage]

        (lends_at, *_), updates = slots(0, Kind.FORWARD), slots(0, Kind.UPDATE)
        # Not before: from then on the first stage is here, and updated where that was left to this step.
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
        """Before a step, lend nothing yet."""
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
        """Use what a receive brought."""
        if tensor is not None:
            if row.actions[slot].kind is Kind.RECV_TIED_GRAD:
                self._received = Held(lent_gradient_bytes=tensor.nbytes)
            self._use[row.actions[slot].kind](tensor)

    def _lend(self) -> None:
        """Hand the weights to the head, on a rank that has both stages."""
        owned = self._given[Kind.SEND_TIED]
        if self._handover.updates_before:
            self._loan.fill(owned)
        self._use[Kind.RECV_TIED](self._loan.weights(owned))

    def _return_gradient(self) -> None:
        """On a rank that has both stages, let the head's gradient become part of the first stage's, if it has not."""
        if not self._is_returned:
            self._is_returned = True
            with self._loan.collected(self._given[Kind.SEND_TIED_GRAD]) as gradient:
                self._use[Kind.RECV_TIED_GRAD](gradient)

    def held(self) -> Held:
        """The borrowed matrix and its gradient on either side, as far as they have memory of their own."""
        if self._loan.room is not None:
            return Held()  # the store has counted them
        lent = self._received if self._head is None else self._head.held
        return replace(lent, lent_bytes=0) if self._handover.is_here and not self._lends_copy else lent

    def end(self, row: RankRow) -> None:  # noqa: ARG002
        """After the row: what was not handed over yet. Nothing is lent any more."""
        if self._handover.trains and self._handover.is_here:
            self._return_gradient()
        self.forget()

    def forget(self) -> None:
        """Take back what is lent."""
        if self._head is not None:
            self._head.begin(trains=False)
