"""The core of attention: scores, softmax and weighted sum, for the keys that each query sees.

Kernels:

- All earlier keys and plain scores: ``scaled_dot_product_attention``, with every fused kernel of PyTorch; on CPUs also
  with borders of documents, for which it takes a mask and computes all scores.
- With a window, a soft cap or borders, on GPUs: ``flex_attention``, which skips blocks of keys that no query of a block
  sees. FlashAttention and cuDNN of ``scaled_dot_product_attention`` take none of them, and its memory-efficient kernel
  takes a window or borders only as a mask, for which it computes all scores.
- With a window or a soft cap, on CPUs and for float64: ``_Blocks``, products of blocks of queries with the keys that
  they see. It keeps what a fused kernel keeps: queries, keys, values, output, and one number per row of scores.

Letters of shapes are those of ``model.transformer``; S is the number of keys, g the query heads of a key head, c the
queries of a block, s the keys that they see.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pipeloom.model.graph_breaks import graph_break
from pipeloom.model.visible_keys import VisibleKeys

BLOCK = 128
"""Queries of a block, as in FlashAttention: small against usual windows, so few scores of a block are masked."""


class Scores(NamedTuple):
    """How scores follow from queries and keys.

    Attributes:
        scale: factor of their products.
        softcap: c of ``c tanh(score / c)``, which bounds scores (arXiv 2408.00118, section 2); 0 for none.
    """

    scale: float
    softcap: float

    def of(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores, [..., queries, keys], and their derivative by scaled products where it is not 1."""
        scaled = (query * self.scale) @ key.mT
        if not self.softcap:
            return scaled, None
        bounded = (scaled / self.softcap).tanh()
        return bounded * self.softcap, 1 - bounded.square()


