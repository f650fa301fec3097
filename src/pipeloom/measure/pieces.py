"""Measures a model's pieces as they train: embedding, one layer, head, a message between stages, the update.

All processes compute at the same time, with the stages, transports and optimizer of a run. With more processes than
cores, seconds are CPU time, which excludes other processes; otherwise they are wall-clock time. Measurements run in
rounds, one of each kind per round, so that disturbances affect all kinds alike. The result is the lower quartile over
the rounds, since disturbances only make a measurement longer.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import quantiles

import numpy as np
import numpy.typing as npt
import torch

from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import make_tensor_group
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import World, join_forked
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.stage import Stage
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.measure.rehearsal import Exchange, StageRun
from pipeloom.measure.stopwatch import Now, now
from pipeloom.measure.update import MakeOptimizer, Update
from pipeloom.model import SplitVocabulary, TensorParallel, Transformer, build_stage
from pipeloom.model.tensor_parallel import WHOLE
from pipeloom.workload.layout import Layout, Recompute
from pipeloom.workload.model import ModelConfig, shape_of
from pipeloom.workload.run import Run

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 200
_MOST_LAYERS = 4
"""Layers of the longest timed stage."""
_MESSAGES = 3
"""Messages from each rank to each neighbor in a round."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class PieceRequest:
    """What to measure.

    Attributes:
        model: resolved; at least two layers.
        seq_len: tokens of a sequence.
        micro_batches: micro-batch sizes to measure, in sequences.
        tp: tensor-parallel sizes to measure; each divides ``num_processes``.
        recompute: kinds of recomputation to measure.
        sequence_parallel: whether tensor parallelism is with sequence parallelism.
        kind: "cpu" or "cuda".
        num_processes: processes that measure at the same time, on this host.
        num_cores: of this host, for processes on a CPU.
        budget_s: approximate seconds for all measurements together.
        make_optimizer: makes the optimizer of a run.
        clip_grad_norm: limit of the gradient norm.
    """

    model: ModelConfig
    seq_len: int
    micro_batches: tuple[int, ...]
    tp: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    sequence_parallel: bool
    kind: str
    num_processes: int
    num_cores: int
    budget_s: float
    make_optimizer: MakeOptimizer
    clip_grad_norm: float

    @property
    def shares_cores(self) -> bool:
        """Whether there are more processes than cores."""
        return self.kind == "cpu" and self.num_processes > self.num_cores


@dataclass(frozen=True)
class PieceFindings:
    """Measurements, in the terms of a cluster file.

    Attributes:
        pieces: one entry for each tensor-parallel size, micro-batch size and kind of recomputation.
        update: of the weights.
        rounds: number of measurements of each.
    """

    pieces: tuple[MeasuredPieces, ...]
    update: MeasuredUpdate
    rounds: int


def measure_pieces(request: PieceRequest) -> PieceFindings:
    """Measure in worker processes on this host.

    Raises:
        WorkerError: a process failed.
    """
    return run_workers(partial(_work, request), request.num_processes)[0]


def _work(request: PieceRequest, rendezvous: Path, rank: int, num_ranks: int) -> PieceFindings | None:
    world = join_forked(rendezvous, rank, num_ranks, request.kind, request.budget_s + _PATIENCE_S)
    found = _Measurement(request, world).run()
    world.leave()
    return found if rank == 0 else None


Seconds = tuple[float, ...]
_PARTS = ("one layer", "layers", "first", "last")


