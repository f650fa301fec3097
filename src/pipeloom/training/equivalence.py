"""The proof that it is the same training: a pipeline's loss and gradients beside those of a single process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from pipeloom.config import RunConfig, find_problems
from pipeloom.data.text import Data, load_data
from pipeloom.errors import ConfigError, UserError
from pipeloom.execute.processes.world import World, is_first
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.model import TensorSlice
from pipeloom.predict.describe import completed
from pipeloom.terminal.words import count
from pipeloom.training.memory_check import check_memory
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import check_processes, run_on_all_ranks
from pipeloom.training.stages import stage_of

TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.1}
"""Largest relative difference that rounding explains, by the type that stages compute in. bfloat16 has 8 bits: over
models of 4 to 24 layers gradients of matrices were up to 0.024 away from those in float32, of norms and biases up to
0.047, the loss 6e-5 and the gradient norm 2e-3. Finer mistakes than a lost micro-batch are for float64 to find."""
_REFERENCE_S = 3600.0
"""The other ranks wait while rank 0 computes the reference; longest time for that."""
_SCALE_FLOOR = 1e-3
"""Gradients are compared relative to their own size, but to no less than this share of the model's largest one:
some are zero but for rounding, such as that of a bias on attention keys."""


@dataclass(frozen=True)
class Gradients:
    """What one step computed.

    Attributes:
        loss: nats for each token.
        by_name: each parameter's gradient, by its name in the whole model; of a rank, those of its slices.
    """

    loss: float
    by_name: dict[str, Tensor]

    @property
    def norm(self) -> float:
        """Norm of the whole model's gradient."""
        # In float64: a sum of squares over all elements of a model loses digits in float32.
        return float(torch.stack([gradient.double().norm() for gradient in self.by_name.values()]).norm())


