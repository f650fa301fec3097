"""Which layers go into which stage of a run."""

from pipeloom.config import ModelConfig
from pipeloom.cost.flops import piece_forward_flops
from pipeloom.cost.partition import balanced_partition
from pipeloom.cost.shape import shape_of


def default_partition(model: ModelConfig, seq_len: int, num_stages: int) -> tuple[int, ...]:
    """The partition that balances the forward FLOPs of the stages, embedding and head at their cost.

    Args:
        model: resolved.
        seq_len: tokens of a sequence.
        num_stages: stages of the whole pipeline.
    """
    return balanced_partition(piece_forward_flops(shape_of(model), seq_len), num_stages)
