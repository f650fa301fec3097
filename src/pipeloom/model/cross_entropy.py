"""Cross-entropy of logits that may be split over tensor-parallel ranks by the vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeloom.model.tensor_parallel import TensorParallel

IGNORED = -100
"""A target that does not count."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets that count, in nats.

    Args:
        logits: ``[n, vocab_size]``.
        targets: ``int64[n]``, or ``IGNORED``.
    """
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class SplitVocabulary:
    """A vocabulary of which each tensor-parallel rank has the logits of a part.

    Attributes:
        parallel: the ranks.
        size: tokens of all of them together.
    """

    parallel: TensorParallel
    size: int

    def summed_cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As the function of that name; the same on every rank, which exchange three numbers for each target.

        Args:
            logits: of this rank's part of the vocabulary, ``[n, share of size]``.
            targets: ``int64[n]`` in the whole vocabulary, or ``IGNORED``.
        """
        if self.parallel.size == 1:
            return summed_cross_entropy(logits, targets)
        return _SplitCrossEntropy.apply(logits, targets, self)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary on every rank, ``[size]`` from ``[share of size]``; without gradient."""
        if self.parallel.size == 1:
            return logits
        own = self.parallel.share(self.size)
        whole = logits.new_zeros(self.size)
        whole[own.start : own.stop] = logits.detach()
        self.parallel.group.sum(whole)
        return whole


class _SplitCrossEntropy(torch.autograd.Function):
    """Keeps this rank's probabilities and nothing else of the logits' size."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, logits, targets, vocabulary = args
        group, own = vocabulary.parallel.group, vocabulary.parallel.share(vocabulary.size)
        largest = logits.amax(-1)
        group.max(largest)
        weights = (logits - largest.unsqueeze(-1)).exp()
        rows = ((targets >= own.start) & (targets < own.stop)).nonzero().flatten()
        columns = targets[rows] - own.start
        found = torch.zeros_like(largest)
        found[rows] = logits[rows, columns] - largest[rows]
        sums = torch.stack([weights.sum(-1), found])
        group.sum(sums)
        ctx.save_for_backward(weights.div_(sums[0].unsqueeze(-1)), rows, columns, targets)
        return (sums[0].log() - sums[1]).masked_fill(targets == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        probabilities, rows, columns, targets = ctx.saved_tensors
        gradient = probabilities.masked_fill((targets == IGNORED).unsqueeze(-1), 0)
        gradient[rows, columns] -= 1
        return gradient * args[0], None, None
