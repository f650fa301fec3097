"""The optimizer's step, stage by stage: the same numbers as all at once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeloom.config import OptimizerConfig
from pipeloom.execute.stages.clipping import clip_gradients, gradient_norms, squared_norm
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.schedule.stage_swaps import Content
from pipeloom.train.optimizer import begin_state

_REPEATS = 3


class StageUpdates:
    """Updates the stages of a rank that is alone, each when it is on the device with its gradient and its state.

    Args:
        config: rule and clipping.
        optimizer: over the parts of all stages; its state is begun and given to the store.
        weights: of each stage.
        store: has the stages.
        is_deferred: whether the updates of a step are done in the next one, or by ``settle``.

    Attributes:
        is_deferred: as given.
        squares: square of the norm of the last step's whole gradient.
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
        self.is_deferred = is_deferred
        self._store, self._is_owed = store, False
        self._config = config
        self._optimizer = optimizer
        self._weights = weights
        self._gradients: dict[Tensor, Tensor] = {}
        self._norms: dict[int, list[Tensor]] = {}
        self.squares = 0.0
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
            self.squares = squared_norm([norm for index in self._weights for norm in self._norms[index]])
            self._norms.clear()

    def update(self, stage: int) -> None:
        """Clip the stage's gradient as the whole gradient's norm demands, and update its weights.

        Where updates are deferred and none is owed, before the first step, nothing.
        """
        if self.is_deferred and not self._is_owed:
            return
        weights = self._weights[stage]
        parameters = [part.parameter for part in weights.parts]
        for parameter in parameters:
            # The optimizer skips parameters without a gradient, so that its step updates this stage alone.
            parameter.grad = self._gradients[parameter]
        if self._config.clips:
            clip_gradients(parameters, self.squares**0.5, self._config.clip_grad_norm)
        self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        weights.refresh()

    def seconds(self, stage: int, device: torch.device) -> float:
        """Outside a step, with the stage at rest: seconds of an update whose gradient is clipped; it is forgotten."""
        changed = [part.parameter for part in self._weights[stage].parts]
        steps = [self._optimizer.state[parameter]["step"] for parameter in changed]
        done, owed = [step.clone() for step in steps], (self.squares, self._is_owed)
        # Twice the limit, so that clipping is part of what is measured.
        self.squares, self._is_owed = 4 * self._config.clip_grad_norm**2, True
        try:
            # Nothing is taken back at the end of the visit, so weights and moments at rest stay as they are.
            with self._store.visit(stage, Content.WEIGHTS | Content.STATE | Content.GRADIENT):
                return median_seconds(lambda: self.update(stage), _REPEATS, device)
        finally:
            self.squares, self._is_owed = owed
            # Counters of steps are no part of the stage that the store has.
            for step, before in zip(steps, done, strict=True):
                step.copy_(before)

    def owe(self) -> None:
        """After a step, with its learning rate in the optimizer: its updates are due if they are deferred."""
        self._is_owed = self.is_deferred

    def settle(self) -> None:
        """Outside a step, with every stage at rest: do the updates that are due."""
        if not self._is_owed:
            return
        changed = Content.WEIGHTS | Content.STATE
        for stage in self._weights:
            with self._store.visit(stage, changed | Content.GRADIENT, changed):
                self.update(stage)
        self._is_owed = False
