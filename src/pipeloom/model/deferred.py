"""Gradients of weights for later: a backward that computes the gradient of its input and files what the weights' needs.

A split backward (arXiv 2401.10241, section 2) makes the gradient of a stage's input first, since another stage waits
for it, and those of its weights whenever the rank has time. Layers here whose ``defers`` is set take part: their
backward returns the gradient of the input alone, and files the layer's input and the gradient of its output under the
weight (``filing``); ``Filed.add`` makes the weight's gradient of these. Autograd keeps nothing in between.

As a program runs it, that is an ``autograd.Function``. ``torch.compile`` cannot look into its backward, which has an
effect, so that compiled code calls operators instead: opaque ones, without a break of the graph. What is compiled
assumes that nobody keeps the tensors that it gives an operator and uses their memory again; these file copies.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

run_backward = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001
"""What ``torch.autograd.backward`` comes to. That checks shapes first, which takes as long as a small stage's backward;
here both ends of every boundary have agreed on them."""


class Defers:
    """A module that can leave the gradients of its weights for later.

    Attributes:
        defers: whether it does, where gradients are computed at all.
    """

    defers: bool = False


def defer(module: nn.Module) -> None:
    """Let all parts of a module that can leave the gradients of their weights for later do so."""
    for part in module.modules():
        if isinstance(part, Defers):
            part.defers = True


def leaves_of(module: nn.Module) -> list[Tensor]:
    """What a module's backward makes gradients for: its parameters, and a matrix that it has borrowed."""
    # A borrowed matrix is no parameter of the module (it belongs to the first stage), but gets a gradient here as well.
    borrowed = getattr(module, "borrowed", None)
    return [*module.parameters(), *([] if borrowed is None else [borrowed])]


@dataclass(frozen=True)
class Filed:
    """What the gradient of one weight is made of.

    Attributes:
        leaf: the weight; its values are not needed any more.
        taken: of a linear layer its input, [..., in]; of an embedding the int64 indices that were looked up, [...].
        gradient: of the output, [..., out].
    """

    leaf: Tensor
    taken: Tensor
    gradient: Tensor

    @property
    def is_lookup(self) -> bool:
        """Whether the layer is an embedding."""
        return not self.taken.is_floating_point()

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors that are kept for this; indices are the batch's and not counted."""
        return (self.gradient,) if self.is_lookup else (self.taken, self.gradient)

    def add(self) -> None:
        """Make the weight's gradient and add it to what there is.

        Added to ``grad`` in place where there is one, by the product itself; otherwise as autograd does it, hooks
        included.
        """
        rows, total = self.gradient.flatten(0, -2), self.leaf.grad
        if self.is_lookup:
            self._add_rows(rows, total)
        elif total is None:
            add_to_leaves([self.leaf], [rows.t() @ self.taken.flatten(0, -2)])
        else:
            # The product adds to the sum by itself (beta = 1): no tensor of the weight's size in between.
            total.addmm_(rows.t(), self.taken.flatten(0, -2))

    def _add_rows(self, rows: Tensor, total: Tensor | None) -> None:
        if total is not None:
            # A token may occur several times in a batch. `total[taken] += rows` would add only one of its rows.
            total.index_add_(0, self.taken.flatten(), rows)
            return
        found = rows.new_zeros(self.leaf.shape)
        add_to_leaves([self.leaf], [found.index_add_(0, self.taken.flatten(), rows)])


