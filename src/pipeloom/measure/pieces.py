"""Measures a model's pieces as they train: embedding, one layer, head, a message between stages, the update.

All processes compute at the same time, with the stages, transports and optimizer of a run. Where they are more than
the cores, seconds are CPU time, so that neither other programs nor the other processes count; otherwise they are what a
clock says. Everything is measured in rounds, one of each kind after the other: what a machine does to one kind it does
to all. Of the rounds the lower quartile counts, since what disturbs a measurement only ever makes it longer.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import quantiles

import numpy as np
import torch
from torch import nn

from pipeloom.cost.hardware import MeasuredPieces, MeasuredUpdate
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import make_tensor_group
from pipeloom.execute.communication.transport import ProcessGroupTransport
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import World, join_forked
from pipeloom.execute.stages.batch import Batch
from pipeloom.execute.stages.stage import Stage
from pipeloom.execute.stages.weights import StageWeights
from pipeloom.measure.rehearsal import Exchange, StageRun, Times
from pipeloom.measure.stopwatch import Now, now
from pipeloom.measure.update import MakeOptimizer, Update
from pipeloom.model import SplitVocabulary, TensorParallel, Transformer, build_stage
from pipeloom.model.tensor_parallel import WHOLE
from pipeloom.workload.layout import Layout, Recompute
from pipeloom.workload.model import ModelConfig, shape_of
from pipeloom.workload.run import Run

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 200
_MOST_LAYERS = 4
"""Of the longest stage that is timed."""
_MESSAGES = 3
"""That each rank sends to each neighbor in a round."""
_PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class PieceRequest:
    """What to measure.

    Attributes:
        model: resolved; of two layers or more.
        seq_len: tokens of a sequence.
        micro_batches: sequences of a micro-batch, each number.
        tp: tensor axes; each divides the processes.
        recompute: what a layer's backward computes again, each kind.
        sequence_parallel: whether tensor-parallel ranks share the tokens of the residual stream.
        kind: "cpu" or "cuda".
        num_processes: that compute at the same time, on this host.
        num_cores: of this host, for processes on a CPU.
        budget_s: seconds for all measurements together, about.
        make_optimizer: of a run.
        clip_grad_norm: of a run.
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
    """What was measured, in the terms of a cluster file.

    Attributes:
        pieces: one for each tensor axis, micro-batch and kind of recomputation.
        update: of the weights.
        rounds: how often each was measured.
    """

    pieces: tuple[MeasuredPieces, ...]
    update: MeasuredUpdate
    rounds: int


def measure_pieces(request: PieceRequest) -> PieceFindings:
    """Measure in processes of this host.

    Raises:
        WorkerError: a process failed.
    """
    return run_workers(partial(_work, request), request.num_processes)[0]


def _work(request: PieceRequest, rendezvous: Path, rank: int, num_ranks: int) -> PieceFindings | None:
    world = join_forked(rendezvous, rank, num_ranks, request.kind, request.budget_s + _PATIENCE_S)
    found = _Measurement(request, world).run()
    world.leave()
    return found if rank == 0 else None


Both = tuple[float, float]
_PARTS = ("one layer", "layers", "first", "last")


@dataclass
class _Subject:
    """A stage that is timed with micro-batches of one size: with its gradients in one buffer, as in a run.

    Attributes:
        run: forward and backward.
        times: of each round.
    """

    run: StageRun
    times: list[Times] = field(default_factory=list)

    @property
    def seconds(self) -> Both:
        return undisturbed([one.forward_s for one in self.times]), undisturbed([one.backward_s for one in self.times])


Setting = tuple[int, Recompute, int]
"""(tensor axis, recomputation, micro-batch)"""


