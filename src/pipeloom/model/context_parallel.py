"""Context parallelism: each rank has two parts of the tokens of every sequence, and keys and values go around.

With c ranks a sequence is cut into 2 c equal parts, and rank r has the parts r and 2 c - 1 - r: below the causal mask
each rank then has as many scores with the keys of every rank. In step s of c, rank r computes with the keys of rank
r - s and passes them on to rank r + 1 meanwhile (ring attention, arXiv 2310.01889). In the backward the gradients of
keys and values follow one step behind, and return to their rank at the end.

Letters of shapes are those of ``model.transformer``; T is the number of a rank's tokens, P of one of its parts.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.model.core_attention import Block, Rows, Scores, blocks_of, wide
from pipeloom.model.graph_breaks import graph_break
from pipeloom.model.visible_keys import Documents, VisibleKeys


class ContextGroup:
    """The ranks that share the tokens of sequences. This base class is for groups that never communicate.

    Attributes:
        size: number of ranks.
        index: of this rank in the group.
    """

    def __init__(self, size: int = 1, index: int = 0) -> None:
        self.size, self.index = size, index

    def pass_on(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Callable[[], object]:
        """Start to send tensors to the next rank and to receive as many from the one before; returns how to wait."""
        raise NotImplementedError

    def position(self) -> str:
        """The exchange that is waited for as text; empty without one."""
        return ""


class ContextParallel:
    """Context parallelism on one rank.

    Args:
        group: the ranks.
    """

    def __init__(self, group: ContextGroup) -> None:
        self._group = group
        self._is_off = False

    @property
    def is_on(self) -> bool:
        """Whether a rank has parts of sequences, not whole ones."""
        return self._group.size > 1 and not self._is_off

    @property
    def group(self) -> ContextGroup:
        """The ranks."""
        return self._group

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which every rank computes whole sequences, without exchange."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def num_tokens(self, own: int) -> int:
        """Tokens of a whole sequence, of which a rank has so many."""
        return own * (self._group.size if self.is_on else 1)

    def places(self, own: int, device: torch.device | None = None) -> Tensor:
        """The places in a sequence of a rank's tokens, int64 [T]."""
        if not self.is_on:
            return torch.arange(own, device=device)
        return own_places(own * self._group.size, self._group.size, self._group.index, device)


WHOLE_SEQUENCES = ContextParallel(ContextGroup())
"""No context parallelism."""


def own_parts(size: int, index: int) -> tuple[int, int]:
    """The two parts of a sequence that a rank has, of ``2 * size`` ones."""
    return index, 2 * size - 1 - index


def own_places(num_tokens: int, size: int, index: int, device: torch.device | None = None) -> Tensor:
    """The places in a sequence of so many tokens of those that a rank has, int64 [T]."""
    length = num_tokens // (2 * size)
    parts = [torch.arange(part * length, (part + 1) * length, device=device) for part in own_parts(size, index)]
    return torch.cat(parts)


