"""Feed-forward blocks: each token by itself."""

# ruff: noqa: N806 (upper-case letters in names are shapes)

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.deferred import Filed, input_gradient, own_gradient
from pipeloom.model.parallel_layers import ColumnParallelLinear, RowParallelLinear, are_bare, project
from pipeloom.model.tensor_parallel import TensorParallel
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS


class GatedFeedForward(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``, without biases; Gemma has the tanh form of GELU instead of SiLU.

    ``ffn_size`` is F of all ranks.
    """

    def __init__(self, hidden_size: int, ffn_size: int, parallel: TensorParallel, gate: str = "silu") -> None:
        super().__init__()
        self._parallel = parallel
        self._gate = gate
        self.gate = ColumnParallelLinear(hidden_size, ffn_size, bias=False, parallel=parallel)
        self.up = ColumnParallelLinear(hidden_size, ffn_size, bias=False, parallel=parallel)
        self.down = RowParallelLinear(ffn_size, hidden_size, bias=False, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself; returns what is added to the residual stream."""
        if not are_bare(self.gate, self.up, self.down):
            return self.down(self.inner(x))
        weights = self.gate.weight, self.up.weight, self.down.weight
        return self._parallel.leave(_Block.apply(self._parallel.enter(x), self._gate, self.gate.way, *weights))

    def inner(self, x: Tensor) -> Tensor:
        """The input of ``down``."""
        x_BTH = self._parallel.enter(x)
        gate_BTF, up_BTF = project(x_BTH, self.gate, self.up)
        return _Gated.apply(gate_BTF, up_BTF, self._gate)


_ACTIVATIONS = {"silu": functional.silu, "gelu": partial(functional.gelu, approximate="tanh")}
_GRADIENTS = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
"""(gradient of the output, input) -> gradient of the input."""


class _Gated(torch.autograd.Function):
    """``activation(gate) * up`` where ``_Block`` does not apply: saves its inputs alone.

    The backward computes the activated gate again. Autograd would save that, too: of a layer of a llama, 14 % of all
    bytes.
    """

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, gate, up, name = args
        ctx.name = name
        # The gradient of `up` takes no `up`.
        ctx.save_for_backward(gate, up if ctx.needs_input_grad[0] else None)
        return _ACTIVATIONS[name](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        (gradient,), (gate, up) = args, ctx.saved_tensors
        of_gate, of_up, _ = ctx.needs_input_grad
        return (
            _GRADIENTS[ctx.name](gradient * up, gate) if of_gate else None,
            _ACTIVATIONS[ctx.name](gate).mul_(gradient) if of_up else None,
            None,
        )


class _Block(torch.autograd.Function):
    """``down(activation(gate(x)) * up(x))``: saves the inputs of the matrices, gate and up, as ``_Gated`` does."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, ctx.name, ctx.way, *weights = args
        # As matrices at once: each view takes the host 1 us.
        rows = x.flatten(0, -2)
        gate, up = (functional.linear(rows, weight) for weight in weights[:2])
        inner = _ACTIVATIONS[ctx.name](gate).mul_(up)
        # Frozen weights need their input for no gradient.
        needs = ctx.needs_input_grad
        ctx.save_for_backward(x if any(needs[3:5]) else None, gate, up, inner if needs[5] else None, *weights)
        ctx.shape = x.shape
        return functional.linear(inner, weights[2]).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, gate, up, inner, *weights = ctx.saved_tensors
        gradient, taken = args[0].flatten(0, -2), None if x is None else x.flatten(0, -2)
        needs_x, _, _, of_gate, of_up, of_down = ctx.needs_input_grad

        def own(place: int, taken: Tensor | None, of_output: Tensor) -> Tensor | None:
            assert taken is not None
            return own_gradient(Filed(weights[place], taken, of_output), ctx.way)

        made_down = own(2, inner, gradient) if of_down else None
        # In place: a fresh tensor of this size takes longer than the operator.
        of_inner = gradient @ weights[2]
        up_gradient = _ACTIVATIONS[ctx.name](gate).mul_(of_inner)
        gate_gradient = _GRADIENTS[ctx.name](of_inner.mul_(up), gate)
        made_gate = own(0, taken, gate_gradient) if of_gate else None
        made_up = own(1, taken, up_gradient) if of_up else None
        whole = input_gradient((gate_gradient, up_gradient), weights[:2]).view(ctx.shape) if needs_x else None
        return whole, None, None, made_gate, made_up, made_down


class GeluFeedForward(nn.Module):
    """The gpt2 family's feed-forward layer: ``down(gelu(up(x)))`` with biases and the tanh form of GELU.

    ``ffn_size`` is F of all ranks.
    """

    def __init__(self, hidden_size: int, ffn_size: int, parallel: TensorParallel) -> None:
        super().__init__()
        self._parallel = parallel
        self.up = ColumnParallelLinear(hidden_size, ffn_size, bias=True, parallel=parallel)
        self.down = RowParallelLinear(ffn_size, hidden_size, bias=True, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself; returns what is added to the residual stream."""
        # The tanh form is what GPT-2 was trained with ("gelu_new" in Hugging Face's files).
        inner_BTF = functional.gelu(self.up(self._parallel.enter(x)), approximate="tanh")
        return self.down(inner_BTF)


def feed_forward(config: ModelConfig, ffn_size: int, parallel: TensorParallel) -> GatedFeedForward | GeluFeedForward:
    """The family's feed-forward block of an inner width."""
    family, sizes = MODELS[config.family], (config.hidden_size, ffn_size, parallel)
    return GatedFeedForward(*sizes, family.gate) if family.gates > 1 else GeluFeedForward(*sizes)
