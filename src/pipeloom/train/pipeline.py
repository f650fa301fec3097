"""This rank's part of the model, and the executors that run it: to train, to evaluate, to sample."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeloom.config import RunConfig
from pipeloom.execute.clock import Clock, CudaClock, HostClock
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices, stage_outputs
from pipeloom.execute.communication.process_collectives import make_groups, make_tensor_group
from pipeloom.execute.communication.process_group import ProcessGroupTransport, edges_of
from pipeloom.execute.communication.wires import make_wires
from pipeloom.execute.drive import run_rank
from pipeloom.execute.executor import Executor, StepResult
from pipeloom.execute.lanes import ProcessMoveLanes, StreamLane, ThreadLane
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.parts.moves import ActivationMoves
from pipeloom.execute.parts.part import Part
from pipeloom.execute.parts.stage_swaps import StageSwaps, StageUpdates
from pipeloom.execute.parts.tied import Tied
from pipeloom.execute.processes.watch import Watch
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.stage import Objective, Stage
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.measure.moves import time_messages, time_moves, time_stage_swaps
from pipeloom.measure.rehearsal import warm_up
from pipeloom.measure.slices import profile_slices, with_slices
from pipeloom.measure.stages import Collectives, Profile, profile_stages
from pipeloom.model import (
    TIED_NAME,
    SplitVocabulary,
    TensorParallel,
    TensorSlice,
    Transformer,
    stage_pieces,
)
from pipeloom.model.compile import as_written, compile_pieces
from pipeloom.passes import Moves
from pipeloom.recipe import build, schedule_text
from pipeloom.schedule import Schedule
from pipeloom.train.moves import StageSizes, moves_anything, saved_bytes
from pipeloom.train.stage_swaps import lend_matrix, make_host_lanes, make_store
from pipeloom.train.stages import stage_of


def training_schedule(config: RunConfig) -> Schedule:
    """The schedule that a configuration trains with, ready to run."""
    return build(config.recipe(), StageSizes(config))


def forward_schedule(config: RunConfig, num_microbatches: int) -> Schedule:
    """A forward-only schedule over the same stages, ready to run."""
    sizes = {"num_microbatches": num_microbatches, "group_size": None, "keep": None, "num_slices": 1}
    choice = config.choice()  # stages stay where the family of the training has them
    forward_only = replace(choice, family="forward-only", placement=choice.placement_name, **sizes)
    return build(replace(config.recipe(), start=forward_only, moves=Moves(), given=None), StageSizes(config))


class Pipeline:
    """The stages of one rank, connected to those of its pipeline's and its data-parallel group's other ranks.

    Args:
        config: resolved.
        world: this process among the others.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._dtype = getattr(torch, config.training.known_dtype)
        assert config.layout.partition is not None
        self._pieces = stage_pieces(config.layout.partition)
        layout = config.layout
        self._place = layout.coordinates(world.rank)
        self.schedule = training_schedule(config)
        self._clock: Clock = CudaClock(world.device.index) if world.device.type == "cuda" else HostClock()
        own = self.schedule.placement.stages_of(self._place.pipeline)
        is_cuda = world.device.type == "cuda"
        self._tensor_group = make_tensor_group(layout, world, _patience(config))
        self._parallel = TensorParallel(self._tensor_group, layout.sequence_parallel)
        assert config.model.vocab_size is not None, "the model configuration is not resolved"
        self._vocabulary = SplitVocabulary(self._parallel, config.model.vocab_size)
        self.store = make_store(config)
        self._host_lanes = None if self.store is None else make_host_lanes(self._clock, world)
        self.data_parallel = DataParallel(
            self.schedule,
            ((stage, self._build(self._pieces[stage], world.device, master_dtype(self._dtype))) for stage in own),
            layout.shard if layout.dp > 1 else "none",
            make_groups(layout, world),
            StreamLane(self._clock, world.device.index) if is_cuda else ThreadLane(self._clock),
            replicated=lambda stage: _transformer(stage).replicated(),
            sums_replicated=layout.sequence_parallel,
            dtype=self._dtype,
            store=self.store,
        )
        self._tied = self._share_matrix()
        outputs = self._outputs(layout.microbatch_size)
        lengths = layout.slice_lengths(config.data.seq_len)
        self._slices = TokenSlices(lengths) if len(lengths) > 1 else None
        edges = edges_of(self.schedule, outputs, None if self._tied is None else self._tied.specs, self._slices)
        self._transport = ProcessGroupTransport(
            self._place.pipeline, edges, world.device, world.timeout, layout.pipelines()
        )
        self._outputs_in_training = outputs
        self._wires = make_wires(self.schedule, self._place.pipeline, world, layout.pipelines())
        self.updates = StageUpdates()
        self._moves = ActivationMoves(
            self.schedule,
            self._place.pipeline,
            ProcessMoveLanes(self._clock, world.device),
            self._wires,
            counts=moves_anything(config) or not config.training.compile,  # hooks would compile the first use anew
        )
        self._trainer = self._executor(self.schedule, outputs, self._moves)
        self._evaluator = self._executor(forward_schedule(config, layout.num_microbatches), outputs)
        self._sampler = self._executor(forward_schedule(config, 1), self._outputs(1))
        self._is_cold = config.training.compile
        self._as_written = as_written if config.training.compile else nullcontext
        self._running = self._trainer
        quiet_s = min(2.0, config.training.stall_timeout_s / 4)  # published twice before anyone gives up
        self._watch = Watch(world.store, world.rank, world.size, self._position, quiet_s=quiet_s)

    @property
    def schedule_text(self) -> str:
        """The schedule of the training as the text of a file."""
        return schedule_text(self._config.recipe(), self.schedule, StageSizes(self._config))

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is in the pipeline that represents all replicas where one does."""
        return self._place.data == 0

    @property
    def last_rank(self) -> int:
        """The rank of the first replica that computes the loss."""
        return self._config.layout.pipelines()[0][self.schedule.placement.rank_by_stage[-1]]

    @property
    def num_counted_parameters(self) -> int:
        """Parameters of this rank's stages such that over all ranks each is counted once."""
        if not self.is_first_replica:
            return 0
        with_replicated = self._place.tensor == 0
        return sum(
            one.order.num_parameters(with_replicated=with_replicated) for one in self.data_parallel.weights.values()
        )

    def counted_loss(self, result: StepResult) -> float:
        """Sum of this rank's shares of the loss such that over all ranks each is counted once."""
        outputs = list(result.outputs.values())
        return float(torch.stack(outputs).sum()) if outputs and self._place.tensor == 0 else 0.0

    @property
    def exchange_s(self) -> float:
        """Seconds that this rank has spent so far in exchanges of tensor parallelism, as the host sees them."""
        return self._tensor_group.busy_s

    def slices(self) -> dict[str, TensorSlice]:
        """Where the parameters of this rank's stages lie in those of the whole model."""
        return {
            name: here
            for one in self.data_parallel.weights.values()
            for name, here in _transformer(one.module).slices().items()
        }

    def batch(self, windows: npt.NDArray[np.int64]) -> Batch:
        """This replica's part of the windows of a whole step."""
        layout, device = self._config.layout, self._world.device
        return Batch.of(windows, layout.num_microbatches, device, replica=self._place.data, num_replicas=layout.dp)

    def gradients(self) -> dict[str, Tensor]:
        """After a step, gradients of this rank's stages by name in the whole model, put together from the shards.

        With tensor parallelism they are those of the rank's slices. Every rank calls it.
        """
        timeout_s = self._config.training.stall_timeout_s
        found: dict[str, Tensor] = {}
        for stage in self.data_parallel.weights:
            found |= self.data_parallel.gather_gradient(stage, timeout_s)
        return found

    def train_step(self, batch: Batch) -> StepResult:
        """Forward and backward of a step, from gradients of zero. Outputs are shares of the loss."""
        self._warm_up(batch)
        cut = batch if self._slices is None else batch.cut(self._slices)
        return self._run(self._trainer, cut.inputs, self._loss_of(cut))

    def evaluate(self, batch: Batch) -> StepResult:
        """Forward only. Outputs are shares of the loss."""
        with self._as_written():
            return self._run(self._evaluator, batch.inputs, self._loss_of(batch))

    def profile(self, batch: Batch) -> Profile | None:
        """Time every stage on a micro-batch of this batch, and its collectives; on rank 0 only. No gradient is left."""
        self._warm_up(batch)
        with self._rehearsal():
            found = profile_stages(
                self._world,
                self._stages(self.schedule, self._outputs_in_training, None),
                self._transport,
                outputs=self._outputs_in_training,
                tokens=batch.inputs[0],
                objective=self._loss_of(batch),
                layout=self._config.layout,
                collectives=Collectives(self.schedule, self.data_parallel, self._clock),
            )
        return self._with_slices(self._with_stage_swaps(self._with_moves(self._with_tied_messages(found))), batch)

    def _with_slices(self, profile: Profile | None, batch: Batch) -> Profile | None:
        """The profile, on the rank that has one, with the seconds of token slices: last, for they share its costs."""
        if self._slices is None:
            return profile
        cut = batch.cut(self._slices)
        with self._rehearsal():
            times = profile_slices(
                self._world,
                self._stages(self.schedule, self._outputs_in_training, self._slices),
                self.data_parallel,
                outputs=self._outputs_in_training,
                slices=self._slices,
                tokens=cut.inputs[: len(self._slices.lengths)],
                objective=self._loss_of(cut),
                layout=self._config.layout,
            )
        return profile if profile is None or times is None else with_slices(profile, times, self._slices)

    def _with_tied_messages(self, profile: Profile | None) -> Profile | None:
        """The profile, on the rank that has one, with the seconds of a message about a tied matrix."""
        if self._tied is None:
            return profile
        own_s = time_messages(self._tied, self.schedule, self._place.pipeline, self._world, self._transport)
        every = self._world.gather(own_s)
        if profile is None or every is None:
            return None
        tied_s, tied_grad_s = max(every[rank] for rank in self._config.layout.pipelines()[0])
        return replace(profile, costs=replace(profile.costs, tied_s=tied_s, tied_grad_s=tied_grad_s))

    def _with_moves(self, profile: Profile | None) -> Profile | None:
        """The profile, on the rank that has one, with the seconds of moving what stages keep."""
        if not moves_anything(self._config):
            return profile
        whole = [int(one) for one in saved_bytes(self._config).by_stage(self.schedule.num_stages)]
        own = time_moves(self.schedule, self._place.pipeline, self._wires, self._world, whole)
        every: list[tuple[dict[int, float], dict[int, float]]] | None = self._world.gather(own)
        if profile is None or every is None:
            return None
        tiers = zip(*(every[rank] for rank in self._config.layout.pipelines()[0]), strict=True)
        evict_s, offload_s = ({stage: one for by_stage in tier for stage, one in by_stage.items()} for tier in tiers)
        stages = range(self.schedule.num_stages)
        seconds = [tuple(found.get(stage, 0.0) for stage in stages) for found in (evict_s, offload_s)]
        return replace(profile, costs=replace(profile.costs, evict_s=seconds[0], offload_s=seconds[1]))

    def _with_stage_swaps(self, profile: Profile | None) -> Profile | None:
        """The profile, on the rank that has one, with the seconds of moving whole stages."""
        if self.store is None or profile is None:
            return profile
        moves = time_stage_swaps(self.store, self.data_parallel.weights, self._world.device)
        return replace(profile, costs=replace(profile.costs, moves=moves))

    def next_logits(self, tokens: Tensor, position: int) -> Tensor | None:
        """Logits of the token after ``position``, on the rank with the last stage.

        Args:
            tokens: ``int64[1, seq_len]``; what stands behind ``position`` has no effect.
            position: of the last token that counts.
        """
        with self._as_written():
            result = self._run(self._sampler, [tokens], lambda logits, _: self._vocabulary.whole(logits[0, position]))
        return result.outputs.get(0)

    def close(self) -> None:
        """Let go of threads; parameters stay."""
        self._watch.end()
        self._transport.close()
        self._moves.close()
        self.data_parallel.close()
        if self._host_lanes is not None:
            self._host_lanes.close()

    def _warm_up(self, batch: Batch) -> None:
        """Compile the stages if they are to be and are not yet."""
        if not self._is_cold:
            return
        self._is_cold = False
        stages, outputs = self._stages(self.schedule, self._outputs_in_training, None), self._outputs_in_training
        sizes = {"outputs": outputs, "tokens": batch.inputs[0], "objective": self._loss_of(batch)}
        with self._rehearsal():
            warm_up(self._world, stages, self.data_parallel, **sizes, first=self._config.layout.tensor_groups()[0])

    def _rehearsal(self) -> AbstractContextManager[None]:
        """Outside a step, meanwhile a borrowed matrix is there for stages that need one."""
        return nullcontext() if self._tied is None else self._tied.rehearsal(self._world.device)

    def _position(self) -> str:
        """Where this rank is, for people; pipeline ranks of several pipelines have the same numbers."""
        layout, exchange = self._config.layout, self._tensor_group.position()
        place = ", ".join([self._running.position(), *([exchange] if exchange else [])])
        if layout.dp == layout.tp == 1:
            return place
        others = [f"replica {self._place.data}"] if layout.dp > 1 else []
        others += [f"tensor rank {self._place.tensor}"] if layout.tp > 1 else []
        return f"process {self._world.rank} ({', '.join(others)}): {place}"

    def _loss_of(self, batch: Batch) -> Objective:
        return partial(batch.loss, cross_entropy=self._vocabulary.summed_cross_entropy)

    def _run(self, executor: Executor, inputs: list[Tensor], objective: Objective) -> StepResult:
        self._running = executor
        timeout_s = self._config.training.stall_timeout_s
        return run_rank(executor, inputs, objective, timeout_s, self._watch.positions)

    def _build(self, pieces: range, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        module = stage_of(self._config, pieces, device, dtype=dtype, parallel=self._parallel)
        module.set_recompute(self._config.layout.recompute_by_layer(self._config.model.num_layers))
        if self._config.training.compile and torch.device(device).type != "meta":
            compile_pieces(module, self._config.training.compile_backend)
        return module

    def _share_matrix(self) -> Tied | None:
        """This rank's part in the matrix of embedding and head, if they share one over two stages."""
        last = self.schedule.num_stages - 1
        if not self._config.model.tied or last == 0:
            return None
        weights, wide = self.data_parallel.weights, master_dtype(self._dtype)
        borrower = _transformer(weights[last].module) if last in weights else None
        matrix = self._build(self._pieces[0][:1], "meta", self._dtype).get_parameter(TIED_NAME)
        return Tied(
            TIED_NAME,
            TensorSpec.of(matrix),
            gradient_dtype=wide,
            lender=weights.get(0),
            borrower=borrower,
            lent=None if self.store is None else lend_matrix(self.store, last, matrix, wide, self._world),
        )

    def _outputs(self, microbatch_size: int) -> tuple[TensorSpec, ...]:
        """The spec of every stage's output."""
        tokens = TensorSpec((microbatch_size, self._config.data.seq_len), torch.int64)
        # layers return tensors of their input's shape, so that the embedding and the head say everything; to run all
        # layers on the meta device takes longer than to train a small model
        ends = (self._pieces[0][:1], self._pieces[-1][-1:])
        between, logits = stage_outputs(lambda end: self._build(ends[end], "meta", self._dtype), 2, tokens)
        return (*[between] * (self.schedule.num_stages - 1), logits)

    def _stages(
        self, schedule: Schedule, outputs: tuple[TensorSpec, ...], slices: TokenSlices | None
    ) -> dict[int, Stage]:
        first, split = schedule.first_backward_stage, schedule.split_stages
        return {
            index: Stage(
                one.module,
                index,
                outputs[index],
                needs_input_gradient=index > first,
                splits=index in split,
                slices=slices,
            )
            for index, one in self.data_parallel.weights.items()
        }

    def _executor(
        self,
        schedule: Schedule,
        outputs: tuple[TensorSpec, ...],
        moves: ActivationMoves | None = None,
    ) -> Executor:
        training, rank = self._config.training, self._place.pipeline
        slices = self._slices if schedule.num_slices > 1 else None  # only training cuts sequences
        stages = self._stages(schedule, outputs, slices)
        parts: list[Part] = [Compute(stages, slices=slices, keeper=moves), Messages(outputs, slices)]
        parts += [part for part in (self.data_parallel, self._tied, moves) if part is not None]
        if self.store is not None and self._host_lanes is not None:
            swaps = StageSwaps(self.store, self._host_lanes, training.stall_timeout_s)
            parts += [swaps, self.updates]  # behind the tied matrix, whose gradient belongs to what is updated
        return Executor(
            schedule, rank, parts, transport=self._transport, clock=self._clock, run_ahead=training.run_ahead
        )


def _patience(config: RunConfig) -> timedelta | None:
    """How long a rank waits in the middle of a stage: as long as for a message, or while another one may compile."""
    return None if config.training.compile else timedelta(seconds=config.training.stall_timeout_s)


def _transformer(stage: nn.Module) -> Transformer:
    assert isinstance(stage, Transformer)
    return stage
