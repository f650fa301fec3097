"""One stage on one rank: forward and backward of a micro-batch, and what is kept between them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.execute.boundary import TensorSpec, TokenSlices
from pipeloom.model import KeyValueCache

_run_backward = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001
"""What ``torch.autograd.backward`` comes to. That checks shapes first, which takes as long as a small stage's backward;
here both ends of every boundary have agreed on them."""

Objective = Callable[[Tensor, int], Tensor]
"""(last stage's output, micro-batch) -> what the step is after: a scalar loss to train, anything to evaluate. Where
micro-batches are cut, their slices are counted through: the number is micro-batch x slices + slice."""


class Part(NamedTuple):
    """What a stage runs at once: a micro-batch, or a slice of its tokens."""

    microbatch: int
    slice: int = 0

    def number(self, num_slices: int) -> int:
        """Its place among all parts, slice by slice, micro-batch by micro-batch."""
        return self.microbatch * num_slices + self.slice


class Stage:
    """A slice of the model that runs micro-batches.

    Args:
        module: takes the stage's input, returns its output.
        index: global stage index.
        output: the spec that the output must fulfil.
        needs_input_gradient: whether an earlier stage waits for the gradient of the input.
        slices: how micro-batches are cut; the module then also takes a ``KeyValueCache``. ``None`` for whole ones.

    Attributes:
        held_bytes: of the inputs that are kept for a backward; what autograd keeps beside them is not counted.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        output: TensorSpec,
        *,
        needs_input_gradient: bool,
        slices: TokenSlices | None = None,
    ) -> None:
        self.module = module
        self.index = index
        self._output = output
        self._needs_input_gradient = needs_input_gradient
        self._slices = slices
        self._kept: dict[Part, tuple[Tensor, Tensor]] = {}
        self._caches: dict[int, KeyValueCache] = {}
        self._inputs: dict[Part, Tensor] = {}
        self.held_bytes = 0

    @property
    def num_held(self) -> int:
        """Parts of the batch that went forward and not yet back."""
        return len(self._kept) + len(self._inputs)

    def forward(self, part: Part, tensor: Tensor, objective: Objective | None, *, trains: bool) -> Tensor:
        """Run a part of the batch forward.

        Args:
            part: under which ``backward`` finds what is kept.
            tensor: the stage's input.
            objective: applied to the output; on the last stage only.
            trains: keep what the backward needs; otherwise nothing is kept.

        Returns:
            The output, detached: for the next stage, or the objective's result.

        Raises:
            BoundaryError: the output is not what was agreed on.
        """
        output = self._forward(part, tensor, objective, trains=trains)
        if not trains and self._slices is not None and part.slice == len(self._slices.lengths) - 1:
            del self._caches[part.microbatch]
        return output

    def _forward(self, part: Part, tensor: Tensor, objective: Objective | None, *, trains: bool) -> Tensor:
        with torch.set_grad_enabled(trains):
            if trains and self._needs_input_gradient:
                tensor = tensor.detach().requires_grad_()
            output = self._run(part, tensor)
            if objective is not None:
                output = objective(output, part.number(1 if self._slices is None else len(self._slices.lengths)))
        if trains:
            self._kept[part] = (tensor, output)
            self.held_bytes += tensor.nbytes
        return output.detach()

    def _run(self, part: Part, tensor: Tensor) -> Tensor:
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

    def forward_once(self, part: Part, tensor: Tensor, objective: Objective | None) -> Tensor:
        """As ``forward`` for a part that ``recompute`` runs again: only the input is kept."""
        output = self._forward(part, tensor, objective, trains=False)
        self._inputs[part] = tensor
        self.held_bytes += tensor.nbytes
        return output

    def recompute(self, part: Part, objective: Objective | None) -> None:
        """Run a part forward again, after ``forward_once``, and keep what its backward needs."""
        tensor = self._inputs.pop(part)
        self.held_bytes -= tensor.nbytes
        self._forward(part, tensor, objective, trains=True)

    def backward(self, part: Part, gradient: Tensor | None) -> Tensor | None:
        """Run a part of the batch backward; gradients add to the parameters' ``grad``.

        Args:
            part: one that went forward.
            gradient: of the output; ``None`` on the last stage, whose output is a scalar loss.

        Returns:
            The gradient of the input, if an earlier stage waits for it.
        """
        tensor, output = self._kept.pop(part)
        self.held_bytes -= tensor.nbytes
        if gradient is None:
            assert output.numel() == 1, f"the objective must return a scalar to train, not {tuple(output.shape)}"
            gradient = torch.ones_like(output)
        _run_backward((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)
        if part.slice == 0:
            self._caches.pop(part.microbatch, None)
        if not self._needs_input_gradient:
            return None
        assert tensor.grad is not None, f"stage {self.index} does not use its input"
        return tensor.grad

    def forget(self) -> None:
        """Drop everything that is kept, after a step that failed."""
        self._kept.clear()
        self._caches.clear()
        self._inputs.clear()
        self.held_bytes = 0
