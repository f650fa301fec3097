"""Norms of the residual stream, and of queries and keys."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.parallel_layers import Split
from pipeloom.model.tensor_parallel import TensorParallel
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS


class ZeroCenteredNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in single precision at least."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim."""
        return zero_centered_norm(x, self.weight, self.eps or 0.0)


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head of queries or keys; all heads share the weight."""

    def __init__(self, head_size: int, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(head_size, eps=config.known_norm_eps)
        self._parallel = parallel
        self._is_zero_centered = MODELS[config.family].zero_centered_norms

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim."""
        weight = self._parallel.shared(self.weight)
        if self._is_zero_centered:
            return zero_centered_norm(x, weight, self.eps or 0.0)
        return functional.rms_norm(x, self.normalized_shape, weight, self.eps)


class WidthNorm(Split, nn.RMSNorm):
    """RMSNorm of all queries, or all keys, of a token together; ``width`` counts the elements of all ranks."""

    def __init__(self, width: int, eps: float, parallel: TensorParallel) -> None:
        own = parallel.share(width)
        super().__init__(len(own), eps=eps)
        self.splits = {"weight": (0, width, own.start)}
        self._parallel, self._width = parallel, width

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim, of which a rank has its share."""
        if self._parallel.size == 1:
            return super().forward(x)
        # The same steps as PyTorch's, in single precision at least.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self._parallel.total(wide.square().sum(-1, keepdim=True)) / self._width
        return (wide * (squares + (self.eps or 0.0)).rsqrt() * self.weight).to(x.dtype)


def residual_norm(config: ModelConfig) -> nn.Module:
    """The family's norm of the residual stream."""
    family = MODELS[config.family]
    plain = nn.LayerNorm if family.norms_have_biases else nn.RMSNorm
    return (ZeroCenteredNorm if family.zero_centered_norms else plain)(config.hidden_size, eps=config.known_norm_eps)


def qk_norm(config: ModelConfig, width: int, parallel: TensorParallel) -> HeadNorm | WidthNorm | None:
    """The family's norm of queries or keys of a total width."""
    kind = MODELS[config.family].qk_norm
    if kind == "none":
        return None
    if kind == "head":
        return HeadNorm(config.known_head_size, config, parallel)
    return WidthNorm(width, config.known_norm_eps, parallel)


def zero_centered_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the last dim times 1 + weight, which bfloat16 could not hold: it has eight significant bits."""
    return _ZeroCenteredNorm.apply(x, weight, eps)


class _ZeroCenteredNorm(torch.autograd.Function):
    """Saves its input and one number for each token, as a fused norm does."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, weight, eps = args
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, factor)
        return (wide * factor * (1 + weight.to(wide.dtype))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, weight, factor = ctx.saved_tensors
        normed, gradient = x.to(factor.dtype) * factor, args[0].to(factor.dtype)
        weight_gradient = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype)
        gradient = gradient * (1 + weight.to(factor.dtype))
        gradient = factor * (gradient - normed * (gradient * normed).mean(-1, keepdim=True))
        return gradient.to(x.dtype), weight_gradient, None
