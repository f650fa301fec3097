"""FLOPs of a transformer in closed form, and MFU.

A product of [m, k] and [k, n] takes 2 m k n FLOPs. The backward takes twice the forward: one product for the gradient
of the input, one for that of the weights.

Attention is counted in two ways. To balance stages (``piece_flops``), only the half of the scores below the causal mask
counts. In both, a layer with a window counts the scores inside it (``seen``). Utilization follows PaLM (arXiv
2204.02311, appendix B): all scores count, and 6 FLOPs for each token and parameter, including the embedding. With tied
embeddings and 12 L H^2 layer parameters that is Megatron's 72 B T L H^2 (1 + T / 6H + V / 12LH) for a batch of B
sequences, and with full recomputation its 96 B T L H^2 (1 + T / 6H + V / 16LH) (arXiv 2104.04473, section 5.1).
"""

from collections.abc import Sequence
from functools import lru_cache

from pipeloom.workload.adapter import Adapter
from pipeloom.workload.layout import Recompute
from pipeloom.workload.model import ModelShape


def seen(num_tokens: int, window: int | None = None, before: int = 0) -> float:
    """Scores that remain of ``num_tokens`` queries after ``before`` earlier tokens: those of keys that queries see.

    With the convention T^2 / 2 for T tokens under a causal mask, so W (T - W / 2) with a window of W < T.

    Args:
        num_tokens: number of queries.
        window: keys that a query sees at most; ``None`` for no limit.
        before: earlier tokens, whose keys the queries see, too.
    """

    def up_to(tokens: int) -> float:
        return tokens * tokens / 2 if window is None or tokens <= window else window * (tokens - window / 2)

    return up_to(before + num_tokens) - up_to(before)


def seen_per_token(shape: ModelShape, seq_len: int) -> list[float]:
    """For each layer the tokens of a sequence without mask whose scores are as many as those that remain, doubled.

    T without a window.
    """
    if shape.window is None:
        return [float(seq_len)] * shape.layers
    by_window = {window: 2 * seen(seq_len, window) / seq_len for window in {None, shape.window}}
    return [by_window[window] for window in shape.windows]


def layer_forward_flops(shape: ModelShape, seen_tokens: float, matrices: int) -> float:
    """FLOPs of one layer's forward per token.

    With hidden size H, query heads of total width Q, key and value heads of total width G, inner width F
    and T tokens: 2 H (2 Q + 2 G) for the four projections; 2 T Q for scores and weighted sum, half of 4 T Q by the
    causal mask; 6 H F for SwiGLU's three matrices or 4 H F for GELU's two. With experts F is the width that a token
    takes, and the router of E experts adds 2 H E.

    Args:
        shape: of the model.
        seen_tokens: T, fewer with a window (``seen_per_token``).
        matrices: parameters of the layer's matrices that a token takes (``ModelShape.active_by_layer``).
    """
    return 2 * matrices + 2 * seen_tokens * shape.query_width


def piece_forward_flops(shape: ModelShape, seq_len: int) -> list[float]:
    """FLOPs of each piece's forward per token: embedding, each layer, head.

    The embedding is a lookup without FLOPs; the head is one product, 2 H V.

    Args:
        shape: of the model.
        seq_len: tokens of a sequence.
    """
    each = zip(seen_per_token(shape, seq_len), shape.active_by_layer, strict=True)
    layers = [layer_forward_flops(shape, seen_tokens, matrices) for seen_tokens, matrices in each]
    return [0.0, *layers, 2.0 * shape.embedding_parameters]


def piece_flops(
    shape: ModelShape,
    seq_len: int,
    recompute: Sequence[Recompute],
    frozen_pieces: int = 0,
    adapter: Adapter | None = None,
) -> list[float]:
    """FLOPs of each piece in a step per token: forward, backward (twice the forward), and recomputation.

    A layer recomputes its forward, or only scores and weighted sum, 2 T Q with the causal mask.

    Args:
        shape: of the model.
        seq_len: T.
        recompute: of each layer.
        frozen_pieces: pieces from the first on that run a forward only.
        adapter: of the layers that train, whose matrices have no gradient, as that of the head; ``None``: they have.
    """
    embedding, *layers, head = piece_forward_flops(shape, seq_len)
    by_layer = [
        3 * forward + {"none": 0.0, "selective": 2.0 * seen_tokens * shape.query_width, "full": forward}[kind]
        for forward, seen_tokens, kind in zip(layers, seen_per_token(shape, seq_len), recompute, strict=True)
    ]
    if adapter is not None:
        more = 6.0 * adapter_parameters(shape, adapter)
        by_layer = [flops + more - 2.0 * own for flops, own in zip(by_layer, shape.active_by_layer, strict=True)]
    forward_only = [embedding, *layers][:frozen_pieces]
    head *= 3 if adapter is None else 2
    return [*forward_only, *[3 * embedding, *by_layer, head][frozen_pieces:]]


