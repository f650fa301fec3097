"""What a training program does with a machine: a few facts, and the few efficiencies that are calibrated."""

from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.workload.layout import Shard
from pipeloom.workload.optimizers import OPTIMIZERS, Optimizer

Division = Literal["even", "uniform-items", "light-ends", "by-cost", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Physical efficiencies and overheads of one program on one machine: what calibration may change.

    The values here are those of no program in particular: a calibration starts from them and is pulled towards them,
    so that what few rows do not determine stays plausible.

    Attributes:
        matmul: fraction of the device's reachable matmul curve.
        kernel: the fixed time of a kernel, as a multiple of the device file's.
        memory: fraction of the memory bandwidth that element-wise kernels reach.
        batched_matmul: fraction of the curve that attention's products of plain kernels reach.
        flash1, flash2: FLOP/s of the flash kernels with heads of 128 as a fraction of the peak.
        softmax_bytes: bytes that plain attention moves for each score, forward; the fused kernel moves 4.
        norm_bytes: bytes that an unfused norm moves for each element, forward; the fused one moves 4.
        loss_bytes: bytes that the loss moves for each logit, in each direction.
        accumulation_bytes: bytes moved for each parameter and micro-batch to add its gradient to those before.
        launch: the host's seconds for each kernel, as a multiple of the device file's.
        tensor_bus: fraction of the bus bandwidth of tensor-parallel collectives.
        data_bus: fraction of the bus bandwidth of data-parallel collectives.
        p2p: fraction of a link's bandwidth between stages.
        collective_s: the host's seconds for each tensor-parallel collective.
        drag_s: more of them for each tensor-parallel rank while stages exchange over nodes.
        exchange_s: fixed seconds of each exchange between stages.
        microbatch_s: fixed seconds of each micro-batch.
        step_s: fixed seconds of each step.
        optimizer_bytes: bytes moved for each parameter by the optimizer, casts and norms of gradients.
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
"""Efficiencies that are fractions, with the most that each can be. The curve that ``matmul`` is a fraction of was
measured, and its measurement may be a little low."""
SHARES = ("overlap", "fragmentation")
"""Other fractions of a program, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A training program.

    Attributes:
        name: for people.
        partition: how it divides layers: evenly; evenly over [embedding, layers, norm, head]; first and last
            stage one layer less; so that the FLOPs of the stages are as even as can be.
        dropout: whether it trains with dropout.
        gradient_bytes: bytes of each gradient in the data-parallel reduction.
        gather_bytes: bytes of each weight that is gathered after a sharded step.
        overlap: fraction of the reduction that hides behind the backward of the last micro-batch.
        has_reduction_lane: whether data-parallel collectives have a lane of their own beside the pipeline; otherwise
            they follow it.
        lends_tied: whether the last stage borrows a tied matrix for a step and returns its gradient, by messages beside
            the pipeline; otherwise both stages hold it, and its gradients are reduced after the pipeline. For programs
            that are not blocking.
        is_blocking: whether a rank stands still while it sends or receives between stages.
        blocks_split: whether that holds for schedules that split backwards as well; sail-sg/zero-bubble posts their
            sends and receives and waits where a tensor is used.
        is_both_ways: whether a rank sends and receives at once; otherwise one after the other.
        scatter_gather: whether a message between stages is cut over tensor-parallel ranks.
        reduces_whole: whether gradients are all-reduced although the optimizer's state is sharded; otherwise they are
            reduce-scattered, half the traffic.
        overlaps_steps: whether a rank begins its next step while others are still in the last one, because nothing is
            agreed on between them (arXiv 2401.10241, section 4); otherwise all wait for the slowest.
        extra_drain_slots: micro-batches' time that a pipeline was observed to need to fill and drain beyond the
            P - 1 that its schedule explains.
        drain_seq: longest sequences that this was observed with.
        gathered_layers: layers whose weights a device has whole at once, beside the embedding and the head, where
            everything is sharded and schedules have no gathers: the one that computes and the next one (FSDP,
            arXiv 2304.11277, section 3.3.2).
        weight_state_bytes: bytes held for each parameter that data parallelism never shards at ``optimizer``.
        optimizer_state_bytes: bytes held for each parameter that it shards at ``optimizer``.
        keeps_gathered: whether layers keep their inputs whole although sequence parallelism splits them.
        norm_copy_bytes: bytes that an unfused norm keeps for each element: copies in single precision.
        gathers_logits: whether every tensor-parallel rank computes the loss on the whole vocabulary.
        logit_bytes: bytes held for each logit at the worst moment of the loss.
        reserve_bytes: context, communicators and workspaces.
        fragmentation: allocator's loss as a fraction of activations.
        efficiency: what was calibrated.
        cluster: the machine that it was calibrated on, by name.
        sets: beginnings of the names of the sets of measurements that were made with it.
        attentions: the attention kernels of those; empty for all.
        families: schedules that it runs; empty for all.
        shards: what its data parallelism can share out; empty for every level.
        strategies: of the planner that it runs; empty for none.
    """

    name: str
    cluster: str = "dgx-a100"
    sets: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    shards: tuple[Shard, ...] = ()
    strategies: tuple[str, ...] = ()
    partition: Division = "even"
    dropout: bool = False
    gradient_bytes: float = 4
    gather_bytes: float = 2
    overlap: float = 0.0
    has_reduction_lane: bool = False
    lends_tied: bool = False
    is_blocking: bool = True
    blocks_split: bool = True
    is_both_ways: bool = True
    scatter_gather: bool = False
    reduces_whole: bool = True
    overlaps_steps: bool = False
    extra_drain_slots: float = 0
    drain_seq: float = 0
    gathered_layers: int = 2
    weight_state_bytes: float = 4
    optimizer_state_bytes: float = 12
    keeps_gathered: bool = False
    norm_copy_bytes: float = 8
    gathers_logits: bool = False
    logit_bytes: float = 10
    reserve_bytes: float = 1.5e9
    fragmentation: float = 0.05
    efficiency: Efficiency = Efficiency()

    @property
    def has_lanes(self) -> bool:
        """Whether all exchanges are actions of the schedule on lanes of their own, as ``pipeloom train`` runs them."""
        return self.has_reduction_lane and not self.is_blocking


def with_optimizer(software: Software, optimizer: Optimizer) -> Software:
    """The program with another update rule than AdamW, whose two moments its file counts.

    An update reads and writes each number that it keeps.
    """
    more = optimizer.state_bytes - OPTIMIZERS["adamw"].state_bytes
    if not more:
        return software
    use = replace(software.efficiency, optimizer_bytes=software.efficiency.optimizer_bytes + 2 * more)
    return replace(software, optimizer_state_bytes=software.optimizer_state_bytes + more, efficiency=use)
