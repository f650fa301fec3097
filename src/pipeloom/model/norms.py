"""Norms of the residual stream, and of queries and keys."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.parallel_layers import Split
from pipeloom.model.tensor_parallel import TensorParallel
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS


class RmsNorm(nn.RMSNorm):
    """RMSNorm of the last dim, in single precision at least; ``is_zero_centered``: multiplies by 1 + weight."""

    def __init__(self, size: int, eps: float, *, is_zero_centered: bool = False) -> None:
        super().__init__(size, eps=eps)
        self._eps, self._is_zero_centered = eps, is_zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim."""
        return self.normed(x, self.weight)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm the last dim, with a weight."""
        return rms_norm(x, weight, self._eps, is_zero_centered=self._is_zero_centered)


class HeadNorm(RmsNorm):
    """RMSNorm of each head of queries or keys; all heads share the weight."""

    def __init__(self, head_size: int, config: ModelConfig, parallel: TensorParallel) -> None:
        zero_centered = MODELS[config.family].zero_centered_norms
        super().__init__(head_size, config.known_norm_eps, is_zero_centered=zero_centered)
        self._parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim."""
        return self.normed(x, self._parallel.shared(self.weight))


class WidthNorm(Split, RmsNorm):
    """RMSNorm of all queries, or all keys, of a token together; ``width`` counts the elements of all ranks."""

    def __init__(self, width: int, eps: float, parallel: TensorParallel) -> None:
        own = parallel.share(width)
        super().__init__(len(own), eps)
        self.splits = {"weight": (0, width, own.start)}
        self._parallel, self._width = parallel, width

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim, of which a rank has its share."""
        if self._parallel.size == 1:
            return super().forward(x)
        # An exchange between the steps: they cannot be one function.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = self._parallel.total(wide.square().sum(-1, keepdim=True)) / self._width
        return (wide * (squares + self._eps).rsqrt() * self.weight).to(x.dtype)


def residual_norm(config: ModelConfig) -> nn.Module:
    """The family's norm of the residual stream."""
    family = MODELS[config.family]
    if family.norms_have_biases:
        return nn.LayerNorm(config.hidden_size, eps=config.known_norm_eps)
    return RmsNorm(config.hidden_size, config.known_norm_eps, is_zero_centered=family.zero_centered_norms)


def qk_norm(config: ModelConfig, width: int, parallel: TensorParallel) -> HeadNorm | WidthNorm | None:
    """The family's norm of queries or keys of a total width."""
    kind = MODELS[config.family].qk_norm
    if kind == "none":
        return None
    if kind == "head":
        return HeadNorm(config.known_head_size, config, parallel)
    return WidthNorm(width, config.known_norm_eps, parallel)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_zero_centered: bool = False) -> Tensor:
    """RMSNorm of the last dim (arXiv 1910.07467) times ``weight``, in single precision at least.

    ``is_zero_centered``: times 1 + weight, which bfloat16 could not hold: it has eight significant bits.
    """
    # On GPUs PyTorch has this norm as one kernel, on CPUs as several, which keep two more tensors of the size of x.
    if x.is_cuda and not is_zero_centered:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps, is_zero_centered)


class _RmsNorm(torch.autograd.Function):
    """Saves its input and one number for each token, as a fused norm does."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, weight, eps, is_zero_centered = args
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        factor = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        ctx.is_zero_centered = is_zero_centered
        return (wide * factor).mul_(_factors(weight, wide, is_zero_centered)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        # With f = (mean of x^2 + eps)^-1/2 and g = gradient x factors: g f - x f^3 mean(g x). In place, since memory
        # limits these operators on CPUs: with a fresh tensor for each they took up to 1.6 times as long.
        x, weight, factor = ctx.saved_tensors
        wide, gradient = x.to(factor.dtype), args[0].to(factor.dtype)
        factors, product = _factors(weight, wide, ctx.is_zero_centered), gradient * wide
        mean = (product @ factors).unsqueeze(-1).div_(x.shape[-1])
        wanted = (gradient * factors).mul_(factor).addcmul_(wide, factor.pow(3).mul_(mean), value=-1)
        own = product.flatten(0, -2).t().mv(factor.flatten()) if ctx.needs_input_grad[1] else None
        return wanted.to(x.dtype), None if own is None else own.to(weight.dtype), None, None


def _factors(weight: Tensor, wide: Tensor, is_zero_centered: bool) -> Tensor:
    return weight.to(wide.dtype) + 1 if is_zero_centered else weight.to(wide.dtype)
