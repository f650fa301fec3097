"""Cross-entropy, also vocab-parallel: with logits split over tensor-parallel ranks by the vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeloom.model.tensor_parallel import WHOLE, TensorParallel

IGNORED = -100
"""A target that does not count; PyTorch's default of ``ignore_index``."""


def summed_cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum of the cross-entropies of all targets but ``IGNORED``, in nats.

    Args:
        logits: ``[n, vocab_size]``.
        targets: ``int64[n]``; token or ``IGNORED``.
        z_loss: factor of the squared logarithm of the sum of exponentials, which each target adds (PaLM, arXiv
            2204.02311, section 5).
    """
    if z_loss:
        return SplitVocabulary(WHOLE, logits.shape[1]).summed_cross_entropy(logits, targets, z_loss)
    # A sum instead of a mean: micro-batches may have different numbers of targets; the step divides by the total.
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class SplitVocabulary:
    """A vocabulary split over tensor-parallel ranks.

    Attributes:
        parallel: the ranks.
        size: of the whole vocabulary.
    """

    parallel: TensorParallel
    size: int

    def summed_cross_entropy(self, logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
        """As the function of that name; the result is equal on all ranks, which exchange three numbers per target.

        Args:
            logits: of this rank's part of the vocabulary, ``[n, share of size]``.
            targets: ``int64[n]``; token of the whole vocabulary or ``IGNORED``.
            z_loss: as there.
        """
        if self.parallel.size == 1 and not z_loss:
            return summed_cross_entropy(logits, targets)
        return _SplitCrossEntropy.apply(logits, targets, self, z_loss)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary, ``[..., size]`` of this rank's share, on every rank; without gradient."""
        if self.parallel.size == 1:
            return logits
        own = self.parallel.share(self.size)
        # An all-reduce of disjoint parts, since an all-gather needs equal parts, and shares may differ by one.
        whole = logits.new_zeros(*logits.shape[:-1], self.size)
        whole[..., own.start : own.stop] = logits.detach()
        self.parallel.group.sum(whole)
        return whole


class _SplitCrossEntropy(torch.autograd.Function):
    """Saves this rank's part of the gradient but for the targets, and no other tensor of the size of the logits."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, logits, targets, vocabulary, z_loss = args
        group, own = vocabulary.parallel.group, vocabulary.parallel.share(vocabulary.size)
        # The maximum is subtracted against overflow of exp; it must be the same on all ranks.
        largest, is_shared = logits.amax(-1), vocabulary.parallel.size > 1 and not logits.is_meta
        if is_shared:  # meta tensors have no process group
            group.max(largest)
        weights = (logits - largest.unsqueeze(-1)).exp()
        columns, is_own = _own_columns(targets, own)
        # Zero where another rank has the target's logit, so that the sum over the ranks is that logit.
        found = (logits.gather(1, columns).squeeze(1) - largest).masked_fill(~is_own, 0)
        # Both in one all-reduce, whose cost at these sizes is its latency.
        sums = torch.stack([weights.sum(-1), found])
        if is_shared:
            group.sum(sums)
        # In place: a second tensor of the logits' size would raise the last stage's peak memory.
        probabilities, loss = weights.div_(sums[0].unsqueeze(-1)), sums[0].log() - sums[1]
        if z_loss:
            whole = largest + sums[0].log()
            loss += z_loss * whole.square()
            probabilities.mul_((1 + 2 * z_loss * whole).unsqueeze(-1))
        ctx.save_for_backward(probabilities, targets)
        ctx.own = own
        # No rank has column -100, so an ignored target would otherwise add the log of the sum.
        return loss.masked_fill(targets == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        probabilities, targets = ctx.saved_tensors
        gradient = probabilities.masked_fill((targets == IGNORED).unsqueeze(-1), 0)
        # Recomputed instead of saved, which would add to the bytes that a stage keeps.
        columns, is_own = _own_columns(targets, ctx.own)
        # Softmax minus one-hot; -100 is in no rank's share.
        gradient.scatter_add_(1, columns, -is_own.unsqueeze(1).to(gradient.dtype))
        return gradient * args[0], None, None, None


def _own_columns(targets: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """For each target its column on this rank, ``[n, 1]`` (0 if it has none), and whether it has one, ``[n]``."""
    is_own = (targets >= own.start) & (targets < own.stop)
    return (targets - own.start).masked_fill(~is_own, 0).unsqueeze(1), is_own
