"""Weight gradients that layers compute by themselves: deferred ones, and those that the product adds to the sum.

Deferred weight gradients are for split backwards (arXiv 2401.10241, section 2).
The first half of a split backward computes the gradient of the stage input, for which another stage waits; the second
half computes the weight gradients, whenever the rank has time. In the first half, layers with ``defers`` return only
the gradient of their input, and record their input and output gradient (``filing``). In the second half ``Filed.add``
computes the weight gradients from these. Autograd keeps nothing in between.

In eager mode this is an ``autograd.Function``. ``torch.compile`` cannot trace its backward, which has a side effect, so
compiled code calls opaque custom operators instead, without a graph break. Compiled code reuses the memory of an
operator's inputs, so the operators record copies.

In a whole backward autograd makes each weight gradient in memory of its own and adds it to ``grad``. Layers with
``adds`` add it in the matrix product, as Megatron's fused accumulation does.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.graph_breaks import graph_break

run_backward = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001
"""The core of ``torch.autograd.backward``, without its checks of shapes, which take as long as a small stage's
backward. Both ends of every stage boundary have compared shapes before."""


_LEAST_ADDED = 2**18
"""Elements of a weight from which its product adds the gradient (decision 79): autograd's own operators take less host
time, and smaller sums stay in the cache of a core."""


class OwnGradients:
    """A module that can compute its weight gradients by itself.

    Attributes:
        defers: whether they wait for the second half of the backward.
        adds: whether the product adds them to ``grad``, where there is one, in a backward that is whole.
    """

    defers: bool = False
    adds: bool = False

    @property
    def has_own(self) -> bool:
        """Whether the module, rather than autograd, computes weight gradients of the present forward."""
        return (self.defers or (self.adds and not torch.compiler.is_compiling())) and torch.is_grad_enabled()


def _own_parts(module: nn.Module) -> list[OwnGradients]:
    """The parts of a module that can compute their weight gradients."""
    return [part for part in module.modules() if isinstance(part, OwnGradients)]


def defer(module: nn.Module) -> None:
    """Defer the weight gradients of all parts of a module that support it."""
    for part in _own_parts(module):
        part.defers = True


def add_in_products(module: nn.Module) -> None:
    """Let products add the gradients of large trained weights, whose ``grad`` stays between backwards."""
    for part in module.modules():
        own = part.parameters(recurse=False)
        if isinstance(part, OwnGradients) and any(one.requires_grad and one.numel() >= _LEAST_ADDED for one in own):
            part.adds = True


@contextmanager
def gradients_by_autograd(module: nn.Module) -> Iterator[None]:
    """Context in which autograd computes all gradients of a module and returns them; none is deferred or added."""
    parts = [(part, part.defers, part.adds) for part in _own_parts(module)]
    for part, _, _ in parts:
        part.defers = part.adds = False
    try:
        yield
    finally:
        for part, defers, adds in parts:
            part.defers, part.adds = defers, adds


def leaves_of(module: nn.Module) -> list[Tensor]:
    """The tensors that get gradients in a module's backward: its parameters, and a borrowed tied matrix.

    The latter belongs to the first stage, so it is no parameter of the module.
    """
    borrowed = getattr(module, "borrowed", None)
    return [*module.parameters(), *([] if borrowed is None else [borrowed])]


@dataclass(frozen=True)
class Filed:
    """Operands of one deferred weight gradient.

    Attributes:
        leaf: the weight; its values are no longer needed.
        taken: input of a linear layer, [..., in], or int64 indices of an embedding, [...].
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
        """The tensors kept for this, without indices, which are part of the batch."""
        return (self.gradient,) if self.is_lookup else (self.taken, self.gradient)

    def add(self) -> None:
        """Compute the weight's gradient; add it to ``grad`` in place if there is one, else through autograd's hooks."""
        made = self.compute()
        if made is not None:
            add_to_leaves([self.leaf], [made])

    def compute(self) -> Tensor | None:
        """Compute the weight's gradient; add it to ``grad`` in place if there is one, else return it."""
        rows, total = self.gradient.flatten(0, -2), self.leaf.grad
        if self.is_lookup:
            found = rows.new_zeros(self.leaf.shape) if total is None else total
            # A token may occur several times in a batch; `found[taken] += rows` would add only one of its rows.
            found.index_add_(0, self.taken.flatten(), rows)
        elif total is None:
            found = rows.t() @ self.taken.flatten(0, -2)
        else:
            # addmm adds in place, without a temporary tensor of the weight's size.
            found = total.addmm_(rows.t(), self.taken.flatten(0, -2))
        return found if total is None else None


