"""This rank's part of the model, and the executors that run it: to train, to evaluate, to sample."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeloom.config import RunConfig
from pipeloom.execute.boundary import TensorSpec, stage_outputs
from pipeloom.execute.clock import Clock, CudaClock, HostClock
from pipeloom.execute.drive import run_rank
from pipeloom.execute.executor import Executor, StepResult
from pipeloom.execute.process_group import ProcessGroupTransport, edges_of
from pipeloom.execute.profile import Profile, profile_stages
from pipeloom.execute.stage import Objective, Stage
from pipeloom.execute.watch import Watch
from pipeloom.execute.world import World
from pipeloom.model import build_stage, stage_pieces
from pipeloom.schedule import Schedule, lower
from pipeloom.train.batch import Batch


def training_schedule(config: RunConfig) -> Schedule:
    """The schedule that a configuration trains with, ready to run."""
    return lower(config.choice().make(), config.schedule.receive_buffers)


def forward_schedule(config: RunConfig, num_microbatches: int) -> Schedule:
    """A forward-only schedule over the same stages, ready to run."""
    choice = replace(config.choice(), family="forward-only", num_microbatches=num_microbatches, group_size=None)
    return lower(choice.make(), config.schedule.receive_buffers)


class Pipeline:
    """The stages of one rank, connected to the other ranks'.

    Args:
        config: resolved.
        world: this process among the others.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._dtype = getattr(torch, config.training.dtype)
        assert config.layout.partition is not None
        self._pieces = stage_pieces(config.layout.partition)
        self.schedule = training_schedule(config)
        self.modules: dict[int, nn.Module] = {
            stage: self._build(stage, world.device) for stage in self.schedule.placement.stages_of(world.rank)
        }
        outputs = self._outputs(config.layout.microbatch_size)
        edges = edges_of(self.schedule, outputs)
        self._transport = ProcessGroupTransport(world.rank, edges, world.device, world.timeout)
        self._clock: Clock = CudaClock(world.device.index) if world.device.type == "cuda" else HostClock()
        self._outputs_in_training = outputs
        self._trainer = self._executor(self.schedule, outputs)
        self._evaluator = self._executor(forward_schedule(config, config.layout.num_microbatches), outputs)
        self._sampler = self._executor(forward_schedule(config, 1), self._outputs(1))
        self._running = self._trainer
        self._watch = Watch(world.store, world.rank, world.size, self._position)

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.schedule.num_stages - 1 in self.modules

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.schedule.placement.rank_by_stage[-1]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by their names in the whole model."""
        for module in self.modules.values():
            yield from module.named_parameters()

    def train_step(self, batch: Batch) -> StepResult:
        """Forward and backward of a step; gradients add to the parameters'. Outputs are shares of the loss."""
        return self._run(self._trainer, batch.inputs, batch.loss)

    def evaluate(self, batch: Batch) -> StepResult:
        """Forward only. Outputs are shares of the loss."""
        return self._run(self._evaluator, batch.inputs, batch.loss)

    def profile(self, batch: Batch) -> Profile | None:
        """Time every stage on a micro-batch of this batch; on rank 0 only. Gradients are dropped."""
        return profile_stages(
            self._world,
            self._stages(self.schedule, self._outputs_in_training),
            self._transport,
            outputs=self._outputs_in_training,
            tokens=batch.inputs[0],
            objective=batch.loss,
        )

    def next_logits(self, tokens: Tensor, position: int) -> Tensor | None:
        """Logits of the token after ``position``, on the rank with the last stage.

        Args:
            tokens: ``int64[1, seq_len]``; what stands behind ``position`` has no effect.
            position: of the last token that counts.
        """
        result = self._run(self._sampler, [tokens], lambda logits, _: logits[0, position])
        return result.outputs.get(0)

    def close(self) -> None:
        """Let go of threads; parameters stay."""
        self._watch.end()
        self._transport.close()

    def _position(self) -> str:
        return self._running.position()

    def _run(self, executor: Executor, inputs: list[Tensor], objective: Objective) -> StepResult:
        self._running = executor
        timeout_s = self._config.training.stall_timeout_s
        return run_rank(executor, inputs, objective, timeout_s, self._watch.positions)

    def _build(self, stage: int, device: torch.device | str) -> nn.Module:
        return build_stage(
            self._config.model,
            self._pieces[stage],
            max_positions=self._config.data.seq_len,
            seed=self._config.training.seed,
            dtype=self._dtype,
            device=device,
        )

    def _outputs(self, microbatch_size: int) -> tuple[TensorSpec, ...]:
        tokens = TensorSpec((microbatch_size, self._config.data.seq_len), torch.int64)
        return stage_outputs(lambda stage: self._build(stage, "meta"), self.schedule.num_stages, tokens)

    def _stages(self, schedule: Schedule, outputs: tuple[TensorSpec, ...]) -> dict[int, Stage]:
        return {
            index: Stage(module, index, outputs[index], needs_input_gradient=index > schedule.first_backward_stage)
            for index, module in self.modules.items()
        }

    def _executor(self, schedule: Schedule, outputs: tuple[TensorSpec, ...]) -> Executor:
        stages = self._stages(schedule, outputs)
        return Executor(
            schedule, self._world.rank, stages, outputs=outputs, transport=self._transport, clock=self._clock
        )
