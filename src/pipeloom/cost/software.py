"""Training programs: facts about their execution, and their calibrated efficiencies."""

from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.workload.launchers import WITH_EXPERTS, Launcher
from pipeloom.workload.layout import Shard
from pipeloom.workload.optimizers import OPTIMIZERS, Optimizer

Division = Literal["even", "uniform-items", "light-ends", "by-cost", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Efficiencies and overheads of one program on one machine, the parameters of calibration.

    The defaults are general values, not those of a certain program. A calibration starts from them and is regularized
    towards them, so that parameters which few measurements do not determine stay plausible.

    Attributes:
        matmul: fraction of the device's matmul curve.
        kernel: fixed time of a kernel, as a multiple of ``Device.kernel_s``.
        memory: fraction of the memory bandwidth that element-wise kernels reach.
        batched_matmul: fraction of the curve that the batched products of plain attention reach.
        flash1, flash2: FLOP/s of the flash kernels for heads of size 128, as a fraction of the peak.
        softmax_bytes: bytes that unfused softmax moves per score, forward; the fused one reads and writes each once.
        norm_bytes: bytes that an unfused norm moves per element, forward; the fused one reads and writes each once.
        loss_bytes: bytes that the loss moves per logit, forward and backward each.
        accumulation_bytes: bytes moved per parameter and micro-batch to accumulate gradients.
        launch: the host's time to launch a kernel, as a multiple of ``Device.launch_s``.
        tensor_bus: fraction of the bus bandwidth that tensor-parallel collectives reach.
        data_bus: fraction of the bus bandwidth that data-parallel collectives reach.
        p2p: fraction of a link's bandwidth that messages between stages reach.
        collective_s: the host's seconds for each tensor-parallel collective.
        drag_s: additional host seconds for each collective and tensor-parallel rank, if stages communicate between
            nodes.
        exchange_s: fixed seconds of each exchange between stages.
        microbatch_s: fixed seconds of each micro-batch.
        step_s: fixed seconds of each step.
        optimizer_bytes: bytes moved per parameter by the optimizer, casts and gradient norms.
    """

    matmul: float = 0.92
    kernel: float = 1.5
    memory: float = 0.8
    batched_matmul: float = 0.36
    flash1: float = 0.35
    flash2: float = 0.45
    softmax_bytes: float = 20.0
    norm_bytes: float = 30.0
    loss_bytes: float = 14.0
    accumulation_bytes: float = 8.0
    launch: float = 3.0
    tensor_bus: float = 0.7
    data_bus: float = 0.5
    p2p: float = 0.7
    collective_s: float = 60e-6
    drag_s: float = 0.0
    exchange_s: float = 50e-6
    microbatch_s: float = 1e-3
    step_s: float = 1e-3
    optimizer_bytes: float = 40.0


FRACTIONS: dict[str, float] = {
    "matmul": 1.05,
    "memory": 1.0,
    "batched_matmul": 1.0,
    "flash1": 1.0,
    "flash2": 1.0,
    "tensor_bus": 1.0,
    "data_bus": 1.0,
    "p2p": 1.0,
}
"""Efficiencies that are fractions -> upper limit; for ``matmul`` above 1, since the measured curve may be a little
low."""
SHARES = ("overlap", "replica_overlap", "gather_overlap", "fragmentation", "selective_share")
"""Attributes of ``Software`` that are fractions, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program.

    Attributes:
        name: in messages and reports.
        partition: how layers are divided into stages (``pipeloom.cost.stages.layers_of_stages``); ``balanced``: so that
            the FLOPs of the slowest rank are minimal.
        dropout: whether it trains with dropout.
        gradient_bytes: bytes of each gradient in the data-parallel reduction.
        gather_bytes: bytes of each weight in the all-gather after a sharded update.
        overlap: share of the last micro-batch's backward that can overlap with the reduction.
        replica_overlap: the same share where nothing is sharded (PyTorch's DistributedDataParallel), if it is larger.
        gather_overlap: share of a micro-batch's forward that can overlap with the gather of updated weights.
        fuses_accumulation: whether the product of a weight gradient adds to the accumulated gradient, so that it takes
            the longer of its compute and its bytes, not both.
        fuses_softmax: whether a compiler fuses the softmax of plain attention, which then reads and writes a score once
            (XLA).
        overlaps_columns: whether tensor-parallel exchanges of a column-parallel matrix overlap with its products in the
            backward.
        selective_share: share of a layer's products and exchanges that selective recomputation repeats, besides all
            element-wise kernels (torchtitan: every second product, and gathers but no sums; the output of attention is
            kept); 0: the core of attention alone (arXiv 2205.05198).
        gathers_layers: whether fully sharded weights are gathered layer by layer while the layer before computes, in
            the forward and the backward of each micro-batch, and gradients are scattered in the same way (FSDP). With a
            pipeline once a step (``gathers_once``).
        fuses_casts: whether norms, activations and their gradients write operands of products in 8 bits
            (Transformer Engine, LayerNormLinear and LayerNormMLP), and inputs of products are kept so for the backward.
            Other operands are cast.
        fuses_gates: whether a gated block keeps the inputs of its activation and its output alone; otherwise the
            activated gate, too (Megatron's ``SwiGLUFunction`` computes that again).
        native_attention: whether flash kernels are written for the device: cuDNN's, which Transformer Engine prefers
            from the H100 on (``get_attention_backend``).
        has_reduction_lane: whether data-parallel collectives run on a lane of their own during the pipeline; otherwise
            after it.
        lends_tied: whether the first stage sends a tied matrix to the last one for each step and receives its gradient;
            otherwise both stages hold it, and its gradients are all-reduced after the pipeline. Only for programs that
            are not blocking.
        is_blocking: whether a rank does not compute while it sends or receives between stages.
        blocks_split: whether ``is_blocking`` also holds for schedules with split backwards; sail-sg/zero-bubble posts
            their sends and receives, and waits where a tensor is used.
        is_both_ways: whether a rank sends and receives at the same time; otherwise one after the other.
        scatter_gather: whether each tensor-parallel rank sends a share of a message between stages.
        reduces_whole: whether gradients are all-reduced although the optimizer state is sharded; otherwise they are
            reduce-scattered, half the traffic.
        owns_tensors: whether a sharded optimizer gives each parameter as a whole to one rank, and the ranks send theirs
            to all others after the update, one after another; otherwise all send a part at once.
        overlaps_steps: whether a rank begins its next step before others have ended the last one, since steps end
            without synchronization (arXiv 2401.10241, section 4); otherwise all wait for the slowest.
        extra_drain_slots: observed time to fill and drain a pipeline beyond the P - 1 slots of its schedule, in
            micro-batches.
        drain_seq: longest sequences of that observation.
        drain_models: the models that it was made with; others are predicted without it.
        pads_vocabulary: whether the rows of the vocabulary matrix are padded, so that its products are aligned.
        is_composed: whether its step times are a simulator's sums of profiled layers, without recomputation, and of
            tabulated all-reduces, which the host's launches therefore never hide.
        gathered_layers: with ``full`` sharding and without a reduction lane, number of layers besides embedding and
            head whose weights a device holds gathered: the current and the next one (FSDP, arXiv 2304.11277, section
            3.3.2).
        weight_state_bytes: bytes per parameter of weights and gradients.
        optimizer_state_bytes: bytes per parameter of optimizer state.
        wide_weights: whether these include a copy of the weights in single precision, if the weights are narrower.
        keeps_gathered: whether layers keep their inputs gathered although sequence parallelism splits them.
        norm_copy_bytes: bytes per element that an unfused norm keeps: copies in single precision.
        gathers_logits: whether every tensor-parallel rank computes the loss over the whole vocabulary.
        logit_bytes: bytes per logit at the peak of the loss.
        reserve_bytes: CUDA context, communicators and workspaces.
        reports_first: whether its measurements have the memory of the first pipeline stage's devices, not of the
            fullest.
        fragmentation: fragmentation of the allocator as a fraction of activations and logits.
        efficiency: calibrated efficiencies.
        optimizer: the update rule, if it updates whole matrices: ``optimizer_state_bytes`` then lacks its state, which
            ``pipeloom.cost.matrices`` has; ``None`` for an elementwise one.
        cluster: name of the cluster that it was calibrated on.
        sets: prefixes of the names of its sets of measurements.
        attentions: attention kernels in these sets; empty for all.
        families: families of schedules that it runs; empty for all.
        shards: sharding levels that it supports; empty for all.
        strategies: strategies of the planner that it supports; empty for none.
    """

    name: str
    cluster: str = "dgx-a100"
    sets: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    drain_models: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()
    strategies: tuple[str, ...] = ()
    partition: Division = "even"
    dropout: bool = False
    gradient_bytes: float = 4
    gather_bytes: float = 2
    overlap: float = 0.0
    replica_overlap: float = 0.0
    gather_overlap: float = 0.0
    fuses_accumulation: bool = False
    fuses_softmax: bool = False
    overlaps_columns: bool = False
    selective_share: float = 0.0
    gathers_layers: bool = False
    fuses_casts: bool = False
    fuses_gates: bool = False
    native_attention: bool = False
    has_reduction_lane: bool = False
    lends_tied: bool = False
    is_blocking: bool = True
    blocks_split: bool = True
    is_both_ways: bool = True
    scatter_gather: bool = False
    reduces_whole: bool = True
    owns_tensors: bool = False
    overlaps_steps: bool = False
    extra_drain_slots: float = 0
    drain_seq: float = 0
    pads_vocabulary: bool = True
    is_composed: bool = False
    gathered_layers: int = 2
    weight_state_bytes: float = 4
    optimizer_state_bytes: float = 12
    wide_weights: bool = True
    keeps_gathered: bool = False
    norm_copy_bytes: float = 8
    gathers_logits: bool = False
    logit_bytes: float = 10
    reserve_bytes: float = 1.5e9
    reports_first: bool = False
    fragmentation: float = 0.05
    efficiency: Efficiency = Efficiency()
    optimizer: Optimizer | None = None

    def __hash__(self) -> int:
        """Hash of the name, which is fast: programs are keys of caches."""
        return hash(self.name)

    @property
    def has_lanes(self) -> bool:
        """Whether all communication is actions on lanes of their own, as in ``pipeloom train``."""
        return self.has_reduction_lane and not self.is_blocking

    @property
    def takes_experts(self) -> bool:
        """Whether it trains layers with experts."""
        return self.has_lanes or self.name in WITH_EXPERTS

    @property
    def has_narrow_gradients(self) -> bool:
        """Whether gradients of weights in two bytes add up, and are reduced, in two bytes as well."""
        return self.gradient_bytes <= 2 and self.weight_state_bytes <= 4

    def num_pieces(self, layers: int) -> int:
        """Pieces of a model that may be stages: layers, and embedding and head where these are balanced, too."""
        return layers + 2 if self.partition == "balanced" else layers

    def gathers_once(self, num_stages: int) -> bool:
        """Whether fully sharded weights are gathered once a step, and gradients scattered once, for all micro-batches.

        FSDP does with a pipeline, since gathers of each micro-batch would not overlap (pytorch/torchtitan,
        ``reshard_after_forward``).
        """
        return self.gathers_layers and num_stages > 1


def started_by(software: Software, launcher: Launcher) -> Software:
    """The program with balanced stages, if it is started with any layers in each stage."""
    return replace(software, partition="balanced") if launcher.names_stages else software


def with_optimizer(software: Software, optimizer: Optimizer, *, wide_weights: bool = True) -> Software:
    """The program with another update rule than AdamW, for which its file is.

    Additional bytes of optimizer state are read and written once per update.

    Args:
        software: the training program.
        optimizer: its update rule.
        wide_weights: whether it updates a copy of the weights in single precision, where they are narrower.
    """
    software = software if wide_weights else replace(software, wide_weights=False)
    usual, has_matrices = OPTIMIZERS["adamw"].state_bytes, optimizer.matrices is not None and software.has_lanes
    more = optimizer.state_bytes - usual
    if not more and not has_matrices:
        return software
    use = replace(software.efficiency, optimizer_bytes=software.efficiency.optimizer_bytes + 2 * more)
    software = replace(software, efficiency=use)
    if has_matrices:
        return replace(software, optimizer_state_bytes=software.optimizer_state_bytes - usual, optimizer=optimizer)
    return replace(software, optimizer_state_bytes=software.optimizer_state_bytes + more)
