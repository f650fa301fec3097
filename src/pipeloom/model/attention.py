"""Causal self-attention: which keys a query sees, norms of heads, and the exchange with caches.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N806 (upper-case letters in names are shapes)

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.key_values import EarlierTokens
from pipeloom.model.parallel_layers import ColumnParallelLinear, RowParallelLinear, Split, project
from pipeloom.model.rotary import Rotary
from pipeloom.model.run_part import run_part
from pipeloom.model.tensor_parallel import TensorParallel
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head of queries or keys; all heads share the weight."""

    def __init__(self, head_size: int, eps: float, parallel: TensorParallel) -> None:
        super().__init__(head_size, eps=eps)
        self._parallel = parallel

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dim."""
        weight = self._parallel.shared(self.weight)
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


def _qk_norm(config: ModelConfig, width: int, parallel: TensorParallel) -> HeadNorm | WidthNorm | None:
    """The family's norm of queries or keys of a total width."""
    kind, eps = MODELS[config.family].qk_norm, config.known_norm_eps
    if kind == "none":
        return None
    return HeadNorm(config.known_head_size, eps, parallel) if kind == "head" else WidthNorm(width, eps, parallel)


class Attention(nn.Module):
    """Causal self-attention; N / K query heads share each key and value head."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        assert config.num_kv_heads is not None, "the model configuration is not resolved"
        hidden, family = config.hidden_size, MODELS[config.family]
        bias = family.qkv_biases
        self._parallel = parallel
        self.head_size = config.known_head_size
        self.is_grouped = config.num_kv_heads != config.num_heads
        self.recomputes_core = False
        query_width, kv_width = config.num_heads * self.head_size, config.num_kv_heads * self.head_size
        self.query = ColumnParallelLinear(hidden, query_width, bias=bias, parallel=parallel)
        self.key = ColumnParallelLinear(hidden, kv_width, bias=bias, parallel=parallel)
        self.value = ColumnParallelLinear(hidden, kv_width, bias=bias, parallel=parallel)
        self.query_norm, self.key_norm = (_qk_norm(config, width, parallel) for width in (query_width, kv_width))
        self.output = RowParallelLinear(query_width, hidden, bias=family.output_bias, parallel=parallel)

    def forward(
        self, x: Tensor, rotary: Rotary | None, earlier: EarlierTokens | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Attend.

        Args:
            x: normed residual stream.
            rotary: angles of the T positions; None for learned positions.
            earlier: cached keys and values of the tokens before, to which those of x are added; None for whole
                sequences.
            mask: of the keys that each query sees (``Sight.mask``); None for all tokens up to the query.

        Returns:
            The term to add to the residual stream.
        """
        x_BTH = self._parallel.enter(x)
        query_BTQ, key_BTG, value_BTG = project(x_BTH, self.query, self.key, self.value)
        query_BNTD, key_BKTD = self._heads(query_BTQ, self.query_norm), self._heads(key_BTG, self.key_norm)
        value_BKTD = self._heads(value_BTG)
        if rotary is not None:
            query_BNTD, key_BKTD = rotary.turn(query_BNTD), rotary.turn(key_BKTD)
        if earlier is not None:
            key_BKTD, value_BKTD = earlier.extend(key_BKTD, value_BKTD)
            # is_causal aligns the mask with the upper left corner, which is right only for queries from position 0 on.
            if mask is None and earlier.begin:
                mask = causal_mask(query_BNTD.shape[2], key_BKTD.shape[2], x.device)
        mixed_BNTD = run_part(
            functional.scaled_dot_product_attention,
            query_BNTD,
            key_BKTD,
            value_BKTD,
            recomputes=self.recomputes_core,
            attn_mask=mask,
            is_causal=mask is None,
            # Only if needed: with it PyTorch has fewer fused kernels to choose from.
            enable_gqa=self.is_grouped,
        )
        # A view: attention's output is [B, T, N, D] in memory, as its inputs are (see Rotary.turn).
        return self.output(mixed_BNTD.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, norm: HeadNorm | WidthNorm | None = None) -> Tensor:
        """[B, T, heads x D] to [B, heads, T, D], normed."""
        if isinstance(norm, WidthNorm):
            x = norm(x)
        x_BTND = x.unflatten(-1, (-1, self.head_size))
        return (norm(x_BTND) if isinstance(norm, HeadNorm) else x_BTND).transpose(1, 2)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Causal mask of the last queries of a sequence, aligned with its end, [queries, keys].

    A bool tensor on CPUs; on GPUs a bias object, with which PyTorch selects fused kernels.
    """
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        # With an explicit mask, scaled_dot_product_attention cannot use FlashAttention.
        return causal_lower_right(num_queries, num_keys)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return mask.tril(num_keys - num_queries)
