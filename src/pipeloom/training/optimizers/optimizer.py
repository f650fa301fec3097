"""The optimizer of this rank's parameters, its learning rate, and its steps.

A step updates all parameters at once, or stage by stage if stages are swapped; the results are equal.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.config import OptimizerConfig
from pipeloom.errors import OptimizerError, PipeloomError, UserError, raised_by
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.clipping import clip, clipped_step, gradient_norms, squared_gradient_norm, squared_norm
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import FlatPart, StageWeights
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.measure.update import Update
from pipeloom.schedule.stage_swaps import Content
from pipeloom.workload.optimizers import OPTIMIZERS

STEP = "step"
"""Key of the number of steps, which every optimizer may have beside what it declares."""
REPEATS = 3
"""Runs of an update that is timed."""


def learning_rate(config: OptimizerConfig, step: float, num_steps: int) -> float:
    """Linear warm-up to the peak, then decay to ``lr_min_fraction`` of it in the last step.

    Args:
        config: peak, warm-up and decay.
        step: counted from 0; an update within a step is a fraction.
        num_steps: of the run.
    """
    peak, rising, style = config.known_lr, config.known_lr_warmup_steps, config.lr_decay_style
    if step < rising:
        return peak * min(1.0, (step + 1) / rising)
    begin = rising
    if style == "wsd":
        begin = max(rising, num_steps - 1 - config.wsd_decay_steps(num_steps))
    done = min(1.0, max(0.0, (step - begin) / max(1, num_steps - 1 - begin)))
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}.get(style, 1 - done)
    return peak * (config.known_lr_min_fraction + (1 - config.known_lr_min_fraction) * left)


def make_optimizer(config: OptimizerConfig, parts: Sequence[FlatPart], *, begins: bool = True) -> torch.optim.Optimizer:
    """Make the optimizer of a run.

    Args:
        config: its rule and settings.
        parts: what it updates.
        begins: whether the state is created here; otherwise by ``begin_state``.

    Raises:
        UserError: the optimizer refuses a setting.
        OptimizerError: one of a plug-in raises anything else; so does a step of it.
    """
    settings, rule = config.values, config.rule
    decay = settings.pop("weight_decay", None)
    groups: list[dict[str, Any]] = []
    for is_matrix, decays in product((False, True), (True, False)):
        if found := [part.parameter for part in parts if (part.name is not None, part.decays) == (is_matrix, decays)]:
            groups.append({"params": found})
            if decay is not None:
                groups[-1]["weight_decay"] = decay if decays else 0.0
            if rule.matrices is not None:
                groups[-1]["is_matrix"] = is_matrix
    # A rank whose stages are all frozen: PyTorch's optimizers refuse an empty list.
    groups = groups or [{"params": [nn.Parameter(torch.empty(0))]}]
    with naming_optimizer(config.name):
        try:
            optimizer = rule.make(groups, lr=config.known_lr, **settings)
        except ValueError as error:  # only the optimizer has the ranges of its settings
            raise UserError(f"optimizer.name {config.name} does not take these optimizer.settings: {error}") from error
    if not _is_own(config.name):
        optimizer.step = naming_optimizer(config.name)(optimizer.step)
    if begins:
        begin_state(optimizer, config, parts)
    return optimizer


@contextmanager
def naming_optimizer(name: str) -> Iterator[None]:
    """Context in which an exception of an optimizer of a plug-in or a script becomes an error that names the optimizer.

    Raises:
        OptimizerError: contains the exception and its line in the optimizer's file.
    """
    try:
        yield
    except (PipeloomError, MemoryError, torch.OutOfMemoryError):  # how much memory there is does not depend on the rule
        raise
    except Exception as error:
        if _is_own(name):
            raise
        raise OptimizerError(f"the optimizer '{name}' raised {raised_by(error, OPTIMIZERS[name].make)}") from error


def _is_own(name: str) -> bool:
    """Whether an optimizer is one of the package."""
    return (getattr(OPTIMIZERS[name].make, "__module__", None) or "").startswith("pipeloom.")


def begin_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig, parts: Iterable[FlatPart]) -> None:
    """Create the initial optimizer state of parts, which PyTorch's optimizers create in their first step."""
    for part in parts:
        optimizer.state[part.parameter] = {
            STEP: _no_steps(optimizer, part.parameter),
            **{
                name: part.parameter.new_zeros(shape, dtype=part.parameter.grad_dtype)
                for name, shape in state_shapes(config, part).items()
            },
        }


