"""One stage on one rank: forward and backward of a micro-batch, and what is kept between them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.stages.saved import Parcel, hollow
from pipeloom.model import KeyValueCache
from pipeloom.model.deferred import Filed, add_to_leaves, defer, filing, leaves_of, run_backward

Objective = Callable[[Tensor, int], Tensor]
"""(last stage's output, micro-batch) -> what the step is after: a scalar loss to train, anything to evaluate. Where
micro-batches are cut, their slices are counted through: the number is micro-batch x slices + slice."""


class Portion(NamedTuple):
    """What a stage runs at once: a micro-batch, or a slice of its tokens."""

    microbatch: int
    slice: int = 0

    def number(self, num_slices: int) -> int:
        """Its place among all parts, slice by slice, micro-batch by micro-batch."""
        return self.microbatch * num_slices + self.slice


@dataclass(frozen=True)
class Pending:
    """What a part of the batch leaves for the gradients of the weights.

    Attributes:
        filed: by layers that defer.
        leaves, gradients: what the first half made beside the input's gradient: those of norms and biases.
    """

    filed: list[Filed]
    leaves: list[Tensor]
    gradients: list[Tensor]

    @cached_property
    def size(self) -> int:
        """Bytes that it keeps; memory that several layers share counts once."""
        kept = [*(tensor for one in self.filed for tensor in one.kept), *self.gradients]
        storages = [tensor.untyped_storage() for tensor in kept]
        return sum({one._cdata: one.nbytes() for one in storages}.values())  # noqa: SLF001  meta tensors have no address


def split_backward_of(
    module: nn.Module, tensor: Tensor, output: Tensor | GradientEdge, gradient: Tensor
) -> tuple[Tensor | None, Pending]:
    """The first half of a module's backward.

    Args:
        module: its layers defer what they can.
        tensor: its input.
        output: what it made of it.
        gradient: of the output.

    Returns:
        The gradient of the input, if that takes one, and what waits for the second half.
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
        output: the spec that the output must fulfil.
        needs_input_gradient: whether an earlier stage waits for the gradient of the input.
        splits: whether it is to run the halves of a backward on their own; the module then defers what it can.
        slices: how micro-batches are cut; the module then also takes a ``KeyValueCache``. ``None`` for whole ones.

    Attributes:
        held_bytes: of the inputs that are kept for a backward; what autograd keeps beside them is not counted.
        pending_bytes: of what is kept from the first half of a backward to the second.
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
    ) -> None:
        self.module = module
        self.index = index
        self._output = output
        self._needs_input_gradient = needs_input_gradient
        self.splits = splits
        if splits:
            defer(module)
        self._kept: dict[Portion, tuple[Tensor, Tensor | GradientEdge]] = {}
        self._inputs: dict[Portion, Callable[[], Tensor]] = {}
        self._pending: dict[Portion, Pending] = {}
        self._slices = slices
        self._caches: dict[int, KeyValueCache] = {}
        self.held_bytes = 0
        self.pending_bytes = 0

    @property
    def num_held(self) -> int:
        """Parts of the batch that went forward and not yet back, both halves."""
        return len(self._kept) + len(self._inputs) + len(self._pending)

    @property
    def cached_bytes(self) -> int:
        """Of keys and values of earlier slices, in all micro-batches that later ones need."""
        return sum(cache.nbytes for cache in self._caches.values())

    @property
    def num_pending(self) -> int:
        """Parts of the batch between the two halves of their backward."""
        return len(self._pending)

    def forward(
        self,
        part: Portion,
        tensor: Tensor,
        objective: Objective | None,
        *,
        trains: bool,
        parcel: Parcel | None = None,
    ) -> Tensor:
        """Run a part of the batch forward.

        Args:
            part: under which ``backward`` finds what is kept.
            tensor: the stage's input.
            objective: applied to the output; on the last stage only.
            trains: keep what the backward needs; otherwise nothing is kept.
            parcel: takes what autograd saves, so that it can be moved.

        Returns:
            The output, detached: for the next stage, or the objective's result.

        Raises:
            BoundaryError: the output is not what was agreed on.
        """
        output = self._forward(part, tensor, objective, trains=trains, parcel=parcel)
        if not trains and self._slices is not None and part.slice == len(self._slices.lengths) - 1:
            del self._caches[part.microbatch]
        return output

    def _forward(
        self, part: Portion, tensor: Tensor, objective: Objective | None, *, trains: bool, parcel: Parcel | None = None
    ) -> Tensor:
        with torch.set_grad_enabled(trains), nullcontext() if parcel is None else parcel.saving():
            if trains and (self._needs_input_gradient or (self.splits and tensor.is_floating_point())):
                tensor = tensor.detach().requires_grad_()
            output = self._run(part, tensor)
            if objective is not None:
                output = objective(output, part.number(1 if self._slices is None else len(self._slices.lengths)))
        result = output.detach()
        if trains:
            if parcel is not None:
                parcel.close(tensor, output)
            self._kept[part] = (tensor, output) if parcel is None else hollow(tensor, output)
            self.held_bytes += tensor.nbytes
        return result

    def _run(self, part: Portion, tensor: Tensor) -> Tensor:
        """The module's output, as agreed."""
        what = f"the output of stage {self.index} for micro-batch {part.microbatch}"
        if self._slices is None:
            output = self.module(tensor)
            self._output.check(output, what)
            return output
        if part.microbatch not in self._caches:
            self._caches[part.microbatch] = KeyValueCache(self._slices.num_tokens)
        cache = self._caches[part.microbatch]
        cache.begin = self._slices.begin(part.slice)  # a slice that is recomputed is not the next one
        output = self.module(tensor, cache)
        self._slices.spec(self._output, part.slice).check(output, f"{what}, slice {part.slice}")
        return output

    def forward_once(
        self, part: Portion, tensor: Tensor, objective: Objective | None, parcel: Parcel | None = None
    ) -> Tensor:
        """As ``forward`` for a part that ``recompute`` runs again: only the input is kept, which a parcel may take."""
        output = self._forward(part, tensor, objective, trains=False)
        self._inputs[part] = (lambda: tensor) if parcel is None else parcel.keep(tensor)
        self.held_bytes += tensor.nbytes
        return output

    def recompute(self, part: Portion, objective: Objective | None, parcel: Parcel | None = None) -> None:
        """Run a part forward again, after ``forward_once``, and keep what its backward needs; see ``forward``."""
        tensor = self._inputs.pop(part)()
        self.held_bytes -= tensor.nbytes
        self._forward(part, tensor, objective, trains=True, parcel=parcel)

    def backward(self, part: Portion, gradient: Tensor | None) -> Tensor | None:
        """Run a part of the batch backward; gradients add to the parameters' ``grad``.

        Args:
            part: one that went forward.
            gradient: of the output; ``None`` on the last stage, whose output is a scalar loss.

        Returns:
            The gradient of the input, if an earlier stage waits for it.
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
        """The first half of ``backward``: the gradient of the input. Nothing adds to the parameters' ``grad`` yet.

        What autograd kept is freed. Until the second half the inputs of the layers that defer and the gradients of
        their outputs are kept, and the gradients of what does not defer.
        """
        assert self.splits, f"stage {self.index} was not made to split its backward"
        tensor, output, gradient = self._take(part, gradient)
        own, pending = split_backward_of(self.module, tensor, output, gradient)
        self._pending[part] = pending
        self.pending_bytes += pending.size
        return self._made(part, own)

    def backward_weight(self, part: Portion) -> None:
        """The second half of ``backward``: gradients add to the parameters' ``grad``. Weights need not be here."""
        pending = self._pending.pop(part)
        self.pending_bytes -= pending.size
        add_to_leaves(pending.leaves, pending.gradients)
        with torch.no_grad():
            for one in pending.filed:
                one.add()

    def _take(self, part: Portion, gradient: Tensor | None) -> tuple[Tensor, Tensor | GradientEdge, Tensor]:
        """What is kept of a part, which then is not any more: input, output, and the output's gradient."""
        tensor, output = self._kept.pop(part)
        self.held_bytes -= tensor.nbytes
        if gradient is None:
            assert isinstance(output, Tensor)
            assert output.numel() == 1, f"the objective must return a scalar to train, not {tuple(output.shape)}"
            gradient = torch.ones_like(output)
        return tensor, output, gradient

    def _made(self, part: Portion, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a part's input, if somebody waits for it."""
        # Slices go back in reverse, so the first one is the last that needs keys and values.
        if part.slice == 0:
            self._caches.pop(part.microbatch, None)
        if not self._needs_input_gradient:
            return None
        assert gradient is not None, f"stage {self.index} does not use its input"
        return gradient

    def forget(self) -> None:
        """Drop everything that is kept, after a step that failed."""
        self._kept.clear()
        self._inputs.clear()
        self._caches.clear()
        self._pending.clear()
        self.held_bytes = self.pending_bytes = 0
