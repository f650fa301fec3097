"""Feed-forward blocks: each token by itself."""

# ruff: noqa: N806 (upper-case letters in names are shapes)

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.parallel_layers import ColumnParallelLinear, RowParallelLinear, project
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
        return self.down(self.inner(x))

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
    """``activation(gate) * up``: saves its inputs alone, and computes the activated gate again in the backward.

    Autograd would save that, too: of a layer of a llama, 14 % of all bytes.
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
