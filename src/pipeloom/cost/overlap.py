"""Seconds of a layer whose tokens travel to experts of other ranks, with what is computed meanwhile.

Rows go to the experts while the products into the shared experts are computed, and come back while the one out of them
is. With ``Run.ep_overlap`` a stage computes the halves of a micro-batch in turns (``model.expert_parallel``). With A
for what a half computes from the end of one layer's experts to the next exchange, E for its experts, and X for an
exchange, a stage takes in steady state, for each layer

    2 x together(A, X) + 2 x together(E, X)

since each of the four exchanges has one part of the other half beside it. ``together`` slows compute down meanwhile. At
the end of a stage, and of a layer that is recomputed, the last exchange has nothing beside it. Backwards run the same
parts in the reverse order. The exchange of numbers of rows is not hidden.
"""

from dataclasses import dataclass, replace

from pipeloom.cost.collectives import rows_s, together_s, travel_s
from pipeloom.cost.layers import Pieces
from pipeloom.cost.measured import Both
from pipeloom.cost.products import layer_products


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer, forward and backward.

    Attributes:
        whole_s: with what is exposed of its exchanges of tokens.
        travel_s: of these exchanges, in a forward without the recomputation of a backward.
        hidden_s: of the exchanges, with those of a recomputation in the backward: what compute hides.
        edge_s: exposed once in a stage, beside its layers.
    """

    whole_s: Both
    travel_s: Both = (0.0, 0.0)
    hidden_s: Both = (0.0, 0.0)
    edge_s: Both = (0.0, 0.0)


def layer_seconds(pieces: Pieces, alone_s: Both) -> LayerSeconds:
    """The seconds of a layer; all layers are alike.

    Args:
        pieces: of the run.
        alone_s: seconds of forward and backward of a layer in which nothing hides an exchange.
    """
    run, experts = pieces.run, pieces.run.shape.experts
    halves = 2 if run.ep_overlap and experts is not None else 1
    part, whole_s = pieces, alone_s
    if halves == 2:
        part = replace(pieces, run=run.changed(micro_batch=run.micro_batch / halves))
        whole_s = halves * part.seconds(part.layer_forward()), halves * part.seconds(part.layer_backward())
    forth_s, back_s = (halves * one for one in travel_s(part.run, part.cluster, part.software))
    if experts is None or not forth_s or (halves == 1 and not experts.shared):
        return LayerSeconds(whole_s, (forth_s, back_s))
    hidden_s, edge_s = _hidden(part) if halves == 2 else (_beside_shared(part), (0.0, 0.0))
    again_s = hidden_s[0] if run.recompute == "full" else 0.0
    hidden_s = hidden_s[0], hidden_s[1] + again_s
    seconds = whole_s[0] - hidden_s[0], whole_s[1] - hidden_s[1]
    return LayerSeconds(seconds, (forth_s, back_s), hidden_s, edge_s)


def _saved_s(compute_s: float, exchange_s: float) -> float:
    """Seconds less than one after the other."""
    return compute_s + exchange_s - together_s(compute_s, exchange_s)


def _beside_shared(part: Pieces) -> Both:
    """Seconds that the products of shared experts hide, forward and backward, which has two for each."""
    exchange_s = rows_s(part.run, part.cluster, part.software)
    into_s, out_s = (part.product_s(*size) for size in layer_products(part.run)[2:])
    forth_s, back_s = (sum(_saved_s(n * one, exchange_s) for one in (into_s, out_s)) for n in (1, 2))
    return forth_s, back_s


def _hidden(part: Pieces) -> tuple[Both, Both]:
    """Seconds that halves hide of each other's exchanges, and what a stage loses of them at its end."""
    run = part.run.changed(recompute="none")
    once = replace(part, run=run)
    exchange_s = rows_s(run, part.cluster, part.software)
    forward = once.layer_forward()
    in_experts = once.experts_s() / (forward.device_s - forward.tensor_s)
    hidden, edges = list[float](), list[float]()
    for one, travel in zip((forward, once.layer_backward()), travel_s(run, part.cluster, part.software), strict=True):
        compute_s = max(0.0, once.seconds(one) - travel)
        ahead_s = _saved_s(compute_s * (1 - in_experts), exchange_s)
        inside_s = _saved_s(compute_s * in_experts, exchange_s)
        is_cut = part.run.recompute == "full"
        hidden.append((1 if is_cut else 2) * ahead_s + 2 * inside_s)
        edges.append(0.0 if is_cut else ahead_s)
    return (hidden[0], hidden[1]), (edges[0], edges[1])
