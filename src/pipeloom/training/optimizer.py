"""The optimizer over this rank's parameters, its learning rate, and its steps.

A step updates all parameters at once, or stage by stage where stages are swapped, with the same numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pipeloom.config import OptimizerConfig
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.clipping import clip_gradients, gradient_norms, squared_gradient_norm, squared_norm
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.measure.update import Update
from pipeloom.schedule.stage_swaps import Content

_REPEATS = 3


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Linear warm-up to the peak, then a cosine down to ``lr_min_fraction`` of it; steps are counted from 0."""
    peak, rising = config.known_lr, config.known_lr_warmup_steps
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, num_steps - 1 - rising)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return peak * (config.lr_min_fraction + (1 - config.lr_min_fraction) * cosine)


def make_optimizer(
    config: OptimizerConfig, decayed: Sequence[nn.Parameter], plain: Sequence[nn.Parameter], *, begins: bool = True
) -> torch.optim.Optimizer:
    """The optimizer of a run; weights decay in the first parameters. Its state may begin later (``begin_state``)."""
    settings = config.values
    decay = settings.pop("weight_decay", None)
    groups = [
        {"params": list(parameters), **({} if decay is None else {"weight_decay": share * decay})}
        for parameters, share in ((decayed, 1.0), (plain, 0.0))
        if parameters
    ]
    optimizer = config.rule.make(groups, lr=config.known_lr, **settings)
    if begins:
        begin_state(optimizer, config, [*decayed, *plain])
    return optimizer


def begin_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig, parameters: Iterable[Tensor]) -> None:
    """Give an optimizer the state that it begins with for some parameters, which some would make at the first step."""
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.get_default_dtype()),
            **{name: torch.zeros_like(parameter) for name in config.rule.state},
        }


def _set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class WholeUpdates:
    """Updates all parameters of a rank at once, behind the pipeline."""

    def __init__(self, config: OptimizerConfig, optimizer: torch.optim.Optimizer, data_parallel: DataParallel) -> None:
        self._config, self._optimizer, self._data_parallel = config, optimizer, data_parallel
        decayed, plain = data_parallel.optimizer_parts()
        self._parameters = [*decayed, *plain]

    def begin_step(self, lr: float) -> None:
        """Before the pipeline, with the learning rate of the step."""
        _set_rate(self._optimizer, lr)

    def squares(self) -> float:
        """Behind the pipeline, this rank's share of the square of the norm of the whole model's gradient."""
        return squared_gradient_norm(self._data_parallel.counted_gradients())

    def end_step(self, norm: float, lr: float) -> None:  # noqa: ARG002  a rate for those who step later
        """Clip by the norm of the whole model's gradient, and update."""
        # By the norm over all ranks: clipping by its own norm would turn the
        # direction of each rank's part differently.
        clip_gradients(self._parameters, norm, self._config.clip_grad_norm)
        self._optimizer.step()
        # Stages compute with a copy in training.dtype of what the optimizer updated, or gather it.
        self._data_parallel.refresh()

    def settle(self) -> None:
        """Between two steps: the weights are as the last step leaves them."""

    def seconds(self, world: World) -> tuple[tuple[float, ...], float]:
        """Seconds of updates, of each stage within the pipeline and of all that follows it; every rank calls it.

        The gradient norm, clipping and the optimizer's step, on copies, all ranks at once; the slowest's, on rank 0.
        """
        parts = self._data_parallel.optimizer_parts()
        update = Update(partial(make_optimizer, self._config), self._config.clip_grad_norm, parts, world)

        def before() -> None:
            update.fill_gradients()
            world.wait_for_all()

        def once() -> None:
            update.step()
            self._data_parallel.refresh()  # with the weights that there are

        every = world.gather(median_seconds(once, _REPEATS, world.device, before))
        return (), max(every) if every else 0.0


