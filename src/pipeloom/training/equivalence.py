"""Compares a pipeline's loss and gradients with those of a single process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pipeloom.calls import checked
from pipeloom.config import RunConfig, decided_problems
from pipeloom.data.text import Data, load_data
from pipeloom.errors import ConfigError, UserError
from pipeloom.execute.processes.world import World, is_first
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.model import Documents, StageModule, TensorSlice
from pipeloom.model.cross_entropy import summed_cross_entropy
from pipeloom.model.experts import balances_of
from pipeloom.predict.describe import completed
from pipeloom.terminal.words import count
from pipeloom.training.adapted import with_adapted_check
from pipeloom.training.memory_check import check_memory
from pipeloom.training.optimizers.updates_within import KeptGradients
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import check_processes, run_on_all_ranks
from pipeloom.training.stages import stage_of
from pipeloom.workload.limits import Count

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
"""Largest relative difference attributed to rounding, by the dtype that stages compute in. bfloat16 has 8 significant
bits: in models of 4 to 24 layers, gradients of matrices differed from float32 by up to 0.024, those of norms and biases
by up to 0.047, the loss by 6e-5, the gradient norm by 2e-3. In bfloat16 this finds a lost micro-batch; smaller errors
need float64."""
_REFERENCE_S = 3600.0
"""The other ranks wait at most this long while rank 0 computes the reference."""
_SCALE_FLOOR = 1e-3
"""Differences are relative to the gradient's largest element, but at least to this fraction of the model's largest one:
some gradients are zero except for rounding, such as that of a bias of attention keys."""


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one step.

    Attributes:
        loss: nats per token.
        by_name: each parameter's gradient, by its name in the whole model; on a rank, the gradients of its slices.
    """

    loss: float
    by_name: dict[str, Tensor]

    @property
    def norm(self) -> float:
        """Norm of the whole model's gradient."""
        # In float64: in float32 a sum of squares over a whole model loses digits.
        return float(torch.stack([gradient.double().norm() for gradient in self.by_name.values()]).norm())


@dataclass(frozen=True, repr=False)
class Equality:
    """Result of comparing a pipeline's loss and gradients with those of a single process.

    Attributes:
        differences: largest relative difference over all batches, of ``loss``, ``gradient norm`` and each parameter's
            gradient by name.
        tolerance: largest difference attributed to rounding.
    """

    differences: Mapping[str, float]
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether every difference is within the tolerance."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of quantities that differ by more than the tolerance."""
        # Not `>`, which is false for NaN.
        return tuple(name for name, difference in self.differences.items() if not difference <= self.tolerance)

    @property
    def worst(self) -> str:
        """Name of the quantity that differs most."""
        return max(self.differences, key=lambda name: self.differences[name])

    def __repr__(self) -> str:
        """Whether all agree, and the largest difference."""
        found = "equal" if self.is_equal else f"{len(self.wrong)} differ"
        of = f"{len(self.differences) - 2} gradients"
        return f"Equality({found}: {of}, worst {self.worst}, {self.differences[self.worst]:.1e})"


@checked
def verify_gradients(config: RunConfig, *, num_batches: Count = 2, quiet: bool = False) -> Equality:
    """Compare the pipeline's loss and gradients with those of a single process, parameter by parameter.

    Starts the processes of the run; under a launcher, this process is one of the ranks. A *schedule* needs no such
    call: ``Schedule`` verifies itself on construction.

    Examples:
        >>> from pipeloom import load_run, verify_gradients
        >>> verify_gradients(load_run(layout={"pp": 2, "loops": 2}))  # doctest: +SKIP
        Equality(equal: 39 gradients, worst loss, 0.0e+00)

    Args:
        config: of the run, from ``load_run``; if ``training.dtype`` is not set, float64 is used, so that rounding is
            negligible.
        num_batches: batches to compare.
        quiet: whether to print nothing.

    Both matrices of adapters begin with random values here.

    Returns:
        The differences; under a launcher, empty on ranks other than 0.

    Raises:
        ConfigError: lists all problems of the configuration.
        UserError: the run cannot be verified: it swaps stages or rounds messages, or the host lacks memory.
        WorkerError: a process failed.
    """
    if config.training.dtype is None:
        config = replace(config, training=replace(config.training, dtype="float64"))
    if config.adapter.rank is not None:
        # If the second matrix of a pair were zeros, the first one would have no gradient.
        config = replace(config, adapter=replace(config.adapter, init="random"))
    config, problems = completed(config, with_adapted_check(decided_problems))
    if problems:
        raise ConfigError(problems, "the run")
    _check_comparable(config)
    check_processes(config)
    check_memory(config, verifies=True)
    if is_first():
        if not quiet:
            layout, placement = config.layout, config.choice().placement_name
            print(  # noqa: T201  start message
                f"{config.title} ({placement}) over {count(layout.pp, 'pipeline rank')} x "
                f"{count(layout.num_loops, 'stage')}{layout.other_axes}; "
                f"{layout.microbatch_words}, {config.training.known_dtype}, "
                f"{count(num_batches, 'batch')}",
                flush=True,
            )
        # Tokenized once, before the processes start; they read the tokens from the cache.
        load_data(config.data, config.training.seed)
    differences = run_on_all_ranks(config, partial(_compare, num_batches), _REFERENCE_S)
    return Equality(differences or {}, TOLERANCES[config.training.known_dtype])