def core_attention(
    query_BNTD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    *,
    visible: VisibleKeys,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention without its matrices.

    Args:
        query_BNTD: queries of the last T of S tokens.
        key_BKSD: keys; N / K query heads share one.
        value_BKSD: values.
        visible: the keys that each query sees.
        scale: factor of the scores; ``None`` for one over the root of the head's size.
        softcap: bound of the scores (``Scores``); 0 for none.

    Returns:
        Sums of values, [B, N, T, D].
    """
    visible = visible.within(key_BKSD.shape[2])
    is_flexible = query_BNTD.is_cuda and query_BNTD.dtype != torch.float64
    if visible.window is None and not softcap and not (is_flexible and visible.documents is not None):
        return _fused(query_BNTD, key_BKSD, value_BKSD, visible, scale)
    scores = Scores(query_BNTD.shape[-1] ** -0.5 if scale is None else scale, softcap)
    if is_flexible:
        return flexible(query_BNTD, key_BKSD, value_BKSD, visible, scores)
    return _in_blocks(query_BNTD, key_BKSD, value_BKSD, visible, scores)


def _fused(query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scale: float | None) -> Tensor:
    # is_causal aligns the mask with the upper left corner, which is right only for queries from position 0 on.
    # A single query sees all keys.
    has_mask = visible.begin > 0 and query.shape[2] > 1
    mask = _causal_mask(query.shape[2], key.shape[2], query.device) if has_mask else None
    if visible.documents is not None:
        mask = visible.documents.added(visible, query)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and visible.begin == 0,
        scale=scale,
        # Only if needed: with it PyTorch has fewer fused kernels to choose from.
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Causal mask of the last queries of a sequence, aligned with its end, [queries, keys].

    A bool tensor on CPUs; on GPUs a bias object, with which PyTorch selects fused kernels.
    """
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right

        # With an explicit mask, scaled_dot_product_attention cannot use FlashAttention.
        return causal_lower_right(num_queries, num_keys)
    return VisibleKeys(num_keys - num_queries).mask(range(num_queries), range(num_keys), device)


@graph_break  # a graph break: the kernel is compiled by itself, and its mask is made once
def flexible(query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scores: Scores) -> Tensor:
    """``core_attention`` as one generated kernel; on other devices than GPUs an uncompiled reference."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return scores.softcap * torch.tanh(score / scores.softcap)

    return (_compiled_flex() if query.is_cuda else flex_attention)(
        query,
        key,
        value,
        score_mod=capped if scores.softcap else None,
        block_mask=_blocks_seen(visible, query, key),
        scale=scores.scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _blocks_seen(visible: VisibleKeys, query: Tensor, key: Tensor) -> Any:
    if visible.documents is None:
        return _block_mask(visible, query.shape[2], key.shape[2], str(query.device))
    return visible.documents.blocks(visible, query, key)


# All layers and micro-batches have the masks of a few slices and windows.
@lru_cache(maxsize=64)
def _block_mask(visible: VisibleKeys, num_queries: int, num_keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(_sequence: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible.sees(query + visible.begin, key)

    return create_block_mask(sees, None, None, num_queries, num_keys, device=device)


@graph_break  # a graph break: unrolled, the blocks of a long sequence would be a large graph
def _in_blocks(query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scores: Scores) -> Tensor:
    return _Blocks.apply(query, key, value, visible, scores)


class _Blocks(torch.autograd.Function):
    """Products of blocks of queries with the keys that they see, in single precision at least.

    The backward computes the scores again from their log-sum (FlashAttention-2, arXiv 2307.08691, section 2.3.2).
    """

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, query_BNTD, key_BKSD, value_BKSD, visible, scores = args
        # [B, T, N, D] in memory: attention's projection then takes a view.
        sums_BNTD = torch.empty_like(query_BNTD.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        logs_BNT = query_BNTD.new_empty(query_BNTD.shape[:3], dtype=wide(query_BNTD))
        for block in blocks_of(query_BNTD, key_BKSD, visible):
            scores_BKGs = block.scores(query_BNTD, key_BKSD, scores)[0]
            log_BKG = scores_BKGs.logsumexp(-1)
            shares_BKGs = (scores_BKGs - log_BKG.unsqueeze(-1)).exp()
            block.of_queries(sums_BNTD).copy_(block.ungrouped(shares_BKGs @ block.of_keys(value_BKSD)))
            block.of_queries(logs_BNT).copy_(block.ungrouped(log_BKG.unsqueeze(-1)).squeeze(-1))
        ctx.save_for_backward(query_BNTD, key_BKSD, value_BKSD, sums_BNTD, logs_BNT)
        ctx.visible, ctx.scores = visible, scores
        return sums_BNTD

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        query_BNTD, key_BKSD, value_BKSD, sums_BNTD, logs_BNT = ctx.saved_tensors
        # Those of keys and values are summed over the blocks, so wide.
        query_gradient = torch.zeros_like(query_BNTD)
        key_gradient, value_gradient = (torch.zeros_like(one, dtype=wide(one)) for one in (key_BKSD, value_BKSD))
        dots_BNT = (args[0].to(wide(sums_BNTD)) * sums_BNTD).sum(-1)
        rows = Rows(query_BNTD, args[0], logs_BNT, dots_BNT)
        for block in blocks_of(query_BNTD, key_BKSD, ctx.visible):
            block.add_gradients(
                ctx.scores, rows, (key_BKSD, value_BKSD), (query_gradient, key_gradient, value_gradient)
            )
        return query_gradient, key_gradient.to(key_BKSD.dtype), value_gradient.to(value_BKSD.dtype), None, None


@dataclass(frozen=True)
class Block:
    """Some queries and the keys that they see.

    Query heads that share a key head are joined with the queries, G = g c, so that keys are not copied for each.

    Attributes:
        queries, keys: of the block.
        num_groups: g.
        mask: whether a query sees a key, [G, s], or [B, 1, G, s] with documents.
    """

    queries: range
    keys: range
    num_groups: int
    mask: Tensor

    def of_queries(self, x: Tensor) -> Tensor:
        """View of the block's part of a tensor [B, N, T, ...]."""
        return x[:, :, self.queries.start : self.queries.stop]

    def keys_of(self, x: Tensor) -> Tensor:
        """View of the block's part of a tensor [B, K, S, D]."""
        return x[:, :, self.keys.start : self.keys.stop]

    def of_keys(self, x: Tensor) -> Tensor:
        """The block's part of keys or values, wide."""
        return self.keys_of(x).to(wide(x))

    def grouped(self, x: Tensor) -> Tensor:
        """The block's part of a tensor [B, N, T, ...] as [B, K, G, ...], wide."""
        return self.of_queries(x).unflatten(1, (-1, self.num_groups)).flatten(2, 3).to(wide(x))

    def ungrouped(self, x: Tensor) -> Tensor:
        """From [B, K, G, ...] to [B, N, c, ...]."""
        return x.unflatten(2, (self.num_groups, -1)).flatten(1, 2)

    def scores(self, query: Tensor, key: Tensor, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """Masked scores, [B, K, G, s], and their slope (``Scores.of``)."""
        found, slope = scores.of(self.grouped(query), self.of_keys(key))
        return found.masked_fill(~self.mask, -torch.inf), slope

    def add_gradients(
        self,
        scores: Scores,
        rows: "Rows",
        pair: tuple[Tensor, Tensor],
        gradients: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add the block's part to gradients.

        Args:
            scores: how they follow from queries and keys.
            rows: of the queries.
            pair: keys and values.
            gradients: of queries, keys and values, which change.
        """
        (key, value), (query_gradient, key_gradient, value_gradient) = pair, gradients
        scores_BKGs, slope_BKGs = self.scores(rows.queries, key, scores)
        shares_BKGs = (scores_BKGs - self.grouped(rows.logs.unsqueeze(-1))).exp()
        gradient_BKGD = self.grouped(rows.gradients)
        self.keys_of(value_gradient).add_(shares_BKGs.mT @ gradient_BKGD)
        change_BKGs = shares_BKGs * (gradient_BKGD @ self.of_keys(value).mT - self.grouped(rows.dots.unsqueeze(-1)))
        if slope_BKGs is not None:
            change_BKGs = change_BKGs * slope_BKGs
        change_BKGs = change_BKGs * scores.scale
        self.of_queries(query_gradient).add_(self.ungrouped(change_BKGs @ self.of_keys(key)))
        self.keys_of(key_gradient).add_(change_BKGs.mT @ self.grouped(rows.queries))


class Rows(NamedTuple):
    """What the backward of attention takes of each query, [B, N, T, ...].

    Attributes:
        queries: the queries.
        gradients: of their sums of values.
        logs: logarithms of the sums of their weights.
        dots: products of gradients and sums.
    """

    queries: Tensor
    gradients: Tensor
    logs: Tensor
    dots: Tensor


def blocks_of(query_BNTD: Tensor, key_BKSD: Tensor, visible: VisibleKeys) -> Iterator[Block]:
    """Blocks of queries with the keys that they see, without those that see none."""
    num_queries, num_groups = query_BNTD.shape[2], query_BNTD.shape[1] // key_BKSD.shape[1]
    for first in range(0, num_queries, BLOCK):
        queries = range(first, min(first + BLOCK, num_queries))
        seen = visible.of_queries(queries)
        keys = range(seen.start, min(seen.stop, key_BKSD.shape[2]))
        if not keys:
            continue
        mask = visible.mask(queries, keys, query_BNTD.device)
        yield Block(queries, keys, num_groups, mask.repeat(*[1] * (mask.ndim - 2), num_groups, 1))


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which values of a tensor are added up: single precision at least."""
    return torch.promote_types(x.dtype, torch.float32)
