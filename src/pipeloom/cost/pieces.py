"""Seconds of a model's pieces for one micro-batch, remembered: a search asks for the same ones again and again."""

from dataclasses import dataclass
from functools import lru_cache

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.layers import Parts, Pieces
from pipeloom.cost.measured import Both, MeasuredPieces
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class PieceSeconds:
    """Forward and backward of each kind of piece.

    Attributes:
        embedding, layer, head: seconds on one device for one micro-batch, with tensor-parallel exchanges.
        weight_s: the part of a layer's backward that a split leaves to the gradients of the weights.
        head_weight_s: the same of the head's; of the embedding's it is all.
        idle_s: of a layer's seconds, in closed forms, those that the device waits for the host's launches.
        stage: of a stage beside its pieces, where that was measured.
        message_s: seconds of a core for a message between two stages; 0 where the link's file has it.
        is_measured: whether they are from the cluster's file; otherwise they are closed forms.
    """

    embedding: Both
    layer: Both
    head: Both
    weight_s: float
    head_weight_s: float
    idle_s: Both = (0.0, 0.0)
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0
    is_measured: bool = False

    def both_s(self, layers: int) -> list[float]:
        """Seconds of each piece, forward and backward: embedding, so many equal layers, head."""
        return [sum(self.embedding), *[sum(self.layer)] * layers, sum(self.head)]


def piece_seconds(run: Run, cluster: Cluster, software: Software) -> PieceSeconds:
    """Seconds of the pieces of a run whose layers all recompute ``run.recompute``.

    Where the cluster's file has measured exactly these, they are those. They depend on the model, the tokens, the
    kernels and the tensor axis, not on how the pipeline is cut.
    """
    # The one fact about the pipeline that pieces depend on: it is passed
    # on, so that other layouts find them in the cache.
    is_dragged = run.pp > 1 and run.num_devices > cluster.devices_per_node
    return _piece_seconds(run.of_pieces, cluster, software, is_dragged)


@lru_cache(maxsize=4096)
def _piece_seconds(run: Run, cluster: Cluster, software: Software, is_dragged: bool) -> PieceSeconds:
    pieces = Pieces(run, cluster, software, is_dragged=is_dragged)

    def both(forward: Parts, backward: Parts) -> Both:
        return pieces.seconds(forward), pieces.seconds(backward)

    layer = (pieces.layer_forward(), pieces.layer_backward())
    layer_s = both(*layer)
    counted = PieceSeconds(
        embedding=both(pieces.embedding_forward(), pieces.embedding_backward()),
        layer=layer_s,
        head=both(pieces.head_forward(), pieces.head_backward()),
        weight_s=pieces.layer_weight_s(),
        head_weight_s=pieces.head_weight_s(),
        idle_s=(layer_s[0] - layer[0].device_s, layer_s[1] - layer[1].device_s),
    )
    key = run.of_measured_pieces
    # Looked for once for each run, since what is returned is cached.
    found = next((one for one in cluster.pieces if one.run == key), None)
    return counted if found is None else _measured(found, counted)


def _measured(found: MeasuredPieces, counted: PieceSeconds) -> PieceSeconds:
    """What was measured; how a backward splits was not, so that its shares are those of the closed forms."""
    return PieceSeconds(
        embedding=found.embedding,
        layer=found.layer,
        head=found.head,
        weight_s=found.layer[1] * counted.weight_s / counted.layer[1],
        head_weight_s=found.head[1] * counted.head_weight_s / counted.head[1],
        stage=found.stage,
        message_s=found.message_s,
        is_measured=True,
    )
