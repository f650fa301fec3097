"""Bytes of activations of other training programs, such as Megatron-LM.

Activations of a layer follow arXiv 2205.05198, section 4, generalized to SwiGLU, grouped queries, flash kernels,
fused norms and runs without dropout. Per token, with element size e, hidden size H, query width Q, key width G,
inner width F, a heads, s tokens in a sequence, t tensor-parallel ranks:

    whole            inputs and outputs of two norms 4 e H; unfused norms keep single-precision copies;
                     masks of two dropouts 2 H
    split over t     queries, keys, values, and attention's output e (2 Q + 2 G);
                     GELU's input and output 2 e F, or SwiGLU's gate, up, activated gate and product 4 e F; a fused
                     kernel computes the activated gate again (``Software.fuses_gates``)
    experts          of each of the k experts of a token its row in and out, 2 e H k, whole; their inner width for F,
                     split; of each expert the router's score and its softmax in single precision, 8
    products in      Transformer Engine keeps the inputs of products as it multiplied them (pytorch/module/linear.py,
    8 bits           layernorm_linear.py: saved tensors of a quantized type): 1 in place of e for outputs of norms,
                     the input of the block's second product and rows into experts; and 1 for each element of
                     attention's output, which attention keeps itself as well
    scores           softmax's output e a s, with dropout its mask and output e a s + a s; plain kernels also keep a
                     single-precision copy; flash kernels and selective recomputation keep no scores

With e = 2, F = 4 H and dropout that is the paper's s b H (10 + 24 / t + 5 a s / (H t)). Sequence parallelism divides
the first line by t, too. Full recomputation keeps each layer's input, and all of one layer while it is recomputed.
"""

from dataclasses import replace

from pipeloom.cost.products import NARROW_BYTES, dense_inner
from pipeloom.cost.software import Software
from pipeloom.workload.run import Run

NORM_COPY_BYTES = 8.0
"""An unfused norm keeps its input and its normalized value in single precision, for each element."""

GATHERED_COPIES = 4
"""Copies of each logit that gathering logits over tensor-parallel ranks needs: shards, gathered logits, and the
gradients of both."""

_SCORE_BYTES = 8.0
"""Of each token and expert: the router's output and its softmax, in single precision."""


def layer_activation_bytes(
    run: Run,
    *,
    dropout: bool,
    keeps_gathered: bool = False,
    norm_copies: float = NORM_COPY_BYTES,
    narrow_operands: bool = False,
    fuses_gates: bool = False,
) -> float:
    """Bytes that one layer keeps for the backward of one micro-batch without full recomputation.

    Args:
        run: model and layout.
        dropout: whether dropout masks are kept.
        keeps_gathered: whether, with sequence parallelism, the two gathered inputs of a layer are kept.
        norm_copies: bytes per element that an unfused norm keeps.
        narrow_operands: whether inputs of products are kept in 8 bits.
        fuses_gates: whether a gated block does not keep its activated gate.
    """
    shape, size, operand = run.shape, run.element_bytes, NARROW_BYTES if narrow_operands else run.element_bytes
    norms = 2 * (size + operand)
    whole = shape.hidden * (norms + (2 if dropout else 0) + (0 if run.fused_norm else 2 * norm_copies))
    # All but the block's output, which is the operand of a product; an activated gate, which pipeloom does not keep.
    inner = (shape.kind.inner_kept - 1 + (shape.kind.gates > 1 and not fuses_gates)) * size + operand
    split = size * (2 * shape.query_width + 2 * shape.kv_width) + inner * dense_inner(shape)
    split += operand * shape.query_width if narrow_operands else 0.0
    scores = 0.0
    if run.attention in ("plain", "fused-softmax") and run.recompute != "selective":
        per_score = size + (size + 1 if dropout else 0) + (4 if run.effective_attention == "plain" else 0)
        scores = per_score * shape.heads * run.seq
    gathered = 0.0
    if run.sequence_parallel:
        whole /= run.tp
        gathered = 2 * operand * shape.hidden * (1 - 1 / run.tp) if keeps_gathered else 0.0
    return run.tokens * (whole + gathered + (split + scores) / run.tp) + _experts_bytes(run, operand, inner)


def _experts_bytes(run: Run, operand: float, inner: float) -> float:
    """Bytes that the experts of one layer keep: scores, and for each pair of a token and an expert a row in and out.

    Rows of the tensor-parallel ranks are gathered, so that only the inner width of an expert is divided.

    Args:
        run: model and layout.
        operand: bytes of an element of a product's input, as it is kept.
        inner: bytes that an expert keeps of each element of its inner width.
    """
    experts, shape, size = run.shape.experts, run.shape, run.element_bytes
    if experts is None:
        return 0.0
    of_pair = (size + operand) * shape.hidden + inner * experts.ffn / run.tp
    scores = _SCORE_BYTES * experts.count / (run.tp if run.sequence_parallel else 1)
    return run.computed_pairs * of_pair + run.tokens * scores


def stage_input_bytes(run: Run) -> float:
    """Bytes of one layer's input for one micro-batch; full recomputation keeps it."""
    return run.tokens * run.shape.hidden * run.element_bytes / (run.tp if run.sequence_parallel else 1)


def layer_pending_bytes(run: Run) -> float:
    """Bytes that one layer keeps of one micro-batch between the two halves of a split backward.

    The inputs of its matrix products and the gradients of their outputs: 32 s b H in half precision, without grouped
    queries and with F = 4 H (arXiv 2401.10241, table 1).
    """
    shape, size = run.shape, run.element_bytes
    whole = 4 * size * shape.hidden / (run.tp if run.sequence_parallel else 1)
    split = size * (2 * shape.query_width + 2 * shape.kv_width + (1 + shape.kind.gates) * shape.inner) / run.tp
    return run.tokens * (whole + split)


def layer_kept_bytes(run: Run, software: Software) -> float:
    """Bytes that one layer keeps of one micro-batch from its forward to its backward."""
    if run.recompute == "full":
        return stage_input_bytes(run)
    again = software.selective_share if run.recompute == "selective" else 0.0
    kept = layer_activation_bytes(
        replace(run, recompute="none") if again else run,
        dropout=software.dropout,
        keeps_gathered=software.keeps_gathered,
        norm_copies=software.norm_copy_bytes,
        narrow_operands=software.fuses_casts and bool(run.products),
        fuses_gates=software.fuses_gates,
    )
    return kept - again * (kept - stage_input_bytes(run))
