"""Causal self-attention: its matrices, norms of heads, and the exchange with caches.

Letters of shapes are those of ``model.transformer``; S is the number of tokens up to the end of a slice.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from pipeloom.model.context_parallel import WHOLE_SEQUENCES, ring_attention
from pipeloom.model.core_attention import core_attention
from pipeloom.model.key_values import EarlierTokens
from pipeloom.model.norms import HeadNorm, WidthNorm, qk_norm
from pipeloom.model.parallel_layers import ColumnParallelLinear, RowParallelLinear, project
from pipeloom.model.rotary import Rotary
from pipeloom.model.run_part import run_part
from pipeloom.model.tensor_parallel import TensorParallel
from pipeloom.model.visible_keys import Documents, VisibleKeys
from pipeloom.workload.model import ModelConfig
from pipeloom.workload.model_families import MODELS


class Attention(nn.Module):
    """Causal self-attention; N / K query heads share each key and value head.

    Attributes:
        window: keys that a query sees at most, its own included; ``None`` for all earlier ones.
        context: ranks that share the tokens of sequences.
        recomputes_core: whether the backward computes scores and weighted sums again.
    """

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        assert config.num_kv_heads is not None, "the model configuration is not resolved"
        hidden, family = config.hidden_size, MODELS[config.family]
        bias = family.qkv_biases
        self._parallel = parallel
        self.head_size = config.known_head_size
        self.window: int | None = None
        self.recomputes_core = False
        self.context = WHOLE_SEQUENCES
        self._scale, self._softcap = config.attention_scale, config.known_attn_softcap
        query_width, kv_width = config.num_heads * self.head_size, config.num_kv_heads * self.head_size
        self.query = ColumnParallelLinear(hidden, query_width, bias=bias, parallel=parallel)
        self.key = ColumnParallelLinear(hidden, kv_width, bias=bias, parallel=parallel)
        self.value = ColumnParallelLinear(hidden, kv_width, bias=bias, parallel=parallel)
        self.query_norm, self.key_norm = (qk_norm(config, width, parallel) for width in (query_width, kv_width))
        self.output = RowParallelLinear(query_width, hidden, bias=family.output_bias, parallel=parallel)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        earlier: EarlierTokens | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: normed residual stream.
            rotary: angles of the T positions; None for learned positions.
            earlier: cached keys and values of the tokens before, to which those of x are added; None for whole
                sequences.
            documents: the documents of the tokens; None for one in each sequence.

        Returns:
            The term to add to the residual stream.
        """
        # Views: attention's output then has their order in memory, [B, T, N, D], which the projection takes as it is.
        query_BNTD, key_BKTD, value_BKTD = (
            heads.transpose(1, 2) for heads in self._projected(self._parallel.enter(x), rotary)
        )
        if earlier is not None:
            key_BKTD, value_BKTD = earlier.extend(key_BKTD, value_BKTD)
        if self.context.is_on:
            core = partial(ring_attention, context=self.context, window=self.window, documents=documents)
        else:
            begin = 0 if earlier is None else earlier.begin
            core = partial(core_attention, visible=VisibleKeys(begin, self.window, documents))
        mixed_BNTD = run_part(
            core,
            query_BNTD,
            key_BKTD,
            value_BKTD,
            recomputes=self.recomputes_core,
            scale=self._scale,
            softcap=self._softcap,
        )
        return self.output(mixed_BNTD.transpose(1, 2).flatten(2))

    def _projected(self, x_BTH: Tensor, rotary: Rotary | None) -> Sequence[Tensor]:
        """Queries, keys and values of all tokens, [B, T, heads, D]."""
        layers = self.query, self.key, self.value
        # Norms precede the turn, which otherwise is part of one function with the products.
        if rotary is not None and self.query_norm is None:
            return project(x_BTH, *layers, turn=rotary)
        norms = self.query_norm, self.key_norm, None
        query_BTND, key_BTKD, value_BTKD = map(self._heads, project(x_BTH, *layers), norms)
        if rotary is not None:
            query_BTND, key_BTKD = rotary.turn(query_BTND), rotary.turn(key_BTKD)
        return query_BTND, key_BTKD, value_BTKD

    def _heads(self, x: Tensor, norm: HeadNorm | WidthNorm | None) -> Tensor:
        """[B, T, heads x D] to [B, T, heads, D], normed."""
        if isinstance(norm, WidthNorm):
            x = norm(x)
        x_BTND = x.unflatten(-1, (-1, self.head_size))
        return norm(x_BTND) if isinstance(norm, HeadNorm) else x_BTND
