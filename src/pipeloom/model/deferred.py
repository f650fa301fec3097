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

Functions over several layers, such as ``linears``, make all their weight gradients by ``own_gradient``.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.graph_breaks import graph_break
from pipeloom.model.rotary import Rotary, turned

run_backward = torch.autograd.Variable._execution_engine.run_backward  # noqa: SLF001
"""The core of ``torch.autograd.backward``, without its checks of shapes, which take as long as a small stage's
backward. Both ends of every stage boundary have compared shapes before."""


Way = Literal["defer", "add", "return"]
"""What a backward does with a weight gradient: record the operands for its second half, add it to ``grad`` if there is
one, or return it to autograd."""


class OwnGradients:
    """A module that can compute its weight gradients by itself.

    Attributes:
        least_added: elements of a weight from which its product adds the gradient (decision 79). For a single layer
            autograd's operators take less host time, and smaller sums stay in the cache of a core.
        defers: whether gradients wait for the second half of the backward.
        adds: whether the product adds them to ``grad``, where there is one, in a backward that is whole.
    """

    least_added: ClassVar[int] = 2**18
    defers: bool = False
    adds: bool = False

    @property
    def way(self) -> Way:
        """What a function over the module does with weight gradients."""
        return "defer" if self.defers else "add" if self.adds else "return"

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
    """Let products add the gradients of trained weights, whose ``grad`` stays between backwards."""
    for part in module.modules():
        if isinstance(part, OwnGradients):
            own = part.parameters(recurse=False)
            part.adds = any(one.requires_grad and one.numel() >= part.least_added for one in own)


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
        made = self.compute(self.leaf.grad)
        if made is not None:
            add_to_leaves([self.leaf], [made])

    def compute(self, total: Tensor | None) -> Tensor | None:
        """Compute the weight's gradient; add it to a sum in place if there is one, else return it."""
        rows = self.gradient.flatten(0, -2)
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


def own_gradient(operands: Filed, way: Way) -> Tensor | None:
    """The gradient that a backward returns for a weight; ``None`` if it is deferred or added already."""
    if way != "defer":
        return operands.compute(operands.leaf.grad if way == "add" else None)
    _file(operands)
    return None


def _file(operands: Filed) -> None:
    assert _open, "a layer defers its weight gradient outside `filing`"
    here = _open.get(threading.get_ident())
    if here is None:  # autograd's thread of a CUDA device; only one stage runs a backward then
        (here,) = _open.values()
    leaf, filed = here[operands.leaf.data_ptr()]
    # Detached: a saved tensor keeps its graph alive.
    filed.append(replace(operands, leaf=leaf, taken=operands.taken.detach()))


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], *, way: Way, turn: Rotary | None = None
) -> Sequence[Tensor]:
    """Linear layers with a common input, which is kept once for all, and with weight gradients of their own.

    Args:
        x: [..., in]; [B, T, in] with ``turn``.
        weights: [out, in] of each layer.
        biases: [out] of each layer, or empty. Their gradients, which are cheap sums, are autograd's.
        way: of weight gradients. Compiled code only defers.
        turn: rotary positions of the heads of the first two outputs; ``None`` for none.

    Returns:
        [..., out] of each layer; with ``turn`` by heads, [B, T, heads, D].
    """
    # A call of a custom operator takes 266 us, of an autograd.Function 123 us (docs/decisions/0023).
    if torch.compiler.is_compiling():
        outputs = _linears_op(x, list(weights), list(biases))
        return outputs if turn is None else turn.turn_two(outputs)
    return _Linears.apply(x, way, *(turn or (None, None)), len(weights), *weights, *biases)


@graph_break  # its backward operator would have no output, and would be eliminated as dead code
def lookup(indices: Tensor, weight: Tensor, *, way: Way) -> Tensor:
    """Rows of an embedding, [..., H]; the gradient of its weight, [V, H], is deferred, or added row by row."""
    return _Lookup.apply(indices, weight, way)


def _outputs(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    own = biases or [None] * len(weights)
    return [functional.linear(x, weight, bias) for weight, bias in zip(weights, own, strict=True)]


def input_gradient(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Sum of several linear layers' gradients for their common input, [n, in]; from [n, out] and [out, in]."""
    # Accumulated in one tensor, without temporaries.
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.addmm_(gradient, weight)
    return total


def _rows(gradients: Iterable[Tensor], weights: Iterable[Tensor]) -> list[Tensor]:
    """Gradients of layers' outputs as matrices, [n, out]."""
    return [one.reshape(-1, len(weight)) for one, weight in zip(gradients, weights, strict=True)]


def _bias_gradients(gradients: Sequence[Tensor], count: int) -> list[Tensor]:
    return [gradient.sum(0) for gradient in gradients[:count]]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, ctx.way, cos, sin, count, *parameters = args
        weights, biases = parameters[:count], parameters[count:]
        # Frozen weights need the input for no gradient.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[5:]) else None, cos, sin, *weights)
        ctx.shape, ctx.num_biases = x.shape, len(biases)
        outputs = _outputs(x, weights, biases)
        if cos is None:
            return tuple(outputs)
        size = cos.shape[-1]
        return tuple(_turned([one.view(*one.shape[:-1], one.shape[-1] // size, size) for one in outputs], cos, sin))

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, cos, sin, *weights = ctx.saved_tensors
        # As matrices at once: each view takes the host 1 us.
        taken = None if x is None else x.flatten(0, -2)
        gradients = _rows(args if cos is None else _turned(args, cos, -sin), weights)
        made = [
            own_gradient(Filed(weight, taken, gradient), ctx.way) if needs and taken is not None else None
            for weight, gradient, needs in zip(weights, gradients, ctx.needs_input_grad[5:], strict=False)
        ]
        own = input_gradient(gradients, weights).view(ctx.shape) if ctx.needs_input_grad[0] else None
        return own, None, None, None, None, *made, *_bias_gradients(gradients, ctx.num_biases)


def _turned(heads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Of several tensors, [B, T, heads, D], the first two are turned by rotary angles."""
    return [*(turned(one, cos, sin) for one in heads[:2]), *heads[2:]]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, indices, weight, ctx.way = args
        ctx.save_for_backward(indices, weight)
        return functional.embedding(indices, weight)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        indices, weight = ctx.saved_tensors
        return None, own_gradient(Filed(weight, indices, args[0]), ctx.way), None


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
        _file(Filed(weight, kept, gradient.clone()))
    return input_gradient(_rows(gradients, weights), weights).view(x.shape)


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
    return own, [None] * len(weights), _bias_gradients(_rows(gradients, weights), ctx.num_biases)


_linears_op.register_autograd(_linears_op_backward, setup_context=_keep)