def _check_comparable(config: RunConfig) -> None:
    # Swapped stages update and drop their gradients within the step.
    if config.schedule.device_budget is not None:
        raise UserError(
            "expected no schedule.device_budget: it drops gradients before the end of the step, when they are "
            "compared; leave it out (the losses of `pipeloom train` are the same with and without it)"
        )
    if config.layout.average_every is not None:
        raise UserError(
            "expected no layout.average_every: replicas that step alone have gradients of their own, of which no "
            "single process has the sum; leave it out (each update's gradients are those of layout.dp 1)"
        )
    # Its rounding is larger than any tolerance that would still find a lost micro-batch.
    if config.layout.boundary is not None:
        raise UserError(
            f"expected no layout.boundary: {config.layout.boundary} rounds what travels between ranks, which a single "
            "process does not; leave it out (all else is the same without it)"
        )


def _compare(num_batches: int, config: RunConfig, world: World, data: Data) -> dict[str, float] | None:
    return compare_with_reference(config, world, data, num_batches)


def reference_gradients(config: RunConfig, batch: Batch) -> Gradients:
    """Loss and gradients from forward and backward of the whole model, without schedule or executor.

    Computed in the dtype of the optimizer's weights: float32 if stages compute in bfloat16.
    """
    dtype = master_dtype(getattr(torch, config.training.known_dtype))
    model = stage_of(config, range(config.model.num_layers + 2), batch.inputs[0].device, dtype=dtype)
    total, cross_entropy = 0.0, partial(summed_cross_entropy, z_loss=config.training.z_loss)
    if config.model.experts is not None and config.model.known_balance == "batch":
        _count_loads(model, batch)
    # One micro-batch at a time, as in the pipeline: all at once would take M times the memory.
    for microbatch, tokens in enumerate(batch.inputs):
        documents = None if batch.firsts is None else Documents(batch.firsts[microbatch])
        loss = batch.loss(model(tokens, documents=documents), microbatch, cross_entropy)
        loss.backward()
        total += loss.item()
    return Gradients(total, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})


def _count_loads(model: StageModule, batch: Batch) -> None:
    """Count the loads of experts in the whole batch, by forwards without backwards."""
    balances = balances_of(model).values()
    for one in balances:
        one.begin(batch.inputs[0].device)
        one.is_counting = True
    with torch.no_grad():
        for microbatch, tokens in enumerate(batch.inputs):
            model(tokens, documents=None if batch.firsts is None else Documents(batch.firsts[microbatch]))
    for one in balances:
        one.is_counting = False


def compare(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Relative differences of the loss, the gradient norm, and each parameter's gradient by name.

    A gradient's difference is the largest absolute difference of its elements, divided by the largest absolute element
    of the expected gradient. A parameter that only one side has has an infinite difference.
    """
    differences = {
        "loss": abs(found.loss - expected.loss) / abs(expected.loss),
        "gradient norm": abs(found.norm - expected.norm) / expected.norm,
    }
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.by_name.items()}
    # Softmax is invariant to adding a constant to a row of scores, so the exact gradient of a key's bias is 0.
    floor = _SCALE_FLOOR * max(sizes.values())
    for name in sorted({*found.by_name, *expected.by_name}, key=_natural):
        if name in found.by_name and name in expected.by_name:
            difference = float((found.by_name[name] - expected.by_name[name]).abs().max())
            differences[name] = difference / max(sizes[name], floor)
        else:
            differences[name] = float("inf")
    return differences


def compare_with_reference(config: RunConfig, world: World, data: Data, num_batches: int) -> dict[str, float] | None:
    """Run the pipeline and the reference on the same batches. Collective.

    Returns:
        On rank 0 the largest relative difference over the batches, by name; ``None`` elsewhere.
    """
    pipeline, layout = Pipeline(config, world), config.layout
    pipeline.updates.does = KeptGradients(pipeline.data_parallel)
    windows = [data.train.batch(index, layout.batch_size) for index in range(num_batches)]
    found = [world.gather(_step(pipeline, pipeline.batch(one))) for one in windows]
    slices = world.gather(pipeline.slices())
    pipeline.close()
    # One process computes the micro-batches of all replicas.
    number, by_document = sum(layout.microbatches_by_replica), config.data.by_document
    batches = [Batch.of(one, number, world.device, by_document=by_document) for one in windows]
    worst: dict[str, float] = {}
    for batch, parts in zip(batches, found, strict=True):
        if parts is None or slices is None:
            return None
        for name, difference in compare(_joined(parts, slices), reference_gradients(config, batch)).items():
            # max() with NaN depends on the order of its arguments, so NaN counts as infinite.
            worst[name] = max(difference if math.isfinite(difference) else math.inf, worst.get(name, 0.0))
    return worst


def _step(pipeline: Pipeline, batch: Batch) -> Gradients:
    result = pipeline.train_step(batch)
    return Gradients(
        pipeline.counted_loss(result), {name: gradient.cpu() for name, gradient in pipeline.gradients().items()}
    )


def _joined(parts: Sequence[Gradients], slices: Sequence[Mapping[str, TensorSlice]]) -> Gradients:
    """The whole model's gradients from the ranks' slices; elements that no rank has are infinite."""
    by_name: dict[str, Tensor] = {}
    for part, here in zip(parts, slices, strict=True):
        for name, gradient in part.by_name.items():
            whole = by_name.setdefault(name, gradient.new_full(here[name].whole, math.inf))
            here[name].of(whole, gradient.shape).copy_(gradient)
    return Gradients(sum(part.loss for part in parts), by_name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts ``layers.10`` after ``layers.9``."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
