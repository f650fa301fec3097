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
the first line by t as well. Full recomputation keeps each layer's input, and one whole layer while it is done again;
where sequences are cut into token slices, also keys and values, which later slices attend to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeloom.cost.analytic import kinds_of, layers_by_recompute, stage_layers
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.workload.layout import Shard

NORM_COPY_BYTES = 8.0
"""An unfused norm keeps its input and its normalized value in single precision, for each element."""

GATHERED_COPIES = 4
"""Copies of each logit that gathering over tensor-parallel ranks makes: pieces and the whole, with their gradients."""


@dataclass(frozen=True)
class State:
    """Bytes of weights, gradients and optimizer state on one device, as data parallelism leaves them."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Everything."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, at the worst moment of each part.

    Attributes:
        weights_bytes: weights, and those of others while they are gathered.
        gradients_bytes: gradients, and whole ones until they are reduced.
        optimizer_bytes: the optimizer's state, with a copy of the weights in single precision where it keeps one.
        activations_bytes: of the micro-batches in flight, as the schedule holds them.
        head_bytes: logits and their gradient.
        buffers_bytes: tensors that are received ahead.
        reserve_bytes: context, communicators, workspaces.
        fragmentation_bytes: what the allocator loses, a fraction of activations and logits.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    head_bytes: float
    buffers_bytes: float
    reserve_bytes: float
    fragmentation_bytes: float

    @property
    def total_bytes(self) -> float:
        """Everything."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        working = self.activations_bytes + self.head_bytes + self.buffers_bytes
        return state + working + self.reserve_bytes + self.fragmentation_bytes


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


def state_bytes(run: Run, parameters: float, software: Software, shard: Shard | None = None) -> State:
    """Bytes of weights, gradients and optimizer state of a device that holds ``parameters``.

    What data parallelism divides: nothing; the optimizer's state; also the gradients; everything. Weights have the
    size of the precision and gradients the rest of what the program holds beside the optimizer's state. In single
    precision both have four bytes, and the optimizer keeps no copy of the weights. ``shard`` replaces the run's level.
    """
    kept, optimizer, among = software.weight_state_bytes, software.optimizer_state_bytes, run.shard_size
    shard = shard or run.shard
    weights = min(run.element_bytes, kept / 2)
    gradients = kept - weights
    if run.precision == "fp32":
        weights, gradients, optimizer = 4.0, 4.0, max(0.0, optimizer - 4.0)
    weights /= among if shard == "full" else 1
    gradients /= among if shard in ("gradients", "full") else 1
    optimizer /= among if shard != "none" else 1
    return State(parameters * weights, parameters * gradients, parameters * optimizer)


def lent_bytes(run: Run, software: Software, stages: Sequence[int]) -> State:
    """Bytes of a tied matrix beside the parameters of a rank, where the first stage lends it to the last one.

    The rank of the last stage has borrowed weights and collects a gradient for them; that of the first stage receives
    this gradient. On one rank the weights are borrowed in place unless they are sharded at all times.
    """
    first, last = 0 in stages, run.num_stages - 1 in stages
    if not (run.shape.tied and run.num_stages > 1 and software.lends_tied and (first or last)):
        return State(0.0, 0.0, 0.0)
    whole = state_bytes(run, run.shape.embedding_parameters / run.tp, software, "none")
    is_copied = last and not (first and run.shard != "full")
    return State(whole.weights_bytes if is_copied else 0.0, whole.gradients_bytes, 0.0)


def kept_bytes(run: Run, software: Software) -> float:
    """Bytes that one layer keeps of one micro-batch from its forward to its backward."""
    if run.recompute != "full":
        return _whole_bytes(run, software)
    return stage_input_bytes(run) + (key_value_bytes(run) if run.slices else 0.0)


def key_value_bytes(run: Run) -> float:
    """Bytes of one layer's keys and values of one micro-batch, which later token slices need."""
    return 2 * run.tokens * run.shape.kv_width * run.element_bytes / run.tp


def stage_kept_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes that its layers keep of one micro-batch from forward to backward."""
    if run.recompute_layers is None:
        all_alike = kept_bytes(run, software)
        return [count * all_alike for count in stage_layers(run, software)[0]]
    stages = layers_by_recompute(run, software)
    each = {kind: kept_bytes(alike, software) for kind, alike in kinds_of(stages).items()}
    return [sum(count * each[alike.recompute] for alike, count in stage) for stage in stages]


def layer_pending_bytes(run: Run) -> float:
    """Bytes that one layer keeps of one micro-batch between the two halves of a split backward.

    The inputs of its matrix products and the gradients of their outputs: 32 s b H in half precision, without grouped
    queries and with F = 4 H (arXiv 2401.10241, table 1).
    """
    shape, size = run.shape, run.element_bytes
    whole = 4 * size * shape.hidden / (run.tp if run.sequence_parallel else 1)
    gates = 2 if shape.mlp == "swiglu" else 1
    split = size * (2 * shape.hidden + 2 * shape.kv_width + (1 + gates) * shape.ffn) / run.tp
    return run.tokens * (whole + split)


def stage_pending_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes that its layers keep of one micro-batch between the two halves of a split backward."""
    each = layer_pending_bytes(run)
    return [each * count for count in stage_layers(run, software)[0]]


def _whole_bytes(run: Run, software: Software) -> float:
    return layer_activation_bytes(
        run, dropout=software.dropout, keeps_gathered=software.keeps_gathered, norm_copies=software.norm_copy_bytes
    )


def working_bytes(run: Run, software: Software) -> float:
    """Bytes of the layer that is being recomputed; 0 without full recomputation."""
    return _whole_bytes(run, software) if "full" in run.recompute_kinds else 0.0


def num_logits(run: Run, software: Software) -> float:
    """Logits of one micro-batch on one device."""
    is_gathered = software.gathers_logits and run.tp > 1
    return run.tokens * run.shape.vocab / (1 if is_gathered else run.tp)


def logits_bytes(run: Run, software: Software) -> float:
    """Bytes of the logits of one micro-batch and of their gradient, at the worst moment of the loss."""
    is_gathered = software.gathers_logits and run.tp > 1
    each = software.logit_bytes + (GATHERED_COPIES * run.element_bytes if is_gathered else 0)
    return num_logits(run, software) * each