@dataclass(frozen=True, repr=False)
class Equality:
    """A pipeline's loss and gradients beside those of a single process.

    Attributes:
        differences: the worst relative difference over all batches, of ``loss``, ``gradient norm`` and each parameter's
            gradient by name.
        tolerance: the largest that rounding explains.
    """

    differences: Mapping[str, float]
    tolerance: float

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains every difference."""
        return not self.wrong

    @property
    def wrong(self) -> tuple[str, ...]:
        """Names of what differs by more."""
        # Not `>`, which is false for NaN.
        return tuple(name for name, difference in self.differences.items() if not difference <= self.tolerance)

    @property
    def worst(self) -> str:
        """Name of what differs most."""
        return max(self.differences, key=lambda name: self.differences[name])

    def __repr__(self) -> str:
        """Whether all agree, and the worst difference."""
        found = "equal" if self.is_equal else f"{len(self.wrong)} differ"
        of = f"{len(self.differences) - 2} gradients"
        return f"Equality({found}: {of}, worst {self.worst}, {self.differences[self.worst]:.1e})"


def verify_gradients(config: RunConfig, *, num_batches: int = 2, quiet: bool = False) -> Equality:
    """Compare the pipeline's loss and gradients with those of a single process, parameter by parameter.

    Starts the processes of the run, or is one of those of a launcher. That a *schedule* obeys the rules needs no call:
    a ``Schedule`` is verified when it is made.

    Examples:
        >>> from pipeloom import load_run, verify_gradients
        >>> verify_gradients(load_run(layout={"pp": 2, "loops": 2}))  # doctest: +SKIP
        Equality(equal: 39 gradients, worst loss, 0.0e+00)

    Args:
        config: of the run, from ``load_run``; without ``training.dtype`` in float64, so that rounding explains nothing.
        num_batches: batches of the text.
        quiet: whether nothing is printed.

    Returns:
        The differences; under a launcher empty on other ranks than 0.

    Raises:
        ConfigError: everything that is wrong with the configuration.
        UserError: the run cannot be verified: it swaps stages, or the host lacks memory.
        WorkerError: a process failed.
    """
    if config.training.dtype is None:
        config = replace(config, training=replace(config.training, dtype="float64"))
    config, problems = completed(config, find_problems)
    if problems:
        raise ConfigError(problems, "the run")
    # Swapped stages update and drop their gradients within the step.
    if config.schedule.device_budget is not None:
        raise UserError(
            "expected no schedule.device_budget: it lets gradients go before the end of the step, when they are "
            "compared; leave it out (the losses of `pipeloom train` are the same with and without it)"
        )
    check_processes(config)
    check_memory(config, verifies=True)
    if is_first():
        if not quiet:
            layout, placement = config.layout, config.choice().placement_name
            print(  # noqa: T201  a run says what it does
                f"{config.schedule.title} ({placement}) over {count(layout.pp, 'pipeline rank')} x "
                f"{count(layout.loops, 'stage')}{layout.other_axes}; {count(layout.num_microbatches, 'micro-batch')}, "
                f"{config.training.known_dtype}, {count(num_batches, 'batch')}",
                flush=True,
            )
        # Once, before the processes, which find the tokens in the cache.
        load_data(config.data, config.training.seed)
    differences = run_on_all_ranks(config, partial(_compare, num_batches), _REFERENCE_S)
    return Equality(differences or {}, TOLERANCES[config.training.known_dtype])


def _compare(num_batches: int, config: RunConfig, world: World, data: Data) -> dict[str, float] | None:
    """What each rank does."""
    return compare_with_reference(config, world, data, num_batches)


def reference_gradients(config: RunConfig, batch: Batch) -> Gradients:
    """Loss and gradients by plain forward and backward of the whole model, without schedule or executor.

    Computed in the type of the weights that the optimizer updates: where stages compute in bfloat16, in float32.
    """
    dtype = master_dtype(getattr(torch, config.training.known_dtype))
    model = stage_of(config, range(config.model.num_layers + 2), batch.inputs[0].device, dtype=dtype)
    total = 0.0
    # One micro-batch after the other, as the pipeline sums them: all at once would take M times the memory.
    for microbatch, tokens in enumerate(batch.inputs):
        loss = batch.loss(model(tokens), microbatch)
        loss.backward()
        total += loss.item()
    return Gradients(total, {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})


def compare(found: Gradients, expected: Gradients) -> dict[str, float]:
    """Relative differences of the loss, the gradient norm, and each parameter's gradient by name.

    A gradient's difference is the largest one of its elements, by the largest element of the expected
    gradient. A parameter that only one side has differs infinitely.
    """
    differences = {
        "loss": abs(found.loss - expected.loss) / abs(expected.loss),
        "gradient norm": abs(found.norm - expected.norm) / expected.norm,
    }
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.by_name.items()}
    # Softmax does not change when all scores of a row grow alike, so the exact gradient of a key's bias is 0.
    floor = _SCALE_FLOOR * max(sizes.values())
    for name in sorted({*found.by_name, *expected.by_name}, key=_natural):
        if name in found.by_name and name in expected.by_name:
            difference = float((found.by_name[name] - expected.by_name[name]).abs().max())
            differences[name] = difference / max(sizes[name], floor)
        else:
            differences[name] = float("inf")
    return differences


def compare_with_reference(config: RunConfig, world: World, data: Data, num_batches: int) -> dict[str, float] | None:
    """Run the pipeline and the reference on the same batches; the worst difference of each; every rank calls it.

    Returns:
        Differences by name on rank 0, ``None`` elsewhere.
    """
    pipeline, layout = Pipeline(config, world), config.layout
    windows = [data.train.batch(index, layout.batch_size) for index in range(num_batches)]
    found = [world.gather(_step(pipeline, pipeline.batch(one))) for one in windows]
    slices = world.gather(pipeline.slices())
    pipeline.close()
    # One process computes the micro-batches of all replicas.
    batches = [Batch.of(one, layout.dp * layout.num_microbatches, world.device) for one in windows]
    worst: dict[str, float] = {}
    for batch, parts in zip(batches, found, strict=True):
        if parts is None or slices is None:
            return None
        for name, difference in compare(_joined(parts, slices), reference_gradients(config, batch)).items():
            # max with NaN depends on the order of its arguments and could hide it.
            worst[name] = max(difference if math.isfinite(difference) else math.inf, worst.get(name, 0.0))
    return worst


def _step(pipeline: Pipeline, batch: Batch) -> Gradients:
    result = pipeline.train_step(batch)
    gradients = pipeline.gradients()
    is_counted = pipeline.is_first_replica
    return Gradients(
        pipeline.counted_loss(result),
        # Replicas have the same gradients after the reduction, so that of the first one is enough.
        {name: gradient.cpu() for name, gradient in gradients.items()} if is_counted else {},
    )


def _joined(parts: Sequence[Gradients], slices: Sequence[Mapping[str, TensorSlice]]) -> Gradients:
    """The whole model's gradients from those of the ranks' slices; what no rank has stays infinite."""
    by_name: dict[str, Tensor] = {}
    for part, here in zip(parts, slices, strict=True):
        for name, gradient in part.by_name.items():
            whole = by_name.setdefault(name, gradient.new_full(here[name].whole, math.inf))
            here[name].of(whole, gradient.shape).copy_(gradient)
    return Gradients(sum(part.loss for part in parts), by_name)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts ``layers.10`` behind ``layers.9``."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
