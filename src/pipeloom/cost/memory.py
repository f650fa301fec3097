"""Bytes on the devices of a run: weights, gradients and optimizer state, activations, logits.

Activations of this program are exact (``pipeloom.cost.kept``); those of others follow published formulas
(``pipeloom.cost.foreign``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.foreign import GATHERED_COPIES, layer_kept_bytes, layer_pending_bytes, stage_input_bytes
from pipeloom.cost.kept import Kept
from pipeloom.cost.products import gather_buffer_bytes
from pipeloom.cost.ring import ring_buffer_bytes
from pipeloom.cost.software import Software
from pipeloom.cost.stages import StageKinds, layers_by_kind, num_frozen_stages, of_each, stage_layers, stage_sets
from pipeloom.workload.layout import Shard
from pipeloom.workload.run import Run

_Bytes = TypeVar("_Bytes", float, NDArray[np.float64])

_WIDE_BYTES = 4
"""Bytes of a number in single precision."""

_KEPT_LOGIT_BYTES = 4.0
"""Bytes per logit that the loss of other programs keeps for its backward: probabilities in single precision."""


@dataclass(frozen=True)
class State:
    """Bytes of weights, gradients and optimizer state on one device after sharding."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Their sum."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    def __add__(self, other: "State") -> "State":
        """The sums of both."""
        return State(
            self.weights_bytes + other.weights_bytes,
            self.gradients_bytes + other.gradients_bytes,
            self.optimizer_bytes + other.optimizer_bytes,
        )


