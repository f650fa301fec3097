"""Seconds of each kind of piece of a run: measured, or the closed forms of ``pipeloom.cost.layers``."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.layers import Pieces
from pipeloom.cost.measured import Both, MeasuredPieces
from pipeloom.cost.overlap import layer_seconds
from pipeloom.cost.parts import Parts
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run


class InnerSeconds(NamedTuple):
    """Seconds of a step's exchanges inside layers on a rank's link, and those of them that compute waits for."""

    busy_s: float
    exposed_s: float


@dataclass(frozen=True)
class PieceSeconds:
    """Seconds of forward and backward of each kind of piece.

    Attributes:
        embedding, layer, head: seconds on one device for one micro-batch, including tensor-parallel collectives.
        weight_s: seconds of the weight half of a layer's backward.
        head_weight_s: seconds of the weight half of the head's backward. The embedding's whole backward is weight half.
        idle_s: seconds of a layer in which the device waits for the host to launch kernels, by the closed forms.
        ring_busy_s: seconds of a layer's exchange of keys and values over the context axis.
        ring_exposed_s: those of them that a layer waits for, which are part of ``layer``.
        travel_s: seconds of a layer's exchanges of tokens between ranks that share experts.
        hidden_travel_s: those of them that compute hides, which are no part of ``layer``; with those of a
            recomputation.
        stage: seconds of a stage in addition to its pieces: measured ones, or what its last exchange of tokens exposes.
        message_s: seconds of a core for a message between two stages; 0 if the link determines the time.
        is_measured: whether the seconds are from the cluster's file, not closed forms.
    """

    embedding: Both
    layer: Both
    head: Both
    weight_s: float
    head_weight_s: float
    idle_s: Both = (0.0, 0.0)
    ring_busy_s: Both = (0.0, 0.0)
    ring_exposed_s: Both = (0.0, 0.0)
    travel_s: Both = (0.0, 0.0)
    hidden_travel_s: Both = (0.0, 0.0)
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0
    is_measured: bool = False

    def both_s(self, layers: int) -> list[float]:
        """Seconds of each piece, forward and backward: embedding, ``layers`` equal layers, head.

        Where layers differ each has their mean.
        """
        return [sum(self.embedding), *[sum(self.layer)] * layers, sum(self.head)]


def piece_seconds(run: Run, cluster: Cluster, software: Software) -> PieceSeconds:
    """Seconds of the pieces of a run whose layers all recompute ``run.recompute``.

    Measured, if the cluster's file has exactly these pieces; else closed forms, also of what a mask of documents adds.
    They depend on the model, the tokens, the kernels and the tensor axis, not on the partition.
    """
    # The only property of the pipeline that pieces depend on is an argument, so that layouts share cache entries.
    is_dragged = run.pp > 1 and run.num_devices > cluster.devices_per_node
    if run.shape.has_equal_layers:
        return _piece_seconds(run.of_pieces, cluster, software, is_dragged)
    return _mean_of_kinds(run.of_pieces, cluster, software, is_dragged)


@lru_cache(maxsize=4096)
def _mean_of_kinds(run: Run, cluster: Cluster, software: Software, is_dragged: bool) -> PieceSeconds:
    """The pieces of a run whose layers have different windows, or some of them experts: of the layer the mean."""
    shape, number = run.shape, run.shape.layers
    counted = Counter(zip(shape.windows, shape.with_experts, strict=True))
    kinds = [
        (_piece_seconds(replace(run, shape=shape.alike(window, experts=one)), cluster, software, is_dragged), count)
        for (window, one), count in sorted(counted.items(), key=lambda one: (one[0][0] or 0, one[0][1]))
    ]

    def mean(both: Callable[[PieceSeconds], Both]) -> Both:
        forward_s, backward_s = (sum(both(kind)[side] * count for kind, count in kinds) / number for side in (0, 1))
        return forward_s, backward_s

    # All else is alike, and measured for layers without a window only, which are the first.
    whole = kinds[0][0]
    return replace(
        whole,
        layer=mean(lambda kind: kind.layer),
        idle_s=mean(lambda kind: kind.idle_s),
        ring_exposed_s=mean(lambda kind: kind.ring_exposed_s),
        stage=(max(kind.stage[0] for kind, _ in kinds), max(kind.stage[1] for kind, _ in kinds)),
        weight_s=sum(kind.weight_s * count for kind, count in kinds) / number,
        is_measured=all(kind.is_measured for kind, _ in kinds),
    )


@lru_cache(maxsize=4096)
def _piece_seconds(run: Run, cluster: Cluster, software: Software, is_dragged: bool) -> PieceSeconds:
    pieces = Pieces(run, cluster, software, is_dragged=is_dragged)

    def both(forward: Parts, backward: Parts) -> Both:
        return pieces.seconds(forward), pieces.seconds(backward)

    layer = (pieces.layer_forward(), pieces.layer_backward())
    alone_s = both(*layer)
    of_layer = layer_seconds(pieces, alone_s)
    layer_s = of_layer.whole_s
    counted = PieceSeconds(
        embedding=both(pieces.embedding_forward(), pieces.embedding_backward()),
        layer=layer_s,
        head=both(pieces.head_forward(), pieces.head_backward()),
        weight_s=pieces.layer_weight_s(),
        head_weight_s=pieces.head_weight_s(),
        idle_s=(alone_s[0] - layer[0].device_s, alone_s[1] - layer[1].device_s),
        ring_busy_s=pieces.ring_busy_s,
        ring_exposed_s=pieces.ring_exposed_s,
        travel_s=of_layer.travel_s,
        hidden_travel_s=of_layer.hidden_s,
        stage=of_layer.edge_s,
    )
    key = run.of_measured_pieces
    # A linear search is fast enough, since the result is cached.
    found = next((one for one in cluster.pieces if one.run == key), None)
    if found is None:
        return counted
    if run.adapter is not None:
        bare = replace(run, adapter=None)
        whole, plain = (_piece_seconds(bare, on, software, is_dragged) for on in (cluster, replace(cluster, pieces=())))
        return _with_adapter(whole, plain, counted)
    if not run.by_document:
        return _measured(found, counted)
    whole = _piece_seconds(replace(run, by_document=False), cluster, software, is_dragged)
    plain = Pieces(replace(run, by_document=False), cluster, software, is_dragged=is_dragged)
    without = both(plain.layer_forward(), plain.layer_backward())
    forward_s, backward_s = (
        one + with_mask - alone for one, with_mask, alone in zip(whole.layer, layer_s, without, strict=True)
    )
    return replace(whole, layer=(forward_s, backward_s))


def _with_adapter(whole: PieceSeconds, plain: PieceSeconds, counted: PieceSeconds) -> PieceSeconds:
    """Measured seconds of a model without adapters, times what adapters do to the closed forms."""

    def scaled(both: Callable[[PieceSeconds], Both]) -> Both:
        sides = zip(both(whole), both(plain), both(counted), strict=True)
        forward_s, backward_s = (seconds * has / had if had else has for seconds, had, has in sides)
        return forward_s, backward_s

    return replace(
        whole,
        layer=scaled(lambda one: one.layer),
        head=scaled(lambda one: one.head),
        weight_s=whole.weight_s * counted.weight_s / plain.weight_s,
        head_weight_s=0.0,
    )


def _measured(found: MeasuredPieces, counted: PieceSeconds) -> PieceSeconds:
    """Measured seconds. Halves of backwards are not measured: they have the proportions of the closed forms."""
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