def adapter_parameters(shape: ModelShape, adapter: Adapter) -> int:
    """Parameters of one layer's adapters."""
    return sum(adapter.layer_parameters(shape, 1))


def model_flops(*, parameters: float, layers: int, hidden: int, seq_len: float) -> float:
    """Model FLOPs of training per token, 6 N + 12 L H T (PaLM, arXiv 2204.02311, appendix B).

    Args:
        parameters: N, including embedding and head.
        layers: L.
        hidden: H, the total width of attention's heads.
        seq_len: T; with windows the mean of ``seen_per_token``.
    """
    return 6 * parameters + 12 * layers * hidden * seq_len


def recomputed_flops(shape: ModelShape, seq_len: int, recompute: Recompute) -> float:
    """Recomputed FLOPs per token.

    Selective recomputation repeats scores and weighted sum, 4 L Q T; full recomputation repeats every layer's forward,
    2 N_layers + 4 L Q T, but neither embedding nor head (arXiv 2205.05198, section 5).

    Args:
        shape: of the model.
        seq_len: T.
        recompute: of all layers.
    """
    if recompute == "none":
        return 0.0
    # Two products of 2 T Q for each token and layer: scores, and weighted sum.
    attention = 4.0 * shape.query_width * sum(seen_per_token(shape, seq_len))
    return attention + (2.0 * sum(shape.active_by_layer) if recompute == "full" else 0.0)


def mfu(
    tokens_per_s: float,
    *,
    parameters: float,
    layers: int,
    hidden: int,
    seq_len: int,
    devices: int,
    peak_flops_per_s: float,
) -> float:
    """Model FLOPs utilization, a fraction: tokens/s (6 N + 12 L H T) / (devices x peak).

    The whole attention matrix counts, recomputation does not (PaLM, arXiv 2204.02311, appendix B).

    Args:
        tokens_per_s: of all devices together.
        parameters: N, including embedding and head.
        layers: L.
        hidden: H.
        seq_len: T.
        devices: their number.
        peak_flops_per_s: of one device.
    """
    needed = model_flops(parameters=parameters, layers=layers, hidden=hidden, seq_len=seq_len)
    return tokens_per_s * needed / (devices * peak_flops_per_s)


def shape_model_flops(shape: ModelShape, seq_len: int, frozen_pieces: int = 0, adapter: Adapter | None = None) -> float:
    """``model_flops`` of a shape, whose number of parameters excludes norms, biases and experts a token does not take.

    Pieces from the first on that train nothing count with their forward, a third. With adapters the other layers and
    the head count without the product for the gradient of their weights; adapters count whole.
    """
    tokens, layers = seen_per_token(shape, seq_len), max(0, frozen_pieces - 1)

    def flops(parameters: float, layers: int) -> float:
        mean = sum(tokens[:layers]) / max(1, layers)
        return model_flops(parameters=parameters, layers=layers, hidden=shape.query_width, seq_len=mean)

    parameters = sum(shape.active_by_layer[:layers]) + (frozen_pieces > 0) * shape.embedding_parameters
    if adapter is None:
        return flops(shape.active_parameters, shape.layers) - 2 / 3 * flops(parameters, layers)
    trained = shape.layers - layers
    attention = flops(0, shape.layers) - 2 / 3 * flops(0, layers)
    back = 2 * (sum(shape.active_by_layer[layers:]) + shape.embedding_parameters)
    return attention + 2 * shape.active_parameters + back + 6 * trained * adapter_parameters(shape, adapter)


def attention_share(shape: ModelShape, seq_len: int, adapter: Adapter | None = None) -> float:
    """Fraction of the model FLOPs that are scores and weighted sums, of which a causal mask needs half."""
    tokens = seen_per_token(shape, seq_len)
    attention = model_flops(parameters=0, layers=1, hidden=shape.query_width, seq_len=sum(tokens))
    return attention / shape_model_flops(shape, seq_len, adapter=adapter)


# Layouts of one model have the same.
@lru_cache(maxsize=1024)
def hardware_flops(
    shape: ModelShape, seq_len: int, recompute: Recompute, frozen_pieces: int = 0, adapter: Adapter | None = None
) -> float:
    """Hardware FLOPs of training per token: model FLOPs and recomputed FLOPs.

    HFU is computed from them as MFU from model FLOPs (arXiv 2205.05198, section 6). Only layers that are trained
    recompute.
    """
    trained = shape.layers - max(0, frozen_pieces - 1)
    again = recomputed_flops(shape, seq_len, recompute) * trained / shape.layers
    return shape_model_flops(shape, seq_len, frozen_pieces, adapter) + again