def state_shapes(config: OptimizerConfig, part: FlatPart) -> dict[str, tuple[int, ...]]:
    """Key -> shape of the state's tensors of a part, as the optimizer declares them; the number of steps is beside."""
    shape = tuple(part.parameter.shape)
    if part.name is not None:
        return config.rule.state_shapes(part.name, shape)
    return dict.fromkeys(config.rule.state, shape)


def _no_steps(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Tensor:
    """The count of steps at the begin. A fused kernel reads it on its device; others read it on the host."""
    if optimizer.defaults.get("fused"):
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros((), dtype=torch.get_default_dtype())


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def seconds_by_stage(
    world: World, num_stages: int, own: Collection[int], seconds_of: Callable[[int], float]
) -> tuple[float, ...]:
    """For each stage the seconds of its update on the slowest rank that has it, on rank 0. Collective.

    Args:
        world: all ranks.
        num_stages: of the model.
        own: stages of this rank.
        seconds_of: times the update of one, while other ranks time theirs.
    """
    found: dict[int, float] = {}
    for stage in range(num_stages):
        world.wait_for_all()
        if stage in own:
            found[stage] = seconds_of(stage)
    every: list[dict[int, float]] = world.gather(found) or []
    return tuple(max((one.get(stage, 0.0) for one in every), default=0.0) for stage in range(num_stages))


class WholeUpdates:
    """Updates all parameters of a rank at once, after the pipeline.

    Attributes:
        parts: of the rank, without those that are swapped.
    """

    def __init__(self, config: OptimizerConfig, optimizer: torch.optim.Optimizer, data_parallel: DataParallel) -> None:
        self._config, self._optimizer, self._data_parallel = config, optimizer, data_parallel
        # Swapped ones are updated while they are on the device.
        still = [segment.weights for segment in data_parallel.segments() if not segment.weights.is_swapped]
        self.parts = [part for weights in still for part in weights.parts]
        self._parameters = [part.parameter for part in self.parts]

    def begin_step(self, lr: float) -> None:
        """Set the learning rate of the step; called before the pipeline."""
        set_rate(self._optimizer, lr)

    def squares(self) -> list[float]:
        """This rank's share of the squared norm of each gradient that is clipped; called after the pipeline.

        Of the whole model's, or with ``optimizer.clip`` stage of each stage's.
        """
        parallel = self._data_parallel
        if self._config.clip != "stage":
            return [squared_gradient_norm(parallel.counted_gradients())]
        return [squared_gradient_norm(parallel.counted_gradients(stage)) for stage in range(parallel.num_stages)]

    def end_step(self, squares: Sequence[float], lr: float) -> None:  # noqa: ARG002  StageUpdates needs the rate here
        """Clip, and update.

        Args:
            squares: sums of ``squares`` over all ranks.
            lr: learning rate of the step.
        """
        limit = self._config.known_clip_grad_norm
        if self._config.clip == "stage":
            for stage in self._data_parallel.weights:
                own = [part.parameter for one in self._data_parallel.segments_of(stage) for part in one.weights.parts]
                clip(own, squares[stage] ** 0.5, limit)
            self._optimizer.step()
        else:
            # By the norm over all ranks: clipping each part by its own norm would change the gradient's direction.
            clipped_step(self._optimizer, self._parameters, sum(squares) ** 0.5, limit)
        # Stages compute with a copy of the updated weights in training.dtype, or gather them.
        self._data_parallel.refresh()

    def skip_step(self) -> None:
        """Count a step without an update, as a checkpoint does, which has the number of steps alone."""
        for state in self._optimizer.state.values():
            state["step"] += 1

    def settle(self) -> None:
        """Do nothing: no update is pending between two steps."""

    def seconds(self, world: World) -> tuple[tuple[float, ...], float]:
        """Time the updates. Collective.

        Returns:
            Seconds of each stage's update within the pipeline (here none); and on rank 0 the seconds after the
            pipeline, of the slowest rank: sum of shared gradients, gradient norm, clipping and optimizer step, timed on
            copies on all ranks at once.
        """
        make = partial(make_optimizer, self._config)
        update = Update(make, self._config.known_clip_grad_norm, self.parts, world)

        def before() -> None:
            update.fill_gradients()
            world.wait_for_all()

        def once() -> None:
            self._data_parallel.sum_shared(world.timeout.total_seconds(), is_again=True)
            update.step()
            self._data_parallel.refresh()  # weights are unchanged

        every = world.gather(median_seconds(once, REPEATS, world.device, before))
        return (), max(every) if every else 0.0


class StageUpdates:
    """Updates swapped stages in a run of one rank, each while its weights, gradient and state are on the device.

    Args:
        config: rule and clipping.
        optimizer: of the parameters of all stages; its state is created here and moved to the store.
        weights: of each stage.
        store: of the swapped stages.
        is_deferred: whether the updates of a step run during the next step, or in ``settle``.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[int, StageWeights],
        store: StageStore,
        *,
        is_deferred: bool,
    ) -> None:
        self._config, self._optimizer, self._weights, self._store = config, optimizer, weights, store
        self._is_deferred, self._is_owed = is_deferred, False
        self._gradients: dict[Tensor, Tensor] = {}
        self._norms: dict[int, list[Tensor]] = {}
        self._squares, self._own_squares = 0.0, dict[int, float]()
        for stage, one in weights.items():
            for part in one.parts:
                begin_state(optimizer, config, [part])
                for name, tensor in optimizer.state[part.parameter].items():
                    if name != "step":  # a scalar
                        store.add(stage, Content.STATE, tensor)
                assert part.parameter.grad is not None
                self._gradients[part.parameter] = part.parameter.grad
                # Detached, since an optimizer step updates every parameter that has a gradient.
                part.parameter.grad = None

    def complete(self, stage: int) -> None:
        """Note the norm of a stage's gradient; after the last stage, compute that of the whole gradient."""
        self._norms[stage] = gradient_norms(self._weights[stage].counted_gradients(with_replicated=True))
        if self._config.clip == "stage":
            self._own_squares[stage] = squared_norm(self._norms[stage])
        if len(self._norms) == len(self._weights):
            # Summed in a fixed order, so that the result does not depend on the order in which stages complete.
            self._squares = squared_norm([norm for index in self._weights for norm in self._norms[index]])
            self._norms.clear()

    def update(self, stage: int) -> None:
        """Clip the stage's gradient by the norm of the whole gradient, and update its weights.

        Deferred updates do nothing in the first step.
        """
        if self._is_deferred and not self._is_owed:
            return
        weights = self._weights[stage]
        parameters = [part.parameter for part in weights.parts]
        for parameter in parameters:
            # The optimizer skips parameters without a gradient, so its step updates this stage alone.
            parameter.grad = self._gradients[parameter]
        squares = self._own_squares[stage] if self._config.clip == "stage" else self._squares
        norm = squares**0.5 if self._config.known_clip_grad_norm < math.inf else 0.0
        clipped_step(self._optimizer, parameters, norm, self._config.known_clip_grad_norm)
        for parameter in parameters:
            parameter.grad = None
        weights.refresh()

    def begin_step(self, lr: float) -> None:
        """As ``WholeUpdates``."""
        # Deferred updates of the previous step run within this one, with the previous learning rate.
        if not self._is_deferred:
            set_rate(self._optimizer, lr)

    def squares(self) -> list[float]:
        """As ``WholeUpdates``, of the whole gradient; the share of the only rank is the whole."""
        return [self._squares]

    def end_step(self, squares: Sequence[float], lr: float) -> None:  # noqa: ARG002  updates use their own
        """Mark deferred updates as pending, with the learning rate of this step; others are done."""
        if self._is_deferred:
            set_rate(self._optimizer, lr)
            self._is_owed = True

    def seconds(self, world: World) -> tuple[tuple[float, ...], float]:
        """As ``WholeUpdates``."""
        return tuple(self._seconds(stage, world.device) for stage in self._weights), 0.0

    def _seconds(self, stage: int, device: torch.device) -> float:
        """Time an update with clipping, outside a step, with the stage at rest; its result is dropped."""
        changed = [part.parameter for part in self._weights[stage].parts]
        steps = [self._optimizer.state[parameter]["step"] for parameter in changed]
        done, owed = [step.clone() for step in steps], (self._squares, self._is_owed)
        # A norm of twice the limit, so that clipping is part of the measurement.
        self._squares, self._is_owed = 4 * self._config.known_clip_grad_norm**2, True
        self._own_squares[stage] = self._squares
        try:
            # Without contents to write back, so weights and moments at rest stay unchanged.
            with self._store.visit(stage, Content.WEIGHTS | Content.STATE | Content.GRADIENT):
                return median_seconds(lambda: self.update(stage), REPEATS, device)
        finally:
            self._squares, self._is_owed = owed
            # Step counters are not part of the store.
            for step, before in zip(steps, done, strict=True):
                step.copy_(before)

    def settle(self) -> None:
        """Do pending updates; called outside a step, with every stage at rest."""
        if not self._is_owed:
            return
        changed = Content.WEIGHTS | Content.STATE
        for stage in self._weights:
            with self._store.visit(stage, changed | Content.GRADIENT, changed):
                self.update(stage)
        self._is_owed = False
