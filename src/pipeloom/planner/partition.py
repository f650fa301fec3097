"""Which layers go into which stage of a run."""

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.config import ModelConfig
from pipeloom.cost.analytic import fastest_layers
from pipeloom.cost.flops import piece_flops
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.shape import Run, shape_of
from pipeloom.cost.software import Software
from pipeloom.layout import Recompute
from pipeloom.schedule import Placement


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


def with_fastest_layers(run: Run, cluster: Cluster, software: Software, slowness: Sequence[float] | None = None) -> Run:
    """The run with the layers of each stage that make its slowest rank fastest, by the seconds of its pieces.

    Args:
        run: its placement counts; what it says of layers does not.
        cluster: where.
        software: with what.
        slowness: for each pipeline rank, by what the fastest rank's seconds are multiplied; ``None`` for what its
            place on the cluster makes of them.

    Raises:
        UserError: more stages than pieces, or the cluster has not so many devices.
    """
    return replace(run, layers_by_stage=fastest_layers(run, cluster, software, slowness))
