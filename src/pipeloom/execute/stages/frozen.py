"""The weights of a stage that are not trained: a flat buffer without gradient and optimizer state."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from pipeloom.execute.stages.flat_order import FlatOrder


class FrozenWeights:
    """Parameters of a stage that keep their values, as views of one flat buffer in the dtype of compute.

    With full sharding each rank holds a shard, and ``whole`` has memory only between ``hold`` and ``drop``. At all
    other levels each rank holds ``whole``: what never changes needs no gather, and there is nothing else to shard.

    Args:
        parameters: by name; they become views, and require no gradient.
        num_shards: number of ranks that share one copy; 1 for no sharding.
        index: of this rank's shard.
        dtype: of compute; ``None``: that of the parameters.
        replicated: parameters that every tensor-parallel rank holds whole.

    Attributes:
        order: of the parameters in the buffer.
        whole: the buffer.
        shard: this rank's part of it; ``whole`` itself without sharding.
        begin: index of the shard's first element in the buffer.
        nbytes: of ``whole``, with or without memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        num_shards: int,
        index: int,
        dtype: torch.dtype | None,
        replicated: Collection[str] = (),
    ) -> None:
        self.order = FlatOrder.of(parameters.items(), num_shards, replicated)
        first = next(iter(parameters.values()))
        self.whole = torch.zeros(self.order.size, dtype=dtype or first.dtype, device=first.device)
        with torch.no_grad():
            for name, view in self.order.views(self.whole).items():
                view.copy_(parameters[name])
                parameters[name].data = view
        share = self.order.size // num_shards
        self.begin = index * share
        self.is_sharded = num_shards > 1
        self.shard = self.whole[self.begin : self.begin + share].clone() if self.is_sharded else self.whole
        self.nbytes = self.whole.nbytes

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffer, if it has memory, and of the shard, where it is not the buffer itself."""
        return self.whole.untyped_storage().nbytes() + (self.shard.nbytes if self.is_sharded else 0)

    def hold(self) -> None:
        """Allocate the buffer; a gather fills it."""
        # The storage and not the tensor, as in StageWeights: autograd keeps views of it.
        self.whole.untyped_storage().resize_(self.nbytes)

    def drop(self) -> None:
        """Free the buffer, with full sharding."""
        if self.is_sharded:
            self.whole.untyped_storage().resize_(0)
