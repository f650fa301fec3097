"""A step's tokens, cut into micro-batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeloom.data.windows import document_begins, without_marks
from pipeloom.execute.communication.boundary import TokenSlices
from pipeloom.model.context_parallel import ContextGroup, own_places
from pipeloom.model.cross_entropy import IGNORED, summed_cross_entropy

CrossEntropy = Callable[[Tensor, Tensor], Tensor]
"""(logits, targets) -> sum over the targets that count."""


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one step, those of one data-parallel replica.

    Attributes:
        inputs: for each micro-batch the tokens, ``int64[microbatch_size, seq_len]``; or for each slice of each.
        targets: the same shape, one token ahead.
        num_valid: targets that count, over the whole step of all replicas.
        firsts: of the shape of inputs: for each token the place in its window of the first token of its document.
            ``None`` where attention has no borders.
    """

    inputs: list[Tensor]
    targets: list[Tensor]
    num_valid: int
    firsts: list[Tensor] | None = None

    @classmethod
    def of(
        cls,
        windows: npt.NDArray[np.int64],
        num_microbatches: int | Sequence[int],
        device: torch.device,
        *,
        replica: int = 0,
        num_replicas: int = 1,
        context: ContextGroup | None = None,
        num_counted: int | None = None,
        by_document: bool = False,
    ) -> "Batch":
        """Cut windows of ``seq_len + 1`` tokens into equal micro-batches, and take those of a replica.

        A replica has those behind the replicas before it.

        Args:
            windows: of the whole step, ``[micro-batches of all replicas * microbatch_size, seq_len + 1]``. A token that
                is no target is negative (``TokenWindows.batch``).
            num_microbatches: how many every replica takes, or each one.
            device: where the tokens go.
            replica: 0..num_replicas-1.
            num_replicas: data-parallel replicas.
            context: ranks that share the tokens of each window, of which this one takes its parts; ``None``: it takes
                all tokens.
            num_counted: the first windows, whose targets count; ``None`` for all.
            by_document: whether attention ends at documents, which the windows mark.
        """
        counts = [num_microbatches] * num_replicas if isinstance(num_microbatches, int) else num_microbatches
        size = len(windows) // sum(counts)
        begin = sum(counts[:replica]) * size
        # Copies: views of windows with seq_len + 1 tokens would be copied in each flatten instead.
        inputs, targets = without_marks(windows[:, :-1]), windows[:, 1:].copy()
        targets[targets < 0] = IGNORED
        if num_counted is not None:
            targets[num_counted:] = IGNORED

        def own(tokens: npt.NDArray[np.int64]) -> list[Tensor]:
            found = torch.from_numpy(tokens[begin : begin + counts[replica] * size])
            if context is not None and context.size > 1:
                found = found[:, own_places(found.shape[1], context.size, context.index)]
            return list(found.to(device).chunk(counts[replica]))

        firsts = None
        if by_document:
            places = np.where(document_begins(windows[:, :-1]), np.arange(inputs.shape[1]), 0)
            firsts = own(np.maximum.accumulate(places, axis=1))
        # Of the whole step, not of this replica: each divides by it, so the sum over replicas is the mean.
        return cls(own(inputs), own(targets), int((targets != IGNORED).sum()), firsts)

    def cut(self, slices: TokenSlices) -> "Batch":
        """The batch with sliced micro-batches; the last target of a slice is the first token of the next one."""
        firsts = None if self.firsts is None else slices.cut(self.firsts)
        return Batch(slices.cut(self.inputs), slices.cut(self.targets), self.num_valid, firsts)

    def loss(self, logits: Tensor, microbatch: int, cross_entropy: CrossEntropy = summed_cross_entropy) -> Tensor:
        """A micro-batch's share of the step's loss, in nats for each valid token of the whole step.

        The sum over the micro-batches is the mean over all valid tokens, even if their numbers differ, so
        gradients need no scaling afterwards.

        Args:
            logits: ``[microbatch_size, seq_len, vocab_size]``; taken in float32 at least.
            microbatch: its index; in a sliced batch the index of the slice over all micro-batches.
            cross_entropy: of logits (perhaps of a shard of the vocabulary) and targets.
        """
        # The logarithm of a sum over the vocabulary in bfloat16 would have two or three digits.
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        # Without any target the sum is 0, and so is the loss.
        return cross_entropy(wide, self.targets[microbatch].flatten()) / max(1, self.num_valid)