class StageUpdates:
    """Updates the stages of a rank that is alone, each when it is on the device with its gradient and its state.

    Args:
        config: rule and clipping.
        optimizer: over the parts of all stages; its state is begun and given to the store.
        weights: of each stage.
        store: has the stages.
        is_deferred: whether the updates of a step are done in the next one, or by ``settle``.
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
        self._squares = 0.0
        for stage, one in weights.items():
            for part in one.parts:
                begin_state(optimizer, config, [part.parameter])
                for name in config.rule.state:
                    store.add(stage, Content.STATE, optimizer.state[part.parameter][name])
                assert part.parameter.grad is not None
                self._gradients[part.parameter] = part.parameter.grad
                # Kept aside: an update must not see the gradients of stages whose turn has not come.
                part.parameter.grad = None

    def complete(self, stage: int) -> None:
        """Note the norm of a stage's gradient; that of the last stage to come makes the whole gradient's known."""
        # Norms are kept by stage and added up in one order, so the sum has the same bits whatever order stages end in.
        self._norms[stage] = gradient_norms(self._weights[stage].counted_gradients(with_replicated=True))
        if len(self._norms) == len(self._weights):
            self._squares = squared_norm([norm for index in self._weights for norm in self._norms[index]])
            self._norms.clear()

    def update(self, stage: int) -> None:
        """Clip the stage's gradient as the whole gradient's norm demands, and update its weights.

        Where updates are deferred and none is owed, before the first step, nothing.
        """
        if self._is_deferred and not self._is_owed:
            return
        weights = self._weights[stage]
        parameters = [part.parameter for part in weights.parts]
        for parameter in parameters:
            # The optimizer skips parameters without a gradient, so that its step updates this stage alone.
            parameter.grad = self._gradients[parameter]
        if self._config.clips:
            clip_gradients(parameters, self._squares**0.5, self._config.clip_grad_norm)
        self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        weights.refresh()

    def begin_step(self, lr: float) -> None:
        """As ``WholeUpdates``."""
        # Deferred updates of the step before run within this one, with that step's learning rate.
        if not self._is_deferred:
            _set_rate(self._optimizer, lr)

    def squares(self) -> float:
        """As ``WholeUpdates``; the rank is alone, so that its share is the whole."""
        return self._squares

    def end_step(self, norm: float, lr: float) -> None:  # noqa: ARG002  it is that of the sum of the own norms
        """After a step: its updates are done, or due if they are deferred."""
        if self._is_deferred:
            _set_rate(self._optimizer, lr)
            self._is_owed = True

    def seconds(self, world: World) -> tuple[tuple[float, ...], float]:
        """As ``WholeUpdates``."""
        return tuple(self._seconds(stage, world.device) for stage in self._weights), 0.0

    def _seconds(self, stage: int, device: torch.device) -> float:
        """Outside a step, with the stage at rest: seconds of an update whose gradient is clipped; it is forgotten."""
        changed = [part.parameter for part in self._weights[stage].parts]
        steps = [self._optimizer.state[parameter]["step"] for parameter in changed]
        done, owed = [step.clone() for step in steps], (self._squares, self._is_owed)
        # Twice the limit, so that clipping is part of what is measured.
        self._squares, self._is_owed = 4 * self._config.clip_grad_norm**2, True
        try:
            # Nothing is taken back at the end of the visit, so weights and moments at rest stay as they are.
            with self._store.visit(stage, Content.WEIGHTS | Content.STATE | Content.GRADIENT):
                return median_seconds(lambda: self.update(stage), _REPEATS, device)
        finally:
            self._squares, self._is_owed = owed
            # Counters of steps are no part of the stage that the store has.
            for step, before in zip(steps, done, strict=True):
                step.copy_(before)

    def settle(self) -> None:
        """Outside a step, with every stage at rest: do the updates that are due."""
        if not self._is_owed:
            return
        changed = Content.WEIGHTS | Content.STATE
        for stage in self._weights:
            with self._store.visit(stage, changed | Content.GRADIENT, changed):
                self.update(stage)
        self._is_owed = False
