"""This rank's stages, and the executors that run them: for training, evaluation and sampling."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeloom.config import RunConfig
from pipeloom.data.checksums import check_tokens
from pipeloom.execute.clock import Clock, CudaClock
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices
from pipeloom.execute.communication.collectives import make_groups, make_tensor_group
from pipeloom.execute.communication.context_groups import make_context_group
from pipeloom.execute.communication.expert_groups import make_expert_group
from pipeloom.execute.communication.transport import Transport, edges_of
from pipeloom.execute.communication.wires import make_wires
from pipeloom.execute.executor import Executor, StepResult
from pipeloom.execute.lanes import Lane, Lanes
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.parts.moves import ActivationMoves
from pipeloom.execute.parts.part import Part
from pipeloom.execute.parts.stage_swaps import StageSwaps, StageUpdates
from pipeloom.execute.parts.tied import SwappedLoan, Tied
from pipeloom.execute.processes.watch import Watch, where_threads_are
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.stage import Continued, Objective, Stage, StepDocuments
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.measure.coded import with_codes
from pipeloom.measure.rehearsal import Rehearsal, warm_up
from pipeloom.measure.slices import profile_slices, with_slices
from pipeloom.measure.stages import Profile, profile_stages
from pipeloom.model import (
    SplitVocabulary,
    StageModule,
    TensorParallel,
    TensorSlice,
    Transformer,
    stage_pieces,
)
from pipeloom.model.compile import as_written, compile_pieces
from pipeloom.model.context_parallel import ContextParallel
from pipeloom.model.expert_parallel import ExpertParallel
from pipeloom.recipe import schedule_text
from pipeloom.runs.action_log import ActionLog
from pipeloom.schedule import Schedule
from pipeloom.training.expert_loads import loads_of, shared_experts
from pipeloom.training.move_costs import move_costs, moves_anything, swap_costs, tied_message_costs
from pipeloom.training.schedules import forward_schedule, run_of_replica, token_schedule, training_schedule
from pipeloom.training.stages import StageSizes, make_store, output_specs, shared_groups, stage_of
from pipeloom.training.visits import Visits


class Pipeline:
    """The stages of one rank, with connections to its pipeline, data-parallel and tensor-parallel ranks.

    Args:
        config: resolved.
        world: all ranks.
        trains: whether the stages are trained; otherwise they have weights only, without gradients, and run forwards.
        log: where the rank's last actions are noted; ``None`` for nowhere.
    """

    def __init__(self, config: RunConfig, world: World, *, trains: bool = True, log: ActionLog | None = None) -> None:
        self._world, self._config, self._trains, self._log = world, config, trains, log
        self._dtype, layout = getattr(torch, config.training.known_dtype), config.layout
        assert layout.partition is not None
        self._pieces = stage_pieces(layout.partition)
        self._place = layout.coordinates(world.rank)
        self._own = run_of_replica(config, layout.replica_of(self._place))
        self.schedule = training_schedule(self._own) if trains else self._forwards()
        self._clock = CudaClock(world.device.index) if world.device.type == "cuda" else Clock()
        self._lanes = Lanes(self._clock, world.device)
        own = self.schedule.placement.stages_of(self._place.pipeline)
        self._tensor_group = make_tensor_group(layout, world, _patience(config), log)
        self._parallel = TensorParallel(self._tensor_group, layout.sequence_parallel)
        self._context = ContextParallel(make_context_group(layout, world, _patience(config), log))
        travels = make_expert_group(layout, world, _patience(config), log)
        self._sharing = ExpertParallel(travels, layout.ep_overlap)
        self._vocabulary = SplitVocabulary(self._parallel, config.model.vocab_size or 0)
        self.store = make_store(config)
        self.data_parallel = DataParallel(
            self.schedule,
            ((stage, self._build(self._pieces[stage], world.device, master_dtype(self._dtype))) for stage in own),
            layout.shard if layout.data_ranks > 1 else "none",
            make_groups(layout, world, log),
            self._lanes.lane("data-parallel"),
            replicated=lambda stage: _transformer(stage).replicated(),
            sums_replicated=self._parallel.splits_sequence,
            dtype=self._dtype,
            store=self.store,
            is_whole=config.optimizer.rule.takes_whole,
            keeps_wide=config.optimizer.wide_weights,
            shared=shared_groups(config, world, self.schedule.placement, log),
            experts=shared_experts(self._own, world, self.schedule, self._pieces, log),
        )
        self._tied = self._share_matrix()
        self.loads = loads_of(config, world, self.data_parallel.modules, _patience(config), log) if trains else None
        lengths = layout.slice_lengths(config.data.seq_len)
        outputs = self._outputs_in_training = self._outputs(layout.microbatch_size, sum(lengths))
        self._slices = TokenSlices(lengths) if len(lengths) > 1 else None
        tied = self._tied.specs if self._tied else None
        edges = edges_of(self.schedule, outputs, tied, self._slices, layout.boundary)
        self._transport = Transport(self._place.pipeline, edges, world.device, world.timeout, layout.pipelines())
        self._wires = make_wires(self.schedule, self._place.pipeline, world, layout.pipelines())
        self.updates = StageUpdates()
        self._make_executors()
        with self._context.off():
            self._sampler = self._executor(self._forwards(1), self._outputs(1, config.data.seq_len), name="sample")
        self._decoders, self._continued = dict[tuple[int, ...], Executor](), dict[int, Continued]()
        self._is_cold = config.training.compile
        self._as_written = as_written if config.training.compile else nullcontext
        quiet_s = min(2.0, config.training.stall_timeout_s / 4)  # positions are published before any rank times out
        self._watch = Watch(world.store, world.rank, world.size, self._position, quiet_s=quiet_s, beat=self._beat)

    def _make_executors(self) -> None:
        """The executors that follow the schedule of a step."""
        self._moves = ActivationMoves(
            self.schedule,
            self._place.pipeline,
            self._lanes,
            self._wires,
            counts=moves_anything(self._config) or not self._config.training.compile,  # hooks would recompile
        )
        outputs = self._outputs_in_training
        self._running = self._trainer = self._executor(self.schedule, outputs, self._moves, name="training")
        self._evaluator = self._executor(self._forwards(), outputs, name="validation")

    def divide(self, config: RunConfig) -> None:
        """Continue with a configuration in which replicas take other numbers of micro-batches; weights stay.

        Messages, groups and gradients do not depend on the numbers: each stage is reduced once.
        """
        self._config, self._own = config, run_of_replica(config, config.layout.replica_of(self._place))
        self.schedule = training_schedule(self._own)
        self._make_executors()

    @property
    def schedule_text(self) -> str:
        """The training schedule as the text of a schedule file."""
        return schedule_text(self._own.recipe(), self.schedule, StageSizes(self._own))

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank has data-parallel index 0."""
        return self._place.data == 0

    @property
    def last_rank(self) -> int:
        """The global rank of the last stage in the first pipeline."""
        return self._config.layout.pipelines()[0][self.schedule.placement.rank_by_stage[-1]]

    @property
    def num_counted_parameters(self) -> int:
        """Number of this rank's parameters; the sum over all ranks counts each parameter once."""
        own = (one.weights for one in self.data_parallel.segments() if one.replica_share[0] == 0)
        return sum(weights.num_parameters(with_replicated=self._place.tensor == 0) for weights in own)

    def counted_loss(self, result: StepResult) -> float:
        """This rank's share of the loss; the sum over all ranks counts each micro-batch once."""
        outputs = list(result.outputs.values())
        return float(torch.stack(outputs).sum()) if outputs and self._place.tensor == 0 else 0.0

    @property
    def exchange_s(self) -> float:
        """Total seconds that this rank has spent in tensor-parallel collectives, on the host's clock."""
        return self._tensor_group.busy_s

    def slices(self) -> dict[str, TensorSlice]:
        """For each parameter of this rank's stages, its slice of the whole parameter."""
        return {
            name: here
            for one in self.data_parallel.weights.values()
            for name, here in _transformer(one.module).slices().items()
        }

    def batch(
        self,
        windows: npt.NDArray[np.int64],
        num_counted: int | None = None,
        replica: int | None = None,
        *,
        is_alone: bool = False,
    ) -> Batch:
        """A replica's micro-batches, by default this rank's, from a whole step's windows; the first or all count.

        With ``is_alone`` all windows are those of one replica.

        Raises:
            UserError: a token is outside the vocabulary.
        """
        check_tokens(windows, self._config.model.vocab_size)
        counts = self._config.layout.microbatches_by_replica
        own = self._config.layout.replica_of(self._place) if replica is None else replica
        return Batch.of(
            windows,
            counts[own : own + 1] if is_alone else counts,
            self._world.device,
            replica=0 if is_alone else own,
            context=self._context.group,
            num_counted=num_counted,
            by_document=self._config.data.by_document,
        )

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of this rank's stages after a step, all-gathered from their shards, by name in the whole model.

        With tensor parallelism, those of the rank's slices; of ranks that hold the same ones, on the first. Collective.
        """
        timeout_s = self._config.training.stall_timeout_s
        found: dict[str, Tensor] = {}
        for stage in self.data_parallel.weights:
            found |= self.data_parallel.gather_gradient(stage, timeout_s)
        for one in self.data_parallel.shared:
            found |= one.weights.order.views(one.gradient)
        return found

    def visits(self) -> Visits:
        """Visits of stages outside a step. Collective."""
        return Visits(
            self._config,
            self._world,
            self.schedule,
            self.data_parallel,
            self._outputs_in_training,
            build=lambda stage: self._build(self._pieces[stage], self._world.device, self._dtype),
            matrix=None if self._tied is None else self._tied.matrix,
            objective_of=partial(self._loss_of, z_loss=self._config.training.z_loss),
            log=self._log,
        )

    def train_step(self, batch: Batch) -> StepResult:
        """Run forwards and backwards of a step, starting with zero gradients. Outputs are shares of the loss."""
        self._warm_up(batch)
        cut = batch if self._slices is None else batch.cut(self._slices)
        objective = self._loss_of(cut, self._config.training.z_loss)
        result = self._run(self._trainer, cut.inputs, objective, _documents(cut, self.schedule.num_slices))
        self.data_parallel.sum_shared(self._config.training.stall_timeout_s)
        return result

    def evaluate(self, batch: Batch) -> StepResult:
        """Run forwards only. Outputs are shares of the loss."""
        with self._as_written():
            return self._run(self._evaluator, batch.inputs, self._loss_of(batch), _documents(batch))

    def profile(self, batch: Batch) -> Profile | None:
        """Time every stage on a micro-batch of this batch, its collectives, and moves. Collective; drops gradients.

        Returns:
            The profile on rank 0, ``None`` elsewhere.
        """
        self._warm_up(batch)
        with self._rehearsal(batch) as rehearsal:
            found = profile_stages(rehearsal, self._transport, self._clock)
        here = self.schedule, self._place.pipeline, self._world
        more = {
            **tied_message_costs(self._tied, *here, self._transport, config=self._config),
            **move_costs(self._wires, *here, config=self._config),
            **swap_costs(self.store, self.data_parallel.weights, self._world, config=self._config),
        }
        if found is not None:
            found = found.with_costs(**more)
        if self._slices is None:
            return found
        # Last: slices take their share of all other costs.
        with self._rehearsal(batch, self._slices) as rehearsal:
            times = profile_slices(rehearsal)
        return found if found is None or times is None else with_slices(found, times, self._slices)

    def next_logits(self, tokens: Tensor, position: int) -> Tensor | None:
        """Logits of the token after ``position``, on the rank with the last stage.

        Args:
            tokens: ``int64[1, seq_len]``; those after ``position`` have no effect.
            position: of the last token of the context.

        Returns:
            ``[vocab_size]`` on the rank of the last stage, ``None`` elsewhere.
        """
        with self._as_written(), self._context.off():
            result = self._run(self._sampler, [tokens], lambda logits, _: self._vocabulary.whole(logits[0, position]))
        return result.outputs.get(0)

    def continue_sequences(
        self,
        microbatches: Sequence[Continued],
        tokens: Sequence[Tensor],
        wanted: int,
        decide: Callable[[Tensor, int], None] | None = None,
    ) -> dict[int, Tensor]:
        """Run new tokens of sequences through the stages, and cache their keys and values.

        Args:
            microbatches: the cached part of each.
            tokens: of each micro-batch, ``int64[rows, tokens]``, all of one shape; the number of tokens is a multiple
                of the tensor-parallel size.
            wanted: index of the new token whose next token's logits are returned.
            decide: on one rank, called with the logits of a micro-batch and its number before the next one begins,
                whose tokens it may fill in: the micro-batches are tokens of the same sequences. ``None``: they are
                sequences of their own.

        Returns:
            On ranks with the last stage, micro-batch -> logits, ``[rows, vocab_size]``.
        """
        number, *shape = key = len(microbatches), *tokens[0].shape, decide is not None
        if key not in self._decoders:
            schedule = self._forwards(number) if decide is None else token_schedule(self._own, number)
            self._decoders[key] = self._executor(schedule, self._outputs(*shape[:2]), continues=True)
        self._continued.update(enumerate(microbatches))

        def logits_of(logits: Tensor, microbatch: int) -> Tensor:
            found = self._vocabulary.whole(logits[:, wanted])
            if decide is not None:
                decide(found, microbatch)
            return found

        with self._as_written():
            return self._run(self._decoders[key], list(tokens), logits_of).outputs

    def lane(self, name: str) -> Lane:
        """A lane of this rank beside those of its row."""
        return self._lanes.lane(name)

    def close(self) -> None:
        """Stop threads; parameters stay."""
        self._watch.end()
        self._transport.close()
        self._lanes.close()

    def _warm_up(self, batch: Batch) -> None:
        """Compile the stages at the first call, if ``training.compile`` is set."""
        if not self._is_cold:
            return
        self._is_cold = False
        with self._rehearsal(batch) as rehearsal:
            warm_up(rehearsal)

    @contextmanager
    def _rehearsal(self, batch: Batch, slices: TokenSlices | None = None) -> Iterator[Rehearsal]:
        """The stages outside a step; a tied head has the embedding's matrix meanwhile."""
        cut = batch if slices is None else batch.cut(slices)
        outputs = self._outputs_in_training
        with nullcontext() if self._tied is None else self._tied.rehearsal(self._world.device):
            exact = Rehearsal(
                world=self._world,
                layout=self._config.layout,
                schedule=self.schedule,
                stages=self._stages(self.schedule, outputs, slices),
                data_parallel=self.data_parallel,
                outputs=outputs,
                tokens=cut.inputs[: 1 if slices is None else len(slices.lengths)],
                objective=self._loss_of(cut, self._config.training.z_loss),
                slices=slices,
                firsts=None if cut.firsts is None else cut.firsts[: 1 if slices is None else len(slices.lengths)],
            )
            yield with_codes(exact)

    def _beat(self, is_quiet: bool) -> None:
        """Note in the log that this process lives, and while the run hangs what has ended and where its threads are."""
        if self._log is None:
            return
        self._log.beat()
        if is_quiet:
            self._running.note_ended()
        # Empty where the rank continues: the place of an earlier wait is no news of a later one.
        self._log.note(where_threads_are() if is_quiet else "")

    def _position(self) -> str:
        """This rank's position in the schedule, for messages; with those on axes of several ranks."""
        groups = self._tensor_group, self._context.group, self._sharing.group
        parts = self._running.position(), *(one.position() for one in groups)
        place, others = ", ".join(filter(None, parts)), self._config.layout.words_of(self._place)
        return f"process {self._world.rank} ({others}): {place}" if others else place

    def _loss_of(self, batch: Batch, z_loss: float = 0.0) -> Objective:
        cross_entropy = partial(self._vocabulary.summed_cross_entropy, z_loss=z_loss)
        return partial(batch.loss, cross_entropy=cross_entropy)

    def _run(
        self, executor: Executor, inputs: list[Tensor], objective: Objective, documents: StepDocuments | None = None
    ) -> StepResult:
        self._running = executor
        timeout_s = self._config.training.stall_timeout_s
        return executor.run(inputs, objective, timeout_s, self._watch.positions, documents)

    def _build(self, pieces: range, device: torch.device | str, dtype: torch.dtype) -> StageModule:
        ranks = {"parallel": self._parallel, "context": self._context, "sharing": self._sharing}
        module = stage_of(self._config, pieces, device, dtype=dtype, **ranks)
        module.set_recompute(self._config.layout.recompute_by_layer(self._config.model.num_layers))
        if self._config.training.compile and torch.device(device).type != "meta":
            assert isinstance(module, Transformer), "the configuration refuses to compile others"
            compile_pieces(module, self._config.training.compile_backend)
        if not self._trains:
            module.requires_grad_(requires_grad=False).eval()
        return module

    def _forwards(self, number: int | None = None) -> Schedule:
        return forward_schedule(self._own, number or self._own.layout.num_microbatches, trains=self._trains)

    def _share_matrix(self) -> Tied | None:
        """The executor part for a tied matrix, if embedding and head are on different stages."""
        last = self.schedule.num_stages - 1
        if not self._config.model.tied or last == 0:
            return None
        stages, wide = self.data_parallel.weights, master_dtype(self._dtype)
        borrower = _transformer(stages[last].module) if last in stages else None
        first = self._build(self._pieces[0][:1], "meta", self._dtype)
        matrix = first.get_parameter(first.tied_name)
        loan = None
        if self.store is not None and self._config.swaps_stages:
            weights, gradient = (
                torch.zeros(matrix.shape, dtype=dtype, device=self._world.device) for dtype in (matrix.dtype, wide)
            )
            loan = SwappedLoan(self.store, last, weights, gradient)
        return Tied(
            first.tied_name,
            TensorSpec.of(matrix),
            gradient_dtype=wide,
            lender=stages.get(0),
            borrower=borrower,
            loan=loan,
            is_trained=self._config.pairs is None,
        )

    def _outputs(self, microbatch_size: int, num_tokens: int) -> tuple[TensorSpec, ...]:
        """The spec of every stage's output, for so many tokens of each sequence."""
        between, logits = output_specs(self._config, self._parallel, microbatch_size, num_tokens)
        return (*[between] * (self.schedule.num_stages - 1), logits)

    def _stages(
        self,
        schedule: Schedule,
        outputs: tuple[TensorSpec, ...],
        slices: TokenSlices | None,
        *,
        continues: bool = False,
    ) -> dict[int, Stage]:
        first, split = schedule.first_backward_stage, set(schedule.split_stages)
        if split and self.data_parallel.shared:  # layers that two stages share defer for both
            split.update(self.data_parallel.weights)
        return {
            index: Stage(
                one.module,
                index,
                outputs[index],
                needs_input_gradient=index > first,
                splits=index in split,
                slices=slices,
                continued=self._continued if continues else None,
            )
            for index, one in self.data_parallel.weights.items()
        }

    def _executor(
        self,
        schedule: Schedule,
        outputs: tuple[TensorSpec, ...],
        moves: ActivationMoves | None = None,
        *,
        continues: bool = False,
        name: str | None = None,
    ) -> Executor:
        training, rank = self._config.training, self._place.pipeline
        slices = self._slices if schedule.num_slices > 1 else None  # only the training schedule has token slices
        stages = self._stages(schedule, outputs, slices, continues=continues)
        # What is not trained with is of the model alone: no message of it is rounded.
        boundary = self._config.layout.boundary if name == "training" else None
        parts: list[Part] = [Compute(stages, slices=slices, keeper=moves), Messages(outputs, slices, boundary)]
        parts += [part for part in (self.data_parallel, self._tied, moves) if part is not None]
        if self.store is not None:
            swaps = StageSwaps(self.store, self._lanes, training.stall_timeout_s)
            parts.append(swaps)
        if self.loads is not None:
            parts.append(self.loads)
        parts.append(self.updates)  # after the tied matrix, whose gradient has to be added before the update
        log = None if self._log is None or name is None else self._log.row(name, schedule, rank)
        return Executor(
            schedule, rank, parts, transport=self._transport, clock=self._clock, run_ahead=training.run_ahead, log=log
        )


def _patience(config: RunConfig) -> timedelta | None:
    """Timeout of tensor-parallel collectives; ``None`` (the world's timeout) while other ranks may compile."""
    return None if config.training.compile else timedelta(seconds=config.training.stall_timeout_s)


def _documents(batch: Batch, num_slices: int = 1) -> StepDocuments | None:
    return None if batch.firsts is None else StepDocuments(batch.firsts, num_slices)


def _transformer(stage: nn.Module) -> StageModule:
    assert isinstance(stage, StageModule)
    return stage
