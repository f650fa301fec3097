"""The optimizer's step, stage by stage: the same numbers as all at once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeloom.config import OptimizerConfig
from pipeloom.execute.stage_store import StageStore
from pipeloom.execute.weights import StageWeights
from pipeloom.schedule.stage_swaps import Content
from pipeloom.train.optimizer import MOMENTS, begin_state, clip_gradients, gradient_norms, squared_norm


class StageUpdates:
    """AdamW on the stages of a rank that is alone, each when it is on the device with its gradient and its state.

    Args:
        config: clipping.
        optimizer: over the parts of all stages; its state is begun and given to the store.
        weights: of each stage.
        store: has the stages.

    Attributes:
        squares: square of the norm of the last step's whole gradient.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        optimizer: torch.optim.AdamW,
        weights: Mapping[int, StageWeights],
        store: StageStore,
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._weights = weights
        self._gradients: dict[Tensor, Tensor] = {}
        self._norms: dict[int, list[Tensor]] = {}
        self.squares = 0.0
        for stage, one in weights.items():
            for part in one.parts:
                state = begin_state(optimizer, [part.parameter])[part.parameter]
                for moment in MOMENTS:
                    store.add(stage, Content.STATE, state[moment])
                assert part.parameter.grad is not None
                self._gradients[part.parameter] = part.parameter.grad
                part.parameter.grad = None

    def complete(self, stage: int) -> None:
        """Note the norm of a stage's gradient; that of the last stage to come makes the whole gradient's known."""
        self._norms[stage] = gradient_norms(self._weights[stage].counted_gradients(with_replicated=True))
        if len(self._norms) == len(self._weights):
            self.squares = squared_norm([norm for index in self._weights for norm in self._norms[index]])
            self._norms.clear()

    def update(self, stage: int) -> None:
        """Clip the stage's gradient as the whole gradient's norm demands, and update its weights."""
        weights = self._weights[stage]
        parameters = [part.parameter for part in weights.parts]
        for parameter in parameters:
            parameter.grad = self._gradients[parameter]
        if self._config.clips:
            clip_gradients(parameters, self.squares**0.5, self._config.clip_grad_norm)
        self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None
        weights.refresh()
