"""FLOPs of each piece of the transformer, closed forms.

A matrix product of [m, k] and [k, n] is 2 m k n FLOPs. Backward costs twice the forward: one product for the
gradient of the input, one for that of the weights.
"""

from pipeloom.config import ModelConfig


def layer_forward_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of one layer's forward, for each token.

    With hidden size H, query heads of total width H, key and value heads of total width G, inner width F
    and T tokens: 2 H (2 H + 2 G) for the four projections; 2 T H for scores and weighted sum, of which the causal
    mask needs half of 4 T H; 6 H F for SwiGLU's three matrices or 4 H F for GELU's two.

    Args:
        model: resolved.
        seq_len: T.
    """
    assert model.num_kv_heads is not None
    assert model.ffn_size is not None
    hidden = model.hidden_size
    grouped = hidden // model.num_heads * model.num_kv_heads
    matrices = 3 if model.family == "llama" else 2
    projections = 2 * hidden * (2 * hidden + 2 * grouped)
    return projections + 2 * seq_len * hidden + 2 * matrices * hidden * model.ffn_size


def piece_forward_flops(model: ModelConfig, seq_len: int) -> list[float]:
    """FLOPs of each piece's forward, for each token: embedding, each layer, head.

    The embedding is a look-up and has none; the head is one product with the vocabulary, 2 H V.

    Args:
        model: resolved.
        seq_len: tokens of a sequence.
    """
    assert model.vocab_size is not None
    head = 2 * model.hidden_size * model.vocab_size
    return [0.0, *[layer_forward_flops(model, seq_len)] * model.num_layers, head]


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
        tokens_per_s: of the whole run.
        parameters: N, all of them, embedding and head included.
        layers: L.
        hidden: H.
        seq_len: T.
        devices: of the whole run.
        peak_flops_per_s: of one device.
    """
    return tokens_per_s * (6 * parameters + 12 * layers * hidden * seq_len) / (devices * peak_flops_per_s)