class _Measurement:
    """One rank of it."""

    def __init__(self, request: PieceRequest, world: World) -> None:
        self._request, self._world = request, world
        self._clock: Now = time.process_time if request.shares_cores else partial(now, world.device)
        self._num_layers = min(request.model.num_layers, _MOST_LAYERS)
        self._parallel = {tp: self._parallel_of(tp) for tp in request.tp}
        self._weights: dict[tuple[int, Recompute, str], StageWeights] = {}
        self._subjects: dict[Setting, dict[str, _Subject]] = {
            (tp, recompute, size): {part: self._subject(tp, recompute, size, part) for part in _PARTS}
            for tp, recompute, size in product(request.tp, request.recompute, request.micro_batches)
        }
        first = self._weights[request.tp[0], request.recompute[0], "one layer"]
        larger = self._weights[request.tp[0], request.recompute[0], "layers"]
        parts = [one.optimizer_parts() for one in (first, larger)]
        self._updates = [
            (Update(request.make_optimizer, request.clip_grad_norm, one, world), list[float]()) for one in parts
        ]
        self._messages = self._make_messages()

    def _parallel_of(self, tp: int) -> TensorParallel:
        layout = Layout(pp=1, loops=1, tp=tp, dp=self._world.size // tp)
        group = make_tensor_group(layout, self._world)
        return TensorParallel(group, self._request.sequence_parallel and tp > 1) if tp > 1 else WHOLE

    def _subject(self, tp: int, recompute: Recompute, size: int, part: str) -> _Subject:
        request, device, parallel = self._request, self._world.device, self._parallel[tp]
        module = self._module(tp, recompute, part)
        # Random ones: the same token everywhere would read one row of the embedding, which stays in a cache.
        tokens = np.random.default_rng(0).integers(0, request.model.vocab_size, (size, request.seq_len + 1))
        batch = Batch.of(tokens.astype(np.int64), 1, device)
        shape = (size, request.seq_len // tp, request.model.hidden_size)
        tensor = batch.inputs[0] if part == "first" else torch.randn(shape, device=device)
        with torch.no_grad():
            output = TensorSpec.of(module(tensor))
        stage = Stage(module, int(part != "first"), output, needs_input_gradient=part != "first")
        if part != "last":
            # Small, since all rounds add to the same gradients.
            return _Subject(StageRun(stage, tensor, torch.randn(output.shape, device=device) * 1e-6, None))
        vocabulary = SplitVocabulary(parallel, request.model.vocab_size or 0)
        loss = partial(batch.loss, cross_entropy=vocabulary.summed_cross_entropy)
        return _Subject(StageRun(stage, tensor, None, loss))

    def _module(self, tp: int, recompute: Recompute, part: str) -> nn.Module:
        known = self._weights.get((tp, recompute, part))
        if known is not None:
            return known.module
        model, last = self._request.model, self._request.model.num_layers + 1
        pieces = {"one layer": range(1, 2), "layers": range(1, 1 + self._num_layers), "first": range(2)}
        module: Transformer = build_stage(
            model,
            pieces.get(part, range(last - 1, last + 1)),
            max_positions=self._request.seq_len,
            seed=0,
            dtype=torch.float32,
            device=self._world.device,
            parallel=self._parallel[tp],
        )
        module.set_recompute((recompute,) * model.num_layers)
        weights = StageWeights(module, "none", 1, 0)
        # As in a run, where backwards add to gradients that lie side by side.
        weights.open_gradient(weights.gradient)
        self._weights[tp, recompute, part] = weights
        return module

    def _make_messages(self) -> dict[tuple[int, int], "_Messages"]:
        """By tensor axis and micro-batch, where processes share cores and there are several stages to exchange."""
        request, found = self._request, dict[tuple[int, int], _Messages]()
        if not request.shares_cores:
            return found
        for tp, size in product(request.tp, request.micro_batches):
            if request.num_processes // tp > 1:
                spec = TensorSpec((size, request.seq_len // tp, request.model.hidden_size), torch.float32)
                found[tp, size] = _Messages(self._world, tp, spec)
        return found

    def run(self) -> PieceFindings:
        """All rounds; the first is not counted."""
        begin_s, rounds = time.perf_counter(), 0
        while True:
            self._round(is_counted=rounds > 0)
            is_over = time.perf_counter() - begin_s > self._request.budget_s or rounds >= _MOST_ROUNDS
            # Rank 0's clock ends it for all: a rank that began another round alone would wait in it for ever.
            if self._world.broadcast(int(is_over and rounds >= _LEAST_ROUNDS), 0):
                break
            rounds += 1
        for messages in self._messages.values():
            messages.close()
        pieces = tuple(self._found(setting) for setting in self._subjects)
        return PieceFindings(pieces, self._found_update(), rounds)

    def _round(self, *, is_counted: bool) -> None:
        for (tp, recompute, size), parts in self._subjects.items():
            for subject in parts.values():
                self._world.wait_for_all()
                subject.run(self._clock)  # memory and caches are then as they are after the micro-batch before
                times = subject.run(self._clock)
                if is_counted:
                    subject.times.append(times)
            messages = self._messages.get((tp, size))
            # Messages have the same size whatever is recomputed.
            if messages is not None and recompute == self._request.recompute[0]:
                load = self._subjects[self._request.tp[0], recompute, size]["one layer"]
                messages.measure(load.run, is_counted=is_counted)
        for update, times in self._updates:
            self._world.wait_for_all()
            begin_s = self._clock()
            update.fill_gradients()  # with as much work as zeros take
            update.step()
            if is_counted:
                times.append(self._clock() - begin_s)

    def _found(self, setting: Setting) -> MeasuredPieces:
        tp, recompute, size = setting
        request = self._request
        one, more, first, last = (self._mean(self._subjects[setting][part].seconds) for part in _PARTS)
        sides = range(2)
        # The difference of two stages: what a stage takes beside its layers is in both.
        layer = [(more[side] - one[side]) / max(1, self._num_layers - 1) for side in sides]
        run = Run(
            shape=shape_of(request.model),
            seq=request.seq_len,
            tp=tp,
            micro_batch=size,
            recompute=recompute,
            sequence_parallel=request.sequence_parallel and tp > 1,
            precision="fp32",
        )
        messages = self._messages.get((tp, size))
        return MeasuredPieces(
            run=run.of_measured_pieces,
            embedding=_pair(first[side] - one[side] for side in sides),
            layer=_pair(layer),
            head=_pair(last[side] - one[side] for side in sides),
            stage=_pair(one[side] - layer[side] for side in sides),
            message_s=0.0 if messages is None else undisturbed(messages.seconds),
        )

    def _mean(self, both: Both) -> Both:
        """Over the ranks, which do the same."""
        forward_s, backward_s = (total / self._world.size for total in self._world.sum(both))
        return forward_s, backward_s

    def _found_update(self) -> MeasuredUpdate:
        (few, few_s), (many, many_s) = ((update.size, undisturbed(times)) for update, times in self._updates)
        few_s, many_s = (total / self._world.size for total in self._world.sum([few_s, many_s]))
        # A line through two sizes; noise could make it fall.
        each_s = max(0.0, (many_s - few_s) / max(1, many - few))
        return MeasuredUpdate(fixed_s=max(0.0, few_s - each_s * few), parameter_s=each_s, precision="fp32")


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return quantiles(seconds, n=4, method="inclusive")[0]


def _pair(values: Iterable[float]) -> Both:
    forward_s, backward_s = (max(0.0, value) for value in values)
    return forward_s, backward_s


class _Messages:
    """Tensors between the ranks of a pipeline while all of them compute: what they cost the cores."""

    def __init__(self, world: World, tp: int, spec: TensorSpec) -> None:
        layout = Layout(pp=world.size // tp, loops=1, tp=tp, dp=1)
        edges = sorted(edge for a in range(layout.pp - 1) for edge in ((a, a + 1), (a + 1, a)))
        place = layout.coordinates(world.rank).pipeline
        specs = {edge: [spec] for edge in edges}
        self._world, self._layout = world, layout
        self._transport = ProcessGroupTransport(place, specs, world.device, world.timeout, layout.pipelines())
        self._exchange = Exchange(world, self._transport, spec, layout)
        self.seconds: list[float] = []

    def measure(self, load: StageRun, *, is_counted: bool) -> None:
        """CPU seconds of each message: those of the process without those of computing on its main thread."""
        computed_s: list[float] = []
        self._world.wait_for_all()
        begin_s = time.process_time()
        # The clock of this thread alone: those that carry messages are what is measured.
        self._exchange.around(lambda: computed_s.append(sum(load(time.thread_time))), _MESSAGES)
        own_s = time.process_time() - begin_s - sum(computed_s)
        (total_s,) = self._world.sum([own_s])
        if is_counted:
            self.seconds.append(total_s / (_MESSAGES * 2 * (self._layout.pp - 1) * self._layout.tp))

    def close(self) -> None:
        """Let go of threads."""
        self._transport.close()