class _Measurement:
    """One rank of the measurement: named measurements, in the order of a round, and their seconds in each round."""

    def __init__(self, request: PieceRequest, world: World) -> None:
        self._request, self._world = request, world
        self._clock: Now = time.process_time if request.shares_cores else partial(now, world.device)
        self._num_layers = min(request.model.num_layers, _MOST_LAYERS)
        self._measured: dict[Hashable, Callable[[], Seconds]] = {}
        self._times: defaultdict[Hashable, list[Seconds]] = defaultdict(list)
        self._runs: dict[tuple[str, int], StageRun] = {}
        self._transports: list[Transport] = []
        weights = {setting: self._add_stages(*setting) for setting in product(request.tp, request.recompute)}
        first = weights[request.tp[0], request.recompute[0]]
        self._updates = [
            Update(request.make_optimizer, request.clip_grad_norm, first[part].parts, world)
            for part in ("one layer", "layers")
        ]
        for update in self._updates:
            self._measured[update] = partial(self._time_update, update)

    def _add_stages(self, tp: int, recompute: Recompute) -> dict[str, StageWeights]:
        """Add measurements of all parts, of each micro-batch size, and of messages, for one tensor-parallel size."""
        request, world = self._request, self._world
        group = make_tensor_group(Layout(pp=1, loops=1, tp=tp, dp=world.size // tp), world)
        parallel = TensorParallel(group, request.sequence_parallel and tp > 1) if tp > 1 else WHOLE
        weights = {part: self._weights(parallel, recompute, part) for part in _PARTS}
        for size in request.micro_batches:
            for part, one in weights.items():
                run = self._run(one, parallel, size, part)
                self._measured[tp, recompute, size, part] = partial(self._time, run)
                self._runs.setdefault((part, size), run)
            # Messages do not depend on recomputation, and take compute time only if processes share cores.
            if request.shares_cores and request.num_processes > tp and recompute == request.recompute[0]:
                spec = TensorSpec((size, request.seq_len // tp, request.model.hidden_size), torch.float32)
                self._measured[tp, size] = self._messages(tp, size, spec)
        return weights

    def _weights(self, parallel: TensorParallel, recompute: Recompute, part: str) -> StageWeights:
        model, last = self._request.model, self._request.model.num_layers + 1
        pieces = {"one layer": range(1, 2), "layers": range(1, 1 + self._num_layers), "first": range(2)}
        module: Transformer = build_stage(
            model,
            pieces.get(part, range(last - 1, last + 1)),
            max_positions=self._request.seq_len,
            seed=0,
            dtype=torch.float32,
            device=self._world.device,
            parallel=parallel,
        )
        module.set_recompute((recompute,) * model.num_layers)
        weights = StageWeights(module, "none", 1, 0)
        # As in a run, where backwards accumulate into one flat gradient buffer.
        weights.open_gradient(weights.gradient)
        return weights

    def _run(self, weights: StageWeights, parallel: TensorParallel, size: int, part: str) -> StageRun:
        request, device, module = self._request, self._world.device, weights.module
        # Random tokens: equal tokens would read one row of the embedding, which stays in a cache.
        tokens = np.random.default_rng(0).integers(0, request.model.vocab_size, (size, request.seq_len + 1))
        batch = Batch.of(tokens.astype(np.int64), 1, device)
        shape = (size, request.seq_len // parallel.size, request.model.hidden_size)
        tensor = batch.inputs[0] if part == "first" else torch.randn(shape, device=device)
        with torch.no_grad():
            output = TensorSpec.of(module(tensor))
        stage = Stage(module, int(part != "first"), output, needs_input_gradient=part != "first")
        if part != "last":
            # Small, since all rounds accumulate weight gradients.
            return StageRun(stage, tensor, torch.randn(output.shape, device=device) * 1e-6, None)
        vocabulary = SplitVocabulary(parallel, request.model.vocab_size or 0)
        return StageRun(stage, tensor, None, partial(batch.loss, cross_entropy=vocabulary.summed_cross_entropy))

    def _messages(self, tp: int, size: int, spec: TensorSpec) -> Callable[[], Seconds]:
        """Measure the CPU time of messages between ranks of a pipeline while all ranks compute one layer."""
        world, layout = self._world, Layout(pp=self._world.size // tp, loops=1, tp=tp, dp=1)
        edges = sorted(edge for a in range(layout.pp - 1) for edge in ((a, a + 1), (a + 1, a)))
        place, specs = layout.coordinates(world.rank).pipeline, {edge: [spec] for edge in edges}
        transport = Transport(place, specs, world.device, world.timeout, layout.pipelines())
        self._transports.append(transport)
        exchange, count = Exchange(world, transport, spec, layout), _MESSAGES * 2 * (layout.pp - 1) * layout.tp
        load = self._runs["one layer", size]

        def measure() -> Seconds:
            """CPU seconds of each message: those of the process, without those of compute on the main thread."""
            begin_s = time.process_time()
            # thread_time excludes the threads that move messages, which are what is measured.
            found = exchange.together(load, time.thread_time, _MESSAGES)
            own_s = time.process_time() - begin_s - sum(map(sum, found.times))
            return (world.sum([own_s])[0] / count,)

        return measure

    def _time(self, run: StageRun) -> Seconds:
        run(self._clock)  # so that memory and caches are as after a previous micro-batch
        (times,) = run(self._clock)
        return times[:2]

    def _time_update(self, update: Update) -> Seconds:
        begin_s = self._clock()
        update.fill_gradients()  # as much work as zeroing gradients in a step
        update.step()
        return (self._clock() - begin_s,)

    def run(self) -> PieceFindings:
        """Run all rounds; the first is not counted."""
        begin_s, rounds = time.perf_counter(), 0
        while True:
            for name, measure in self._measured.items():
                self._world.wait_for_all()
                times = measure()
                if rounds:
                    self._times[name].append(times)
            is_over = time.perf_counter() - begin_s > self._request.budget_s or rounds >= _MOST_ROUNDS
            # Rank 0 decides for all: a rank that began another round alone would wait for ever.
            if self._world.broadcast(int(is_over and rounds >= _LEAST_ROUNDS), 0):
                break
            rounds += 1
        for transport in self._transports:
            transport.close()
        settings = product(self._request.tp, self._request.recompute, self._request.micro_batches)
        return PieceFindings(tuple(self._found(*setting) for setting in settings), self._found_update(), rounds)

    def _seconds(self, name: Hashable) -> Seconds:
        """Lower quartile over the rounds, mean over the ranks."""
        own = [undisturbed(times) for times in zip(*self._times[name], strict=True)]
        return tuple(total / self._world.size for total in self._world.sum(own))

    def _found(self, tp: int, recompute: Recompute, size: int) -> MeasuredPieces:
        request = self._request
        one, more, first, last = (np.array(self._seconds((tp, recompute, size, part))) for part in _PARTS)
        # The difference of two stages, both of which include the overhead of a stage.
        layer = (more - one) / max(1, self._num_layers - 1)
        run = Run(
            shape=shape_of(request.model),
            seq=request.seq_len,
            tp=tp,
            micro_batch=size,
            recompute=recompute,
            sequence_parallel=request.sequence_parallel and tp > 1,
            precision="fp32",
        )
        return MeasuredPieces(
            run=run.of_measured_pieces,
            embedding=_pair(first - one),
            layer=_pair(layer),
            head=_pair(last - one),
            stage=_pair(one - layer),
            message_s=self._seconds((tp, size))[0] if (tp, size) in self._measured else 0.0,
        )

    def _found_update(self) -> MeasuredUpdate:
        (few_s, few), (many_s, many) = ((self._seconds(update)[0], update.size) for update in self._updates)
        # A line through two sizes; its slope must not be negative.
        each_s = max(0.0, (many_s - few_s) / max(1, many - few))
        return MeasuredUpdate(fixed_s=max(0.0, few_s - each_s * few), parameter_s=each_s, precision="fp32")


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return quantiles(seconds, n=4, method="inclusive")[0]


def _pair(both: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Seconds of forward and backward; negative values, which are noise, become 0."""
    forward_s, backward_s = both.clip(0.0).tolist()
    return forward_s, backward_s