def add_to_leaves(leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to ``grad`` as a backward would, hooks included."""
    if leaves:
        # The root of a leaf is its AccumulateGrad node, so hooks run that sum bfloat16 gradients in float32.
        run_backward(tuple(leaves), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


_open: dict[int, dict[int, tuple[Tensor, list[Filed]]]] = {}
"""Thread -> address of a weight -> the weight, and where its backward files. Ranks that take turns in one process have
a thread each, and are between the first and the last layer of a backward at the same time."""


@contextmanager
def filing(leaves: Iterable[Tensor]) -> Iterator[list[Filed]]:
    """Meanwhile deferring layers with these weights, which are here, file; yields where."""
    filed: list[Filed] = []
    _open[threading.get_ident()] = {leaf.data_ptr(): (leaf, filed) for leaf in leaves}
    try:
        yield filed
    finally:
        del _open[threading.get_ident()]


def _file(weight: Tensor, taken: Tensor, gradient: Tensor) -> None:
    assert _open, "a layer defers the gradient of its weight, and nobody keeps what it is made of"
    here = _open.get(threading.get_ident())
    if here is None:  # a thread of autograd's for a device; one stage runs backward at a time then
        (here,) = _open.values()
    leaf, filed = here[weight.data_ptr()]
    filed.append(Filed(leaf, taken.detach(), gradient))  # what autograd returns to a backward keeps its graph


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Sequence[Tensor]:
    """Linear layers of one input, which is kept once for all; their weights' gradients are for later.

    Args:
        x: [..., in].
        weights: [out, in] of each layer.
        biases: [out] of each layer, or none at all. Their gradients are not deferred: a sum each.

    Returns:
        [..., out] of each layer.
    """
    # A custom operator costs more per call than an autograd.Function (266 to 123 microseconds, docs/decisions/0023).
    if torch.compiler.is_compiling():
        return _linears_op(x, list(weights), list(biases))
    return _Linears.apply(x, len(weights), *weights, *biases)


@torch.compiler.disable  # its operator would have no output, and none is kept that has none
def lookup(indices: Tensor, weight: Tensor) -> Tensor:
    """Rows of an embedding, [..., H]; the gradient of its weight, [V, H], is for later."""
    return _Lookup.apply(indices, weight)


def _outputs(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    own = biases or [None] * len(weights)
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, own, strict=True)]


def _input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum of the layers' gradients for their common input."""
    # One tensor to which the other products are added, not one for each layer and their sum.
    total = gradients[0] @ weights[0]
    rows = total.view(-1, total.shape[-1])
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        rows.addmm_(gradient.flatten(0, -2), weight)
    return total


def _bias_gradients(gradients: Sequence[Tensor], count: int) -> list[Tensor]:
    return [gradient.flatten(0, -2).sum(0) for gradient in gradients[:count]]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, count, *parameters = args
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.num_biases = len(biases)
        return tuple(_outputs(x, weights, biases))

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, *weights = ctx.saved_tensors
        for weight, gradient in zip(weights, args, strict=True):
            _file(weight, x, gradient)
        own = _input_gradient(args, weights) if ctx.needs_input_grad[0] else None
        return own, None, *[None] * len(weights), *_bias_gradients(args, ctx.num_biases)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, indices, weight = args
        ctx.save_for_backward(indices, weight)
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        indices, weight = ctx.saved_tensors
        _file(weight, indices, args[0])
        return None, None


@torch.library.custom_op("pipeloom::linears", mutates_args=())
def _linears_op(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return _outputs(x, weights, biases)


@_linears_op.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:  # noqa: ARG001
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@torch.library.custom_op("pipeloom::linears_backward", mutates_args=())
def _linears_backward_op(gradients: list[Tensor], x: Tensor, weights: list[Tensor]) -> Tensor:
    # Copies, since the compiler plans memory as if an operator kept none of its inputs, and writes over them.
    kept = x.clone()
    for weight, gradient in zip(weights, gradients, strict=True):
        _file(weight, kept, gradient.clone())
    return _input_gradient(gradients, weights)


@_linears_backward_op.register_fake
def _(gradients: list[Tensor], x: Tensor, weights: list[Tensor]) -> Tensor:  # noqa: ARG001
    # Not empty_like: the operator returns a contiguous product, whatever the strides of x are.
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx: Any, inputs: tuple[Tensor, list[Tensor], list[Tensor]], output: list[Tensor]) -> None:  # noqa: ARG001
    x, weights, biases = inputs
    ctx.save_for_backward(x, *weights)
    ctx.num_biases = len(biases)


def _linears_op_backward(ctx: Any, gradients: list[Tensor]) -> Any:
    x, *weights = ctx.saved_tensors
    own = _linears_backward_op(gradients, x, weights)
    return own, [None] * len(weights), _bias_gradients(gradients, ctx.num_biases)


_linears_op.register_autograd(_linears_op_backward, setup_context=_keep)
