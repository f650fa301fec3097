"""A stage on a rank: forward and backward of micro-batches, and what it keeps between them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.stages.saved import Parcel, hollow
from pipeloom.model import Documents, KeyValueCache
from pipeloom.model.deferred import Filed, add_to_leaves, defer, filing, leaves_of, run_backward
from pipeloom.model.experts import Balance, balances_of

Objective = Callable[[Tensor, int], Tensor]
"""(last stage's output, micro-batch) -> the result of the step: a scalar loss in training, anything in evaluation. With
token slices the number is micro-batch x slices + slice."""


class Continued(NamedTuple):
    """A sequence of which earlier tokens are cached.

    Attributes:
        cache: its keys and values in the layers of this rank.
        begin: position of the next token.
        documents: which keys the new tokens see, and their positions; ``None``: all, from position 0 on.
    """

    cache: KeyValueCache
    begin: int
    documents: Documents | None = None


class Portion(NamedTuple):
    """The unit of a stage's work: a micro-batch, or a token slice of one."""

    microbatch: int
    slice: int = 0

    def number(self, num_slices: int) -> int:
        """Its index: micro-batch x slices + slice."""
        return self.microbatch * num_slices + self.slice


class StepDocuments:
    """What the tokens of a step see, where attention ends at documents.

    Each mask is made at its first use, shared by the stages of a rank, and freed when none of them keeps it.

    Args:
        firsts: of a ``Batch``: for each micro-batch, or for each slice of each.
        num_slices: of a micro-batch.
    """

    def __init__(self, firsts: Sequence[Tensor], num_slices: int = 1) -> None:
        self._firsts, self._num_slices = firsts, num_slices
        self._made: WeakValueDictionary[int, Documents] = WeakValueDictionary()

    def of(self, part: Portion) -> Documents:
        """That of a micro-batch or slice."""
        number = part.number(self._num_slices)
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = Documents(self._firsts[number])
        return found


class Tally:
    """Counts what the stages of a rank keep between forward and backward, and the most of it.

    Attributes:
        held: micro-batches or slices in flight: after the forward, before the end of the whole backward.
        held_bytes: of stage inputs that are kept for backwards; other saved tensors are not included.
        pending: micro-batches or slices between input gradient and weight gradient.
        pending_bytes: of what is kept between these two.
        most: the largest of each since ``begin``, in this order.
    """

    __slots__ = ("held", "held_bytes", "most", "pending", "pending_bytes")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is kept."""
        self.held = self.held_bytes = self.pending = self.pending_bytes = 0
        self.begin()

    def begin(self) -> None:
        """Count anew."""
        self.most = [0, 0, 0, 0]

    def hold(self, num_bytes: int) -> None:
        """A micro-batch or slice, with the bytes of its input."""
        self.held += 1
        self.held_bytes += num_bytes
        most = self.most
        most[0] = max(most[0], self.held)
        most[1] = max(most[1], self.held_bytes)

    def drop(self, num_bytes: int) -> None:
        """The inverse of ``hold``."""
        self.held -= 1
        self.held_bytes -= num_bytes

    def suspend(self, num_bytes: int) -> None:
        """An input gradient, with the bytes that wait for the weight gradient; still in flight."""
        self.pending += 1
        self.pending_bytes += num_bytes
        self.most[2] = max(self.most[2], self.pending)
        self.most[3] = max(self.most[3], self.pending_bytes)
        self.hold(0)

    def resume(self, num_bytes: int) -> None:
        """The inverse of ``suspend``."""
        self.pending -= 1
        self.pending_bytes -= num_bytes
        self.drop(0)


@dataclass(frozen=True)
class Pending:
    """What an input gradient keeps for the weight gradient.

    Attributes:
        filed: inputs and output gradients of deferring layers.
        leaves, gradients: parameters of other layers, such as norms and biases, and their gradients, which are computed
            with the input gradient.
    """

    filed: list[Filed]
    leaves: list[Tensor]
    gradients: list[Tensor]

    @cached_property
    def size(self) -> int:
        """Bytes; memory that several layers share counts once."""
        kept = [*(tensor for one in self.filed for tensor in one.kept), *self.gradients]
        storages = [tensor.untyped_storage() for tensor in kept]
        return sum({one._cdata: one.nbytes() for one in storages}.values())  # noqa: SLF001  meta tensors have no address


def split_backward_of(
    module: nn.Module, tensor: Tensor, output: Tensor | GradientEdge, gradient: Tensor
) -> tuple[Tensor | None, Pending]:
    """The input gradient of a module.

    Args:
        module: whose linear layers and embeddings defer their weight gradients.
        tensor: its input.
        output: its output.
        gradient: of the output.

    Returns:
        The gradient of the input, if it requires one, and what the weight gradient needs.
    """
    leaves = [leaf for leaf in leaves_of(module) if leaf.requires_grad]
    with filing(leaves) as filed:
        wanted = (tensor, *leaves) if tensor.requires_grad else tuple(leaves)
        found = run_backward((output,), (gradient,), False, False, wanted, allow_unreachable=True)
    own = None
    if tensor.requires_grad:
        own, *found = found
    made = [(leaf, one) for leaf, one in zip(leaves, found, strict=True) if one is not None]
    return own, Pending(filed, [leaf for leaf, _ in made], [one for _, one in made])


class Stage:
    """A slice of the model that runs micro-batches.

    Args:
        module: takes the stage's input, returns its output.
        index: global stage index.
        output: the agreed spec of the output.
        needs_input_gradient: whether an earlier stage needs the gradient of the input.
        splits: whether backwards are split into input and weight gradients; layers of the module then defer.
        slices: token slices of a micro-batch; the module then also takes a ``KeyValueCache``. ``None`` for whole ones.
        continued: for each micro-batch of a forward-only schedule the sequence that its tokens continue; ``None`` for
            whole sequences.

    Attributes:
        tally: of what it keeps; the stages of a rank may share one.
        documents: of the step; ``None`` where attention has no borders.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        output: TensorSpec,
        *,
        needs_input_gradient: bool,
        splits: bool = False,
        slices: TokenSlices | None = None,
        continued: Mapping[int, Continued] | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self._output = output
        self.needs_input_gradient = needs_input_gradient
        self.splits = splits
        if splits:
            defer(module)
        self._kept: dict[Portion, tuple[Tensor, Tensor | GradientEdge]] = {}
        self._inputs: dict[Portion, Callable[[], Tensor]] = {}
        self._pending: dict[Portion, Pending] = {}
        self._slices, self._continued = slices, continued
        self._caches: dict[int, KeyValueCache] = {}
        self.documents: StepDocuments | None = None
        self._seen: dict[Portion, Documents] = {}
        self.tally = Tally()
        self._one: Tensor | None = None

    @property
    def cached_bytes(self) -> int:
        """Bytes of keys and values that later slices need, over all micro-batches."""
        return sum(cache.nbytes for cache in self._caches.values())

    def forward(
        self,
        part: Portion,
        tensor: Tensor,
        objective: Objective | None,
        *,
        trains: bool,
        parcel: Parcel | None = None,
    ) -> Tensor:
        """Run the forward of a micro-batch or slice.

        Args:
            part: key for the backward.
            tensor: the stage's input.
            objective: applied to the output; on the last stage only.
            trains: whether to keep activations for a backward.
            parcel: collects saved tensors, so that they can be moved.

        Returns:
            The output, detached: for the next stage, or the objective's result.

        Raises:
            BoundaryError: the output does not have the agreed spec.
        """
        with self._counting() if trains and self._balances else nullcontext():
            output = self._forward(part, tensor, objective, trains=trains, parcel=parcel)
        if not trains and self._slices is not None and part.slice == len(self._slices.lengths) - 1:
            del self._caches[part.microbatch]
        return output

    @cached_property
    def _balances(self) -> tuple[Balance, ...]:
        return tuple(balances_of(self.module).values())

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Context of the one forward of a micro-batch in which the loads of experts count, however often it runs."""
        for one in self._balances:
            one.is_counting = True
        try:
            yield
        finally:
            for one in self._balances:
                one.is_counting = False

    def _forward(
        self, part: Portion, tensor: Tensor, objective: Objective | None, *, trains: bool, parcel: Parcel | None = None
    ) -> Tensor:
        documents = None if self.documents is None else self.documents.of(part)
        if parcel is None and trains == torch.is_grad_enabled():  # each context costs as much as a small operator
            tensor, output = self._compute(part, tensor, objective, documents, trains=trains)
        else:
            with torch.set_grad_enabled(trains), nullcontext() if parcel is None else parcel.saving():
                tensor, output = self._compute(part, tensor, objective, documents, trains=trains)
        result = output.detach()
        if trains:
            if parcel is not None:
                parcel.close(tensor, output)
            self._kept[part] = (tensor, output) if parcel is None else hollow(tensor, output)
            if documents is not None:
                self._seen[part] = documents
            self.tally.hold(tensor.nbytes)
        return result

    def _compute(
        self, part: Portion, tensor: Tensor, objective: Objective | None, documents: Documents | None, *, trains: bool
    ) -> tuple[Tensor, Tensor]:
        """The input as the graph has it, and the output of module and objective."""
        if trains and (self.needs_input_gradient or (self.splits and tensor.is_floating_point())):
            tensor = tensor.detach().requires_grad_()
        output = self._run(part, tensor, documents)
        if objective is not None:
            output = objective(output, part.number(1 if self._slices is None else len(self._slices.lengths)))
        return tensor, output

    def _run(self, part: Portion, tensor: Tensor, documents: Documents | None) -> Tensor:
        """The module's output, checked."""
        what = "the output of stage {} for micro-batch {}"
        if self._slices is None:
            if documents is None:
                output = self.module(tensor, *self._continuing(part.microbatch))
            else:
                output = self.module(tensor, documents=documents)
            self._output.check(output, what, self.index, part.microbatch)
            return output
        if part.microbatch not in self._caches:
            self._caches[part.microbatch] = KeyValueCache(self._slices.num_tokens)
        cache = self._caches[part.microbatch]
        cache.begin = self._slices.begin(part.slice)  # a recomputed slice does not follow the last one
        output = self.module(tensor, cache) if documents is None else self.module(tensor, cache, documents)
        spec = self._slices.spec(self._output, part.slice)
        spec.check(output, f"{what}, slice {{}}", self.index, part.microbatch, part.slice)
        return output

    def _continuing(self, microbatch: int) -> tuple[KeyValueCache | Documents | None, ...]:
        """Cache and documents of the sequences that a micro-batch continues, if any."""
        if self._continued is None:
            return ()
        cache, begin, documents = self._continued[microbatch]
        cache.begin = begin  # every stage of the rank takes the tokens once
        return cache, documents

    def forward_once(
        self, part: Portion, tensor: Tensor, objective: Objective | None, parcel: Parcel | None = None
    ) -> Tensor:
        """As ``forward``, if ``recompute`` follows: only the input is kept, which a parcel may collect."""
        with self._counting():
            output = self._forward(part, tensor, objective, trains=False)
        self._inputs[part] = (lambda: tensor) if parcel is None else parcel.keep(tensor)
        self.tally.hold(tensor.nbytes)
        return output

    def recompute(self, part: Portion, objective: Objective | None, parcel: Parcel | None = None) -> None:
        """Repeat the forward after ``forward_once``, and keep activations for the backward; see ``forward``."""
        tensor = self._inputs.pop(part)()
        self.tally.drop(tensor.nbytes)
        self._forward(part, tensor, objective, trains=True, parcel=parcel)

    def backward(self, part: Portion, gradient: Tensor | None) -> Tensor | None:
        """Run the backward of a micro-batch or slice; gradients accumulate in the parameters' ``grad``.

        Args:
            part: after its forward.
            gradient: of the output; ``None`` on the last stage, whose output is a scalar loss.

        Returns:
            The gradient of the input, if an earlier stage needs it.
        """
        if self.splits:
            made = self.backward_input(part, gradient)
            self.backward_weight(part)
            return made
        tensor, output, gradient = self._take(part, gradient)
        # The arguments that torch.autograd.backward passes.
        run_backward((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        return self._made(part, tensor.grad)

    def backward_input(self, part: Portion, gradient: Tensor | None) -> Tensor | None:
        """Compute the input gradient only; ``grad`` of the parameters does not change.

        Saved tensors are freed. Inputs and output gradients of deferring layers, and gradients of all other parameters,
        are kept until ``backward_weight``.
        """
        assert self.splits, f"stage {self.index} was not made to split its backward"
        tensor, output, gradient = self._take(part, gradient)
        own, pending = split_backward_of(self.module, tensor, output, gradient)
        self._pending[part] = pending
        self.tally.suspend(pending.size)
        return self._made(part, own)

    def backward_weight(self, part: Portion) -> None:
        """Compute the weight gradient; it accumulates in ``grad``. The weights themselves are not needed."""
        pending = self._pending.pop(part)
        self.tally.resume(pending.size)
        add_to_leaves(pending.leaves, pending.gradients)
        with torch.no_grad():
            for one in pending.filed:
                one.add()

    def _take(self, part: Portion, gradient: Tensor | None) -> tuple[Tensor, Tensor | GradientEdge, Tensor]:
        """Take input and output out of what is kept, with the output's gradient."""
        tensor, output = self._kept.pop(part)
        self._seen.pop(part, None)
        self.tally.drop(tensor.nbytes)
        if gradient is None:
            assert isinstance(output, Tensor)
            assert output.numel() == 1, f"the objective must return a scalar to train, not {tuple(output.shape)}"
            # Of a scalar, which autograd reads only; made once.
            gradient = self._one
            if gradient is None or gradient.dtype != output.dtype:
                gradient = self._one = torch.ones_like(output)
        return tensor, output, gradient

    def _made(self, part: Portion, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the input, if an earlier stage needs it."""
        # Backwards of slices are in reverse order, so the first slice is the last that needs keys and values.
        if part.slice == 0:
            self._caches.pop(part.microbatch, None)
        if not self.needs_input_gradient:
            return None
        assert gradient is not None, f"stage {self.index} does not use its input"
        return gradient

    def forget(self) -> None:
        """Free all activations, after a failed step."""
        self._kept.clear()
        self._inputs.clear()
        self._caches.clear()
        self._pending.clear()
        self._seen.clear()
        self.documents = None
        self.tally.forget()
