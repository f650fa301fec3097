"""Bytes on the fullest device: state of the weights, activations in flight, logits, buffers.

Activations of a layer follow arXiv 2205.05198, section 4, generalized to SwiGLU, grouped queries, flash kernels,
fused norms and runs without dropout. For each token, with element size e, hidden size H, key width G, inner width F,
a heads, s tokens in a sequence, t tensor-parallel ranks:

    whole            inputs and outputs of two norms 4 e H; unfused norms keep single-precision copies;
                     masks of two dropouts 2 H
    split over t     queries, keys, values, and attention's output e (2 H + 2 G);
                     GELU's input and output 2 e F, or SwiGLU's gate, up, activated gate and product 4 e F
    scores           softmax's output e a s, with dropout its mask and output e a s + a s; plain kernels keep a
                     single-precision copy more; flash and selective recomputation keep none

With e = 2, F = 4 H and dropout that is the paper's s b H (10 + 24 / t + 5 a s / (H t)). Sequence parallelism divides
the first line by t as well. Full recomputation keeps each layer's input, and one whole layer while it is done again.
"""

from dataclasses import dataclass

from pipeloom.cost.analytic import layers_of_stages, rank_parameters
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software

NORM_COPY_BYTES = 8.0
"""An unfused norm keeps its input and its normalized value in single precision, for each element."""

GATHERED_COPIES = 4
"""Copies of each logit that gathering over tensor-parallel ranks makes: pieces and the whole, with their gradients."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights_bytes: weights, gradients and optimizer state.
        activations_bytes: of the micro-batches in flight.
        head_bytes: logits and their gradient.
        reserve_bytes: context, communicators, workspaces.
        fragmentation_bytes: what the allocator loses.
    """

    weights_bytes: float
    activations_bytes: float
    head_bytes: float
    reserve_bytes: float
    fragmentation_bytes: float

    @property
    def total_bytes(self) -> float:
        """Everything."""
        return (
            self.weights_bytes
            + self.activations_bytes
            + self.head_bytes
            + self.reserve_bytes
            + self.fragmentation_bytes
        )


def layer_activation_bytes(
    run: Run, *, dropout: bool, keeps_gathered: bool = False, norm_copies: float = NORM_COPY_BYTES
) -> float:
    """Bytes that one layer keeps for the backward of one micro-batch without full recomputation.

    Args:
        run: what is trained.
        dropout: whether masks are kept.
        keeps_gathered: whether the two inputs that sequence parallelism gathers are kept whole.
        norm_copies: bytes that an unfused norm keeps for each element.
    """
    shape, size = run.shape, run.element_bytes
    whole = shape.hidden * (4 * size + (2 if dropout else 0) + (0 if run.fused_norm else 2 * norm_copies))
    inner = (4 if shape.mlp == "swiglu" else 2) * size * shape.ffn
    split = size * (2 * shape.hidden + 2 * shape.kv_width) + inner
    scores = 0.0
    if run.attention in ("plain", "fused-softmax") and run.recompute != "selective":
        per_score = size + (size + 1 if dropout else 0) + (4 if run.effective_attention == "plain" else 0)
        scores = per_score * shape.heads * run.seq
    gathered = 0.0
    if run.sequence_parallel:
        whole /= run.tp
        gathered = 2 * size * shape.hidden * (1 - 1 / run.tp) if keeps_gathered else 0.0
    return run.tokens * (whole + gathered + (split + scores) / run.tp)


def stage_input_bytes(run: Run) -> float:
    """Bytes of one layer's input for one micro-batch, which full recomputation keeps."""
    return run.tokens * run.shape.hidden * run.element_bytes / (run.tp if run.sequence_parallel else 1)


def state_bytes(run: Run, parameters: float, software: Software) -> float:
    """Bytes of weights, gradients and optimizer state of a device that holds ``parameters``.

    What data parallelism divides: nothing; the optimizer's state; also the gradients (half of the rest); everything.
    """
    kept, sharded = software.weight_state_bytes, software.optimizer_state_bytes
    match run.shard:
        case "none":
            return parameters * (kept + sharded)
        case "optimizer":
            return parameters * (kept + sharded / run.dp)
        case "gradients":
            return parameters * (kept / 2 + (kept / 2 + sharded) / run.dp)
        case "full":
            return parameters * (kept + sharded) / run.dp


def rank_memory(run: Run, software: Software, rank: int, in_flight: float) -> Memory:
    """Memory of one pipeline rank.

    Args:
        run: what is trained.
        software: with what.
        rank: pipeline rank.
        in_flight: most stage inputs it holds at once, as its row says (``Schedule.peak_stage_inputs``).
    """
    counts, head = layers_of_stages(run.shape, run.num_stages, software.partition)
    layers = sum(counts[rank :: run.pp]) / run.loops
    whole = layer_activation_bytes(
        run, dropout=software.dropout, keeps_gathered=software.keeps_gathered, norm_copies=software.norm_copy_bytes
    )
    if run.recompute == "full":
        activations = in_flight * layers * stage_input_bytes(run) + whole
    else:
        activations = in_flight * layers * whole
    if rank == 0:
        activations += in_flight / run.loops * stage_input_bytes(run)
    logits = 0.0
    if head % run.pp == rank:
        is_gathered = software.gathers_logits and run.tp > 1
        each = software.logit_bytes + (GATHERED_COPIES * run.element_bytes if is_gathered else 0)
        logits = run.tokens * run.shape.vocab / (1 if is_gathered else run.tp) * each
    weights = state_bytes(run, rank_parameters(run, software)[rank], software)
    lost = software.fragmentation * (activations + logits)
    return Memory(weights, activations, logits, software.reserve_bytes, lost)