_NOTHING = State(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, each part at its peak.

    Attributes:
        weights_bytes: weights, including gathered ones.
        gradients_bytes: gradients, including unreduced ones.
        optimizer_bytes: optimizer state, including a copy of the weights in single precision if there is one.
        activations_bytes: activations of the micro-batches that the schedule holds at once.
        head_bytes: logits and their gradient.
        buffers_bytes: receive buffers.
        reserve_bytes: CUDA context, communicators, workspaces.
        fragmentation_bytes: fragmentation of the allocator, a fraction of activations and logits.
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
        """Their sum."""
        return sum_of_parts(
            self.weights_bytes,
            self.gradients_bytes,
            self.optimizer_bytes,
            self.activations_bytes,
            self.head_bytes,
            self.buffers_bytes,
            self.reserve_bytes,
            self.fragmentation_bytes,
        )


def sum_of_parts(*parts: _Bytes) -> _Bytes:
    """``Memory.total_bytes`` of parts in the order of its fields; of several devices at once if they are arrays."""
    weights, gradients, optimizer, activations, head, buffers, reserve, fragmentation = parts
    return (weights + gradients + optimizer) + (activations + head + buffers) + reserve + fragmentation


def state_bytes(run: Run, parameters: float, software: Software, shard: Shard | None = None) -> State:
    """Bytes of weights, gradients and optimizer state of a device that holds ``parameters``.

    A weight has the size of the precision, a gradient the rest of ``weight_state_bytes``. In single precision both have
    four bytes, and the optimizer keeps no copy of the weights. Buffers for gathered weights and unreduced gradients are
    not included.

    Args:
        run: model and layout.
        parameters: number of parameters, before sharding.
        software: the training program.
        shard: sharding level; ``None`` for the run's.
    """
    kept, optimizer, among = software.weight_state_bytes, software.optimizer_state_bytes, run.shard_size
    shard = shard or run.shard
    if software.has_lanes:
        return _own_state(run, parameters, software, shard if run.holders > 1 else "none")
    # Weights and gradients have 2 + 2 bytes, or 2 + 4 with gradients in single precision: weights are at most half.
    weights = min(run.element_bytes, kept / 2)
    gradients = kept - weights
    if run.precision == "fp32":
        weights, gradients, optimizer = 4.0, 4.0, max(0.0, optimizer - 4.0)
    weights /= among if shard == "full" else 1
    gradients /= among if shard in ("gradients", "full") else 1
    optimizer /= among if shard != "none" else 1
    return State(parameters * weights, parameters * gradients, parameters * optimizer)


def unreduced_bytes(run: Run, software: Software) -> float:
    """Bytes of the gradient of a parameter that is not reduced yet, where gradients are sharded.

    FSDP2 adds the gradients of micro-batches up in the type of the reduction (torch 2.13,
    ``FSDPParam.to_accumulated_grad_if_needed``), which may be wider than the weights.
    """
    whole = state_bytes(run, 1.0, software, "none").gradients_bytes
    return whole if software.has_lanes else max(whole, software.gradient_bytes)


def lasting_bytes(run: Run, parameters: float, software: Software, shard: Shard | None = None) -> float:
    """Bytes of ``state_bytes`` that a device holds during the whole step.

    Where each stage is updated within the step, a gradient is not: it goes back after the update of its stage.
    """
    state = state_bytes(run, parameters, software, shard)
    return state.total_bytes - (state.gradients_bytes if run.updates_stages else 0.0)


def _own_state(run: Run, parameters: float, software: Software, shard: Shard) -> State:
    """``state_bytes`` of this program, whose optimizer works on shards in single precision."""
    among = 1 if shard == "none" else run.shard_size
    is_narrow = run.element_bytes < _WIDE_BYTES
    has_copy = is_narrow and software.wide_weights
    # A study may set gradients of two bytes; without mixed precision they are as wide as the weights.
    gradient = software.weight_state_bytes - run.element_bytes if is_narrow else _WIDE_BYTES
    share = parameters * (_WIDE_BYTES if has_copy else run.element_bytes) / among  # that the optimizer works on
    weights = 0.0 if shard == "full" else parameters * run.element_bytes
    # With level ``optimizer``, each stage keeps its whole gradient buffer; the reduced shard is a part of it.
    gradients = parameters * gradient / (1 if shard == "optimizer" else among)
    # The program's file counts the copy in single precision as optimizer state.
    moments = parameters * (software.optimizer_state_bytes - _WIDE_BYTES) / among
    if run.updates is not None:  # where the weights began, and the outer momentum
        moments += parameters * 2 * _WIDE_BYTES
        if run.delays_average:  # what is averaged, and the weights of all replicas
            moments += parameters * 2 * _WIDE_BYTES
    # Without sharding, and without a copy, the optimizer works on the weights themselves.
    if not has_copy and shard != "none":
        weights += share
    return State(weights, gradients, moments + share * has_copy)


def lent_bytes(run: Run, software: Software, stages: Sequence[int]) -> State:
    """Additional bytes of a tied matrix on the rank of ``stages``, if the first stage lends it to the last one.

    The rank of the last stage holds borrowed weights and accumulates their gradient; that of the first stage receives
    this gradient. If both are one rank, the weights are borrowed in place, except with ``full`` sharding.
    """
    if not (run.shape.tied and run.num_stages > 1 and software.lends_tied):
        return _NOTHING
    first, last = 0 in stages, run.num_stages - 1 in stages
    if not (first or last):
        return _NOTHING
    # Sizes are those of this program, the only one that lends.
    whole = state_bytes(run, run.shape.hidden * -(-run.shape.vocab // run.tp), software, "none")
    is_copied = last and not (first and run.shard != "full")
    gradient = whole.gradients_bytes if run.adapter is None else 0.0  # with adapters the matrix is frozen
    return State(whole.weights_bytes if is_copied else 0.0, gradient, 0.0)


def kept_bytes(run: Run, software: Software) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward; where some have experts, the mean."""
    if not run.shape.has_equal_layers and run.shape.experts is not None:
        window = run.shape.window
        kinds = [run.changed(shape=run.shape.alike(window, experts=one)) for one in (False, True)]
        plain, routed = (kept_bytes(one, software) for one in kinds)
        return plain + (routed - plain) * sum(run.shape.with_experts) / run.shape.layers
    own = Kept(run).layer(run.recompute) if software.has_lanes else layer_kept_bytes(run, software)
    return own + (key_value_bytes(run) if run.slices and run.recompute == "full" else 0.0)


def key_value_bytes(run: Run) -> float:
    """Bytes of one layer's keys and values of one micro-batch, which later token slices read."""
    return Kept(run).key_values()


def frozen_bytes(run: Run, parameters: float) -> float:
    """Bytes of frozen weights on a device of this program: without gradient, optimizer state, and wide copy.

    Args:
        run: model and layout.
        parameters: their number, before sharding.
    """
    return parameters * run.element_bytes / (run.shard_size if run.sharded == "full" else 1)


def stage_kept_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes that it keeps of one micro-batch for its backward, without the loss."""
    stages, own = layers_by_kind(run, software, trained=True), Kept(run)

    def kept_of(stage: StageKinds) -> float:
        kept = sum(count * kept_bytes(alike, software) for alike, count in stage)
        return kept + (own.positions([alike for alike, count in stage if count]) if software.has_lanes else 0)

    kept = of_each(stages, kept_of)
    place, first = first_trained(run, software)
    if first is not None:
        kept[place] -= Kept(first).layer(first.recompute) - Kept(first).layer(first.recompute, begins=True)
    if not software.has_lanes:
        kept[0] += stage_input_bytes(run)
        return kept
    if first is not None and not own.turns() and first.recompute != "full":
        # The only layer of its kind in a stage reads no angles.
        kept[place] -= own.positions([alike for alike, count in stages[place] if count])
        kept[place] += own.positions([alike for alike, count in stages[place] if count > (alike == first)])
    kept[0] += 0 if run.frozen_pieces else own.embedding()
    kept[stage_layers(run, software)[1]] += own.head_norm()
    return kept


def first_trained(run: Run, software: Software) -> tuple[int, Run | None]:
    """The stage of the first layer with adapters, and a run whose layers all are as this one; ``None`` without."""
    if run.adapter is None:
        return 0, None
    kind = run.layer_kinds[run.frozen_pieces - 1]
    place = next(
        stage for stage, kinds in enumerate(layers_by_kind(run, software, trained=True)) if any(n for _, n in kinds)
    )
    return place, run if run.has_equal_layers else run.alike(kind)


def message_bytes(run: Run, software: Software) -> float:
    """Bytes of a message between two stages, on one device."""
    return Kept(run).stage_input() if software.has_lanes else stage_input_bytes(run)


def stage_recomputed_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes that it keeps of one micro-batch whose forward it repeats (action ``R``): its input.

    With token slices also the keys and values of its layers. The input of the first stage, tokens, belongs to the
    batch.
    """
    counts, _ = stage_layers(run, software)
    each = key_value_bytes(run) if run.slices else 0.0
    frozen = num_frozen_stages(run, software)
    input_bytes = message_bytes(run, software)
    if not software.has_lanes:
        return [input_bytes + count * each for count in counts]
    return [((input_bytes if stage else 0.0) + count * each) * (stage >= frozen) for stage, count in enumerate(counts)]


def stage_pending_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes that it keeps of one micro-batch between the two halves of a split backward."""
    (counts, head), own = stage_layers(run, software), Kept(run)
    if not software.has_lanes:
        each = layer_pending_bytes(run)
        return [each * count for count in counts]
    stages = layers_by_kind(run, software)
    pending = of_each(stages, lambda kinds: float(sum(Kept(one).pending_layer() * count for one, count in kinds)))
    if run.shape.sharing is not None:
        sets = stage_sets(run, software)
        again = [count - number for count, number in zip(counts, sets, strict=True)]
        pending = [held - more * own.pending_vectors() for held, more in zip(pending, again, strict=True)]
    pending[0] += own.pending_embedding()
    pending[head] += own.pending_head()
    return pending


def working_bytes(run: Run, software: Software) -> float:
    """Bytes of a layer while it computes: what it recomputes, what products gather, and buffers of a context axis."""
    again = kept_bytes(run.changed(recompute="none"), software) if "full" in run.recompute_kinds else 0.0
    return again + gather_buffer_bytes(run) + ring_buffer_bytes(run)


def kept_logits(run: Run, software: Software) -> float:
    """Bytes that the loss of a micro-batch keeps for its backward."""
    return Kept(run).loss() if software.has_lanes else num_logits(run, software) * _KEPT_LOGIT_BYTES


def pending_logits(run: Run, software: Software) -> float:
    """Bytes that the loss of a micro-batch keeps between the halves of a split backward: the gradient of the logits."""
    return num_logits(run, software) * run.element_bytes


def num_logits(run: Run, software: Software) -> float:
    """Logits of one micro-batch on one device."""
    if software.has_lanes:
        return Kept(run).num_logits()
    is_gathered = software.gathers_logits and run.tp > 1
    return run.tokens * run.shape.vocab / (1 if is_gathered else run.tp)


def logits_bytes(run: Run, software: Software) -> float:
    """Bytes of the logits of one micro-batch and their gradient, at the peak of the loss."""
    is_gathered = software.gathers_logits and run.tp > 1
    each = software.logit_bytes + (GATHERED_COPIES * run.element_bytes if is_gathered else 0)
    # With a soft cap, tanh and its factor are two tensors, of which the backward needs one.
    return num_logits(run, software) * (each + (run.element_bytes if run.shape.logit_softcap else 0))
