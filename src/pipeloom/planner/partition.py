"""Which layers go into which stage of a run."""

from collections.abc import Sequence

from pipeloom.cost.flops import piece_flops
from pipeloom.cost.partition import fastest_partition
from pipeloom.schedule import Placement
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelConfig, shape_of


def default_partition(
    model: ModelConfig, seq_len: int, placement: Placement, recompute: Sequence[Recompute]
) -> tuple[int, ...]:
    """The partition with the fewest FLOPs on the rank that has most, embedding, head and recomputation at their cost.

    Args:
        model: resolved.
        seq_len: tokens of a sequence.
        placement: stages, and the rank of each.
        recompute: of each layer.

    Raises:
        UserError: more stages than pieces.
    """
    return fastest_partition(piece_flops(shape_of(model), seq_len, recompute), placement)