def ring_attention(
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    *,
    context: ContextParallel,
    window: int | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of a rank's queries over the keys of all ranks of its group. Collective, in the backward too.

    Args:
        query_BNTD: queries of the rank's tokens.
        key_BKTD: their keys; N / K query heads share one.
        value_BKTD: their values.
        context: the ranks.
        window: most keys that a query sees, its own included; ``None`` for no limit.
        documents: of the tokens: a query sees keys of its own only; ``None`` for one document.
        scale: factor of the scores; ``None`` for one over the root of the head's size.
        softcap: bound of the scores (``Scores``); 0 for none.

    Returns:
        Sums of values, [B, N, T, D].
    """
    scores = Scores(query_BNTD.shape[-1] ** -0.5 if scale is None else scale, softcap)
    how = _Ring(context.group, scores, window, None if documents is None else documents.firsts_BT)
    return _ring(query_BNTD, key_BKTD, value_BKTD, how)


@graph_break  # exchanges are not compiled
def _ring(query: Tensor, key: Tensor, value: Tensor, how: "_Ring") -> Tensor:
    return _RingAttention.apply(query, key, value, how)


class _Turn(NamedTuple):
    """A block of a rank's queries with keys that it sees, in one step of the ring.

    Attributes:
        block: places of queries and keys in their parts.
        queries: of the part, in a tensor [B, N, T, ...] of the rank.
        keys: of the part, in a tensor [B, K, T, D] of the rank that they are from.
    """

    block: Block
    queries: slice
    keys: slice


@dataclass(frozen=True)
class _Ring:
    """What all steps of the ring have in common.

    Attributes:
        group: the ranks.
        scores: how they follow from queries and keys.
        window: most keys that a query sees.
        firsts: for each of the rank's tokens the place in the sequence of the first token of its document.
    """

    group: ContextGroup
    scores: Scores
    window: int | None
    firsts: Tensor | None

    def turns(self, step: int, query: Tensor, key: Tensor) -> Iterator[_Turn]:
        """The blocks of a step that have visible keys."""
        size, index, length = self.group.size, self.group.index, query.shape[2] // 2
        source = (index - step) % size
        for number, part in enumerate(own_parts(size, index)):
            own = slice(number * length, (number + 1) * length)
            for other, key_part in enumerate(own_parts(size, source)):
                keys = slice(other * length, (other + 1) * length)
                if key_part > part:
                    continue
                visible = VisibleKeys((part - key_part) * length, self.window)
                if self.firsts is not None:
                    shifted = self.firsts[:, own] - key_part * length
                    visible = replace(visible, documents=Documents(shifted))
                for block in blocks_of(query[:, :, own], key[:, :, keys], visible):
                    yield _Turn(block, own, keys)


class _RingAttention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: queries, keys, values, output, and one number per row of scores.

    Partial results of the steps are added up in single precision at least (FlashAttention-2, arXiv 2307.08691).
    """

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, query_BNTD, key_BKTD, value_BKTD, how = args
        # [B, T, N, D] in memory: attention's projection then takes a view.
        sums = torch.zeros_like(
            query_BNTD.transpose(1, 2), memory_format=torch.contiguous_format, dtype=wide(query_BNTD)
        )
        sums_BNTD = sums.transpose(1, 2)
        logs_BNT = sums.new_full(query_BNTD.shape[:3], -torch.inf)
        pair = own_pair = torch.stack([key_BKTD, value_BKTD])
        for step in range(how.group.size if not query_BNTD.is_meta else 0):
            following, wait = _passed(how, pair) if step < how.group.size - 1 else (pair, None)
            for block, own, keys in how.turns(step, query_BNTD, key_BKTD):
                _add(
                    block,
                    how.scores,
                    (query_BNTD[:, :, own], pair[0][:, :, keys], pair[1][:, :, keys]),
                    (sums_BNTD[:, :, own], logs_BNT[:, :, own]),
                )
            if wait is not None:
                wait()
            pair = following
        found_BNTD = sums.to(query_BNTD.dtype).transpose(1, 2)
        ctx.save_for_backward(query_BNTD, own_pair, found_BNTD, logs_BNT)
        ctx.how = how
        return found_BNTD

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        query_BNTD, pair, found_BNTD, logs_BNT = ctx.saved_tensors
        how, gradient_BNTD, size = ctx.how, args[0], ctx.how.group.size
        dots_BNT = (gradient_BNTD.to(wide(found_BNTD)) * found_BNTD).sum(-1)
        rows = (query_BNTD, gradient_BNTD, logs_BNT, dots_BNT)
        query_gradient = torch.zeros_like(query_BNTD, dtype=wide(query_BNTD))
        own_gradient = pair_gradient = torch.zeros_like(pair, dtype=wide(pair))
        for step in range(size if not query_BNTD.is_meta else 0):
            # What other ranks found for the keys of this step arrives while this rank computes its share of it.
            arriving, wait_gradient = _passed(how, pair_gradient.to(pair.dtype)) if step > 1 else (None, None)
            following, wait = _passed(how, pair) if step < size - 1 else (pair, None)
            if step:
                pair_gradient = torch.zeros_like(own_gradient)
            for block, own, keys in how.turns(step, query_BNTD, pair[0]):
                key, value = pair[:, :, :, keys]
                changed = (query_gradient[:, :, own], *pair_gradient[:, :, :, keys])
                block.add_gradients(how.scores, Rows(*(one[:, :, own] for one in rows)), (key, value), changed)
            for one in (wait_gradient, wait):
                if one is not None:
                    one()
            if arriving is not None:
                pair_gradient = pair_gradient + arriving
            pair = following
        if size > 1 and not query_BNTD.is_meta:
            returned, wait = _passed(how, pair_gradient.to(pair.dtype))
            wait()
            own_gradient = own_gradient + returned
        # Copies: a view would keep the other half alive until the second half of a split backward.
        key_gradient, value_gradient = (one.to(pair.dtype, copy=True) for one in own_gradient)
        return query_gradient.to(query_BNTD.dtype), key_gradient, value_gradient, None


def _passed(how: _Ring, sent: Tensor) -> tuple[Tensor, Callable[[], object]]:
    """Start to pass a tensor on; returns the one that arrives in its place, and how to wait for it."""
    received = torch.empty_like(sent)
    return received, how.group.pass_on([received], [sent])


def _add(block: Block, scores: Scores, tensors: tuple[Tensor, Tensor, Tensor], sums: tuple[Tensor, Tensor]) -> None:
    """Add a block's part to the weighted sums of its queries and to the logarithms of the sums of their weights."""
    query, key, value = tensors
    sums_BNPD, logs_BNP = sums
    scores_BKGs = block.scores(query, key, scores)[0]
    old_BKG = block.grouped(logs_BNP.unsqueeze(-1)).squeeze(-1)
    new_BKG = torch.logaddexp(old_BKG, scores_BKGs.logsumexp(-1))
    # A query that has seen no key so far has the logarithm of 0, and nothing to scale.
    base_BKG = new_BKG.masked_fill(new_BKG == -torch.inf, 0.0).unsqueeze(-1)
    kept_BKGD = block.grouped(sums_BNPD) * (old_BKG.unsqueeze(-1) - base_BKG).exp()
    found_BKGD = kept_BKGD + (scores_BKGs - base_BKG).exp() @ block.of_keys(value)
    block.of_queries(sums_BNPD).copy_(block.ungrouped(found_BKGD))
    block.of_queries(logs_BNP).copy_(block.ungrouped(new_BKG.unsqueeze(-1)).squeeze(-1))
