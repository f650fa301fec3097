"""Updates of a rank whose experts are swapped: the rest behind the step, experts at their next visit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeloom.config import OptimizerConfig
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.clipping import gradient_norms, squared_norm
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.training.optimizers.optimizer import StageUpdates, WholeUpdates, begin_state, seconds_by_stage, set_rate


class ExpertUpdates(StageUpdates):
    """Updates all parameters by one norm, those of swapped experts while they are on the device.

    Args:
        config: rule and clipping.
        optimizer: of all parameters of the rank; its state is created here.
        data_parallel: has the stages; the last segment of each is swapped.
        store: of the experts.
    """

    def __init__(
        self, config: OptimizerConfig, optimizer: torch.optim.Optimizer, data_parallel: DataParallel, store: StageStore
    ) -> None:
        own = {stage: data_parallel.segments_of(stage)[-1].weights for stage in data_parallel.weights}
        super().__init__(config, optimizer, own, store, is_deferred=True)
        self._data_parallel = data_parallel
        self._rest = WholeUpdates(config, optimizer, data_parallel)
        begin_state(optimizer, config, self._rest.parts)
        self._of_rest = {part.parameter: part.parameter.grad for part in self._rest.parts}
        for parameter in self._of_rest:  # until the step ends, an update of experts is of them alone
            parameter.grad = None

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Context in which the rest has its gradients; an optimizer step updates every parameter that has one."""
        for parameter, gradient in self._of_rest.items():
            parameter.grad = gradient
        yield
        for parameter in self._of_rest:
            parameter.grad = None

    def complete(self, stage: int) -> None:
        """Note the norms of the gradients of a stage's experts."""
        self._norms[stage] = gradient_norms(self._weights[stage].counted_gradients(with_replicated=True))

    def squares(self) -> list[float]:
        """As ``WholeUpdates``, in the order in which it adds them."""
        norms = {stage: self._norms_of(stage) for stage in self._weights}
        if self._config.clip == "stage":
            return [squared_norm(norms.get(stage, [])) for stage in range(self._data_parallel.num_stages)]
        return [squared_norm([norm for each in norms.values() for norm in each])]

    def _norms_of(self, stage: int) -> list[Tensor]:
        return gradient_norms(self._data_parallel.counted_gradients(stage)) + self._norms.pop(stage, [])

    def end_step(self, squares: Sequence[float], lr: float) -> None:
        """Update all but the experts; these follow in the next step, with the rate and the norms of this one."""
        if self._config.clip == "stage":
            self._own_squares = dict(enumerate(squares))
        else:
            self._squares = sum(squares)
        super().end_step(squares, lr)
        set_rate(self._optimizer, lr)
        with self._shown():
            self._rest.end_step(squares, lr)

    def seconds(self, world: World) -> tuple[tuple[float, ...], float]:
        """As ``WholeUpdates``: of the experts of each stage, and of the rest behind the pipeline."""
        num_stages = self._data_parallel.num_stages
        experts_s = seconds_by_stage(world, num_stages, self._weights, lambda one: self._seconds(one, world.device))
        with self._shown():
            return experts_s, self._rest.seconds(world)[1]
