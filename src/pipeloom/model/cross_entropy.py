"""Cross-entropy of logits that may be split over tensor-parallel ranks by the vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeloom.model.tensor_parallel import TensorParallel

# The default of `ignore_index` in PyTorch, so other programs that read the targets skip the same ones.
IGNORED = -100
"""A target that does not count."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets that count, in nats.

    Args:
        logits: ``[n, vocab_size]``.
        targets: ``int64[n]``, or ``IGNORED``.
    """
    # A sum, not a mean: micro-batches may have different numbers of valid targets, and are divided by the step's total.
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
        # A sum of disjoint parts and not a gather, which needs equal parts: shares of the vocabulary may differ by one.
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
        # exp overflows without the maximum subtracted. All ranks subtract the same one, or their sums would not add up.
        largest = logits.amax(-1)
        if not logits.is_meta:  # where shapes are enough, there is nobody to exchange with
            group.max(largest)
        weights = (logits - largest.unsqueeze(-1)).exp()
        columns, is_own = _own_columns(targets, own)
        # Zero where another rank has the target's logit, so that the sum over the ranks is that logit.
        found = (logits.gather(1, columns).squeeze(1) - largest).masked_fill(~is_own, 0)
        # Both in one exchange: at these sizes the latency of an all-reduce is its cost.
        sums = torch.stack([weights.sum(-1), found])
        if not logits.is_meta:
            group.sum(sums)
        # In place: a second tensor of the logits' size would be the largest one of the last stage.
        ctx.save_for_backward(weights.div_(sums[0].unsqueeze(-1)), targets)
        ctx.own = own
        # No rank has column -100, so without this an ignored target would count with the whole log of the sum.
        return (sums[0].log() - sums[1]).masked_fill(targets == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        probabilities, targets = ctx.saved_tensors
        gradient = probabilities.masked_fill((targets == IGNORED).unsqueeze(-1), 0)
        # Again instead of kept: how many bytes a stage keeps must not depend on which tokens are the targets.
        columns, is_own = _own_columns(targets, ctx.own)
        # Softmax less one-hot; ignored targets are nobody's, since -100 is in no share.
        gradient.scatter_add_(1, columns, -is_own.unsqueeze(1).to(gradient.dtype))
        return gradient * args[0], None, None


def _own_columns(targets: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """For each target its column among this rank's, ``[n, 1]``, and whether it has one; column 0 where it has none."""
    is_own = (targets >= own.start) & (targets < own.stop)
    return (targets - own.start).masked_fill(~is_own, 0).unsqueeze(1), is_own
