"""Every rank of a run computes the same visit of a stage, with weights of one replica."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pipeloom.config import RunConfig
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import make_pipeline_group
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.stage import Objective
from pipeloom.execute.stages.visit import Given, Visited, visit
from pipeloom.model import Documents, StageModule
from pipeloom.model.compile import as_written
from pipeloom.runs.action_log import ActionLog
from pipeloom.schedule import Schedule


class Visits:
    """Visits of the stages of a pipeline, each on all of its ranks. Construction is collective.

    Args:
        config: resolved.
        world: all ranks.
        schedule: that trains.
        data_parallel: this rank's stages.
        outputs: of each stage for a micro-batch.
        build: stage -> a module without its weights.
        matrix: the tied matrix of a head that borrows it; ``None`` without.
        objective_of: batch -> loss of the last stage.
        log: where exchanges are noted.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        schedule: Schedule,
        data_parallel: DataParallel,
        outputs: tuple[TensorSpec, ...],
        *,
        build: Callable[[int], StageModule],
        matrix: TensorSpec | None,
        objective_of: Callable[[Batch], Objective],
        log: ActionLog | None,
    ) -> None:
        place, training = config.layout.coordinates(world.rank), config.training
        # Axes that divide a micro-batch: ranks with the same place compute the same.
        self._place = config.layout.part_of(place)
        self._pipeline = make_pipeline_group(config.layout, world, log)
        self._schedule, self._data_parallel, self._outputs = schedule, data_parallel, outputs
        self._build, self._matrix, self._objective_of = build, matrix, objective_of
        self._device, self._timeout_s = world.device, training.stall_timeout_s
        # What another rank builds is not compiled, and must have the same bits.
        self._mode = as_written if training.compile else nullcontext

    def result(self, stage: int, batch: Batch, seed: int) -> Visited:
        """Visit a stage with the first micro-batch. Collective.

        Args:
            stage: to visit.
            batch: of the first replica, on all ranks.
            seed: of what is drawn: hidden states, the gradient of the output.
        """
        with self._mode():
            if stage not in self._data_parallel.weights:
                module = self._build(stage)
                self._share(module, is_owner=False)
                return visit(module, self._given(stage, module, batch, seed))
            with self._data_parallel.gathered(stage, self._timeout_s):
                module = self._data_parallel.weights[stage].module
                assert isinstance(module, StageModule)
                self._share(module, is_owner=True)
                return visit(module, self._given(stage, module, batch, seed))

    def _share(self, module: nn.Module, *, is_owner: bool) -> None:
        """Send the weights of a stage from its rank to the others of the pipeline."""
        if self._pipeline.size == 1:
            return
        weights = [parameter.data for parameter in module.parameters()]
        # As bytes, whose sum with zeros has the same bits; that of numbers would lose the sign of -0.
        sent = [one.contiguous().view(-1).view(torch.uint8) for one in weights]
        whole = (
            torch.cat(sent) if is_owner else torch.zeros(sum(map(len, sent)), dtype=torch.uint8, device=self._device)
        )
        self._pipeline.all_reduce(whole)()
        if is_owner:
            return
        for one, received in zip(weights, whole.split(list(map(len, sent))), strict=True):
            one.copy_(received.clone().view(one.dtype).view(one.shape))

    def _given(self, stage: int, module: StageModule, batch: Batch, seed: int) -> Given:
        spec, first = self._outputs[stage], self._schedule.first_backward_stage
        generator = torch.Generator().manual_seed(hash((seed, *self._place)) % 2**63)

        def draw(shape: Sequence[int]) -> Tensor:
            # On the host, whose numbers do not depend on the device.
            return torch.randn(tuple(shape), generator=generator).to(self._device)

        between = self._outputs[0] if stage == 0 else self._outputs[stage - 1]
        dtype = between.dtype
        return Given(
            tensor=batch.inputs[0] if module.has_embedding else draw(between.shape).to(dtype),
            needs_gradient=stage > first,
            trains=stage >= first,
            objective=self._objective_of(batch) if module.has_head else None,
            documents=None if batch.firsts is None else Documents(batch.firsts[0]),
            matrix=draw(self._matrix.shape).to(spec.dtype) if module.borrows and self._matrix is not None else None,
            draw=draw,
        )