def add_to_leaves(leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add gradients to ``grad`` as a backward would, with hooks."""
    if leaves:
        # The backward of a leaf is its AccumulateGrad node, with the hooks that sum bfloat16 gradients in float32.
        run_backward(tuple(leaves), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


_open: dict[int, dict[int, tuple[Tensor, list[Filed]]]] = {}
"""By thread and address of a weight: the weight, and the list that its backward appends to. By thread, because the
ranks of in-process tests have a thread each and run backwards at the same time."""


@contextmanager
def filing(leaves: Iterable[Tensor]) -> Iterator[list[Filed]]:
    """Collect the deferred gradients of these weights from backwards inside the context; yields the list."""
    filed: list[Filed] = []
    _open[threading.get_ident()] = {leaf.data_ptr(): (leaf, filed) for leaf in leaves}
    try:
        yield filed
    finally:
        del _open[threading.get_ident()]


def _own_gradient(weight: Tensor, taken: Tensor, gradient: Tensor, defers: bool) -> Tensor | None:
    """The gradient that a layer's backward returns for its weight; ``None`` if it is deferred or added already."""
    if not defers:
        return Filed(weight, taken, gradient).compute()
    _file(weight, taken, gradient)
    return None


def _file(weight: Tensor, taken: Tensor, gradient: Tensor) -> None:
    # Detached: a saved tensor keeps its graph alive.
    file_deferred(weight, lambda leaf: Filed(leaf, taken.detach(), gradient))


def file_deferred(weight: Tensor, make: Callable[[Tensor], Filed]) -> None:
    """Record a deferred gradient, in the backward of a layer that defers.

    Args:
        weight: of which it is the gradient.
        make: leaf -> what computes the gradient.
    """
    assert _open, "a layer defers its weight gradient outside `filing`"
    here = _open.get(threading.get_ident())
    if here is None:  # autograd's thread of a CUDA device; only one stage runs a backward then
        (here,) = _open.values()
    leaf, filed = here[weight.data_ptr()]
    filed.append(make(leaf))


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, defers: bool) -> Sequence[Tensor]:
    """Linear layers with a common input, which is kept once for all, and with weight gradients of their own.

    Args:
        x: [..., in].
        weights: [out, in] of each layer.
        biases: [out] of each layer, or empty. Their gradients, which are cheap sums, are autograd's.
        defers: whether weight gradients are deferred; otherwise products add them. Compiled code only defers.

    Returns:
        [..., out] of each layer.
    """
    # A call of a custom operator takes 266 us, of an autograd.Function 123 us (docs/decisions/0023).
    if torch.compiler.is_compiling():
        return _linears_op(x, list(weights), list(biases))
    return _Linears.apply(x, defers, len(weights), *weights, *biases)


@graph_break  # its backward operator would have no output, and would be eliminated as dead code
def lookup(indices: Tensor, weight: Tensor, *, defers: bool) -> Tensor:
    """Rows of an embedding, [..., H]; the gradient of its weight, [V, H], is deferred, or added row by row."""
    return _Lookup.apply(indices, weight, defers)


def _outputs(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    own = biases or [None] * len(weights)
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, own, strict=True)]


def _input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum of the layers' gradients for their common input."""
    # Accumulated in one tensor, without temporaries.
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
        ctx, x, defers, count, *parameters = args
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.defers, ctx.num_biases = defers, len(biases)
        return tuple(_outputs(x, weights, biases))

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, *weights = ctx.saved_tensors
        made = [_own_gradient(one, x, given, ctx.defers) for one, given in zip(weights, args, strict=True)]
        own = _input_gradient(args, weights) if ctx.needs_input_grad[0] else None
        return own, None, None, *made, *_bias_gradients(args, ctx.num_biases)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, indices, weight, defers = args
        ctx.save_for_backward(indices, weight)
        ctx.defers = defers
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        indices, weight = ctx.saved_tensors
        return None, _own_gradient(weight, indices, args[0], ctx.defers), None


@torch.library.custom_op("pipeloom::linears", mutates_args=())
def _linears_op(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return _outputs(x, weights, biases)


@_linears_op.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:  # noqa: ARG001
    return [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]


@torch.library.custom_op("pipeloom::linears_backward", mutates_args=())
def _linears_backward_op(gradients: list[Tensor], x: Tensor, weights: list[Tensor]) -> Tensor:
    # Copies: the compiler assumes that an operator keeps none of its inputs, and overwrites their memory.
    kept = x.clone()
    for weight, gradient in zip(weights, gradients, strict=True):
        _file(weight, kept, gradient.clone())
    return _input_gradient(gradients, weights)


@_linears_backward_op.register_fake
def _(gradients: list[Tensor], x: Tensor, weights: list[Tensor]) -> Tensor:  # noqa: ARG001
    # Not empty_like: the operator's result is contiguous whatever the strides of x.
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
