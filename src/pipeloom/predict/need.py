"""Lower bound of a training run's memory, checked before it starts.

A run that is refused could not have run, since every part is a lower bound: weights, gradients and optimizer state by
closed forms; of activations, only the inputs of matrix products; of the schedule, only its rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeloom.catalog import load_software
from pipeloom.config import RunConfig
from pipeloom.cost.memory import frozen_bytes, state_bytes
from pipeloom.cost.software import Software
from pipeloom.cost.stages import (
    frozen_layers,
    layer_parameters,
    rank_parameters,
    shared_ranks,
    stage_layers,
    trained_rank_parameters,
)
from pipeloom.predict.describe import described_run, with_update_of
from pipeloom.workload.dtypes import precision_of
from pipeloom.workload.run import Run

_TOKEN_BYTES = 8
_WIDE_BYTES = 4
_PROCESS_BYTES = 8e6
"""Bytes of an idle process: the pages that a forked interpreter does not share."""
# The smallest tokenizer: 256 bytes and end of text.
_LEAST_VOCABULARY = 257

Parts = dict[str, float]
"""Name of a part -> bytes."""


class Need(NamedTuple):
    """Lower bound of the memory of one rank.

    Attributes:
        device: parts in the memory of its device.
        host: parts in the memory of its host.
    """

    device: Parts
    host: Parts


def need_by_pipeline_rank(config: RunConfig, *, verifies: bool = False, trains: bool = True) -> tuple[Need, ...]:
    """For each pipeline rank a lower bound of the memory of one process.

    Args:
        config: without problems, with the sizes of its model.
        verifies: whether the run only verifies gradients, without an optimizer.
        trains: whether the run has more than weights.
    """
    software, run = with_update_of(load_software("pipeloom"), config), _run(config)
    state = [_state(config, software, held, verifies=verifies) for held in _held(run, software)]
    activations, choice, layout = _activations(config, run, software), config.choice(), config.layout
    if not trains:
        state, activations = [{"weights": one["weights"]} for one in state], [0.0] * layout.pp
    head = choice.placed().rank_by_stage[-1]
    # The lengths of auto slices are chosen later, and may be one token.
    parts = layout.num_slices if layout.token_slices != "auto" else run.seq
    logits = run.tokens / parts * run.shape.vocab / run.tp * max(4.0, run.element_bytes * _width(config))
    host = {
        "processes": _PROCESS_BYTES,
        "tokens of the batch": float(_TOKEN_BYTES * layout.batch_size * (config.data.seq_len + 1)),
        "the schedule": float(choice.least_bytes),
    }
    return tuple(
        Need({**state[rank], "activations": activations[rank], "logits": logits * (rank == head)}, host)
        for rank in range(layout.pp)
    )


def copy_bytes(config: RunConfig, run: Run, software: Software) -> tuple[float, ...]:
    """For each pipeline rank the host memory of a process for the copy that a thread writes as a checkpoint.

    The ranks that hold the same elements write a share each; of tensor-parallel ranks, the first one, which also
    writes what all of them hold. It is no part of what a run needs: without room for it, training waits.

    Args:
        config: determines whether checkpoints are written beside steps.
        run: model and layout.
        software: with the optimizer's state.
    """
    if not config.checkpoint.background or not config.saves_between_steps or not software.has_lanes:
        return (0.0,) * run.pp
    return _written_bytes(config, run, software)


def checkpoint_bytes(config: RunConfig, run: Run, software: Software) -> float:
    """Bytes of a checkpoint, of all processes; the arguments are those of ``copy_bytes``.

    Of frozen weights it has the values alone, in the precision of the run.
    """
    return sum(_written_bytes(config, run, software)) * run.num_devices / run.pp


def _written_bytes(config: RunConfig, run: Run, software: Software) -> tuple[float, ...]:
    """For each pipeline rank the bytes that one of its processes writes."""
    # Weights as the optimizer has them, and its state.
    wide = (_WIDE_BYTES if config.optimizer.wide_weights else run.element_bytes) + config.optimizer.rule.state_bytes
    alone = 0
    if run.updates is not None:  # each replica has moments of its own, and all have the outer momentum
        wide, alone = 2 * _WIDE_BYTES, config.optimizer.rule.state_bytes
    others = _written_by_others(run, software)  # where layers are shared, experts are not

    def written(one: Run, whole: float, own: float, less: float) -> float:
        return ((own - less) * wide + (whole - own) * run.element_bytes) / one.holders + own * alone

    return tuple(
        sum(written(*each, less if each[0].segment != "experts" else 0.0) for each in held)
        for held, less in zip(_held(run, software), others, strict=True)
    )


def _written_by_others(run: Run, software: Software) -> list[float]:
    """For each pipeline rank the parameters of shared layers that other pipeline ranks write."""
    found = [0.0] * run.pp
    for ranks in shared_ranks(run, software):
        for rank in ranks:
            found[rank] += layer_parameters(run) * (1 - 1 / len(ranks))
    return found


def _held(run: Run, software: Software) -> list[list[tuple[Run, float, float]]]:
    """For each pipeline rank its segments of the state, each with its parameters and with those that are trained."""
    of_segments = [
        [
            (one, whole, own)
            for whole, own in zip(rank_parameters(one, software), trained_rank_parameters(one, software), strict=True)
        ]
        for one in run.segments
    ]
    return [list(each) for each in zip(*of_segments, strict=True)]


def reference_bytes(config: RunConfig) -> Parts:
    """Lower bound of the memory of the single process that verification compares with: the whole model."""
    run = _run(config)
    return {"the reference's weights and gradients": 2 * run.shape.parameters * 4.0 * _width(config)}


def _run(config: RunConfig) -> Run:
    """The run with the dtype of training and the smallest vocabulary."""
    model = config.model.resolve(_LEAST_VOCABULARY)
    return described_run(replace(config, model=model), precision_of(config.training.known_dtype) or "fp32")


def _width(config: RunConfig) -> int:
    """Factor of all bytes: 2 for float64, which the closed forms do not support."""
    return 1 if precision_of(config.training.known_dtype) else 2


def _state(config: RunConfig, software: Software, held: Sequence[tuple[Run, float, float]], *, verifies: bool) -> Parts:
    """Bytes of the state of a rank with these segments."""
    width, states = _width(config), [state_bytes(one, own, software) for one, _, own in held]
    frozen = sum(frozen_bytes(one, whole - own) for one, whole, own in held)
    here = [1.0] * len(states)  # share of each segment
    budget, swapped = config.schedule.budget_bytes, slice(None) if config.swaps_stages else slice(-1, None)
    if budget is not None and config.schedule.swap_folder is not None:
        # The rest is in files.
        whole = sum(one.weights_bytes + one.gradients_bytes + one.optimizer_bytes for one in states[swapped]) * width
        here[swapped] = [min(1.0, budget / whole)] * len(states[swapped])
    shares = list(zip(states, here, strict=True))
    return {
        "weights": (sum(state.weights_bytes * share for state, share in shares) + frozen) * width,
        "gradients": sum(state.gradients_bytes * share for state, share in shares) * width * config.least_gradients,
        "the optimizer's state": 0.0 if verifies else sum(one.optimizer_bytes * share for one, share in shares) * width,
    }


def _activations(config: RunConfig, run: Run, software: Software) -> list[float]:
    """For each pipeline rank the maximal bytes that its matrix products keep for their backwards."""
    layout, schedule, choice = config.layout, config.schedule, config.choice()
    shape, whole = run.shape, run.shape.hidden / (run.tp if run.sequence_parallel else 1)
    # A lower bound: if any layer is fully recomputed, all layers count as fully recomputed.
    inputs = (
        [whole] if "full" in run.recompute_kinds else [whole, whole, shape.query_width / run.tp, shape.inner / run.tp]
    )
    kept = run.tokens * sum(inputs) * run.element_bytes * _width(config)
    trained = zip(stage_layers(run, software)[0], frozen_layers(run, software), strict=True)
    layers, placement = [count - frozen for count, frozen in trained], choice.placed()
    may_leave = schedule.balance or schedule.offload or schedule.keep is not None or schedule.budget_bytes is not None
    held = None if may_leave or layout.cuts_sequences else choice.stage_inputs
    if held is not None:
        stages = [placement.stages_of(rank) for rank in range(layout.pp)]
        return [
            kept * sum(number * layers[stage] for number, stage in zip(numbers, own, strict=True))
            for numbers, own in zip(held, stages, strict=True)
        ]
    parts = layout.num_slices if layout.token_slices != "auto" else run.seq
    largest = [max(layers[stage] for stage in placement.stages_of(rank)) for rank in range(layout.pp)]
    return [kept * most / parts for most in largest]
