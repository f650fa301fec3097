"""All ranks of a run in this process: the pipelines that `pipeloom train` makes, over the in-process transport."""

from collections import defaultdict
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from in_process import (
    InProcessLanes,
    MovePost,
    Neighborhood,
    Post,
    blocking_groups_in_process,
    context_groups_in_process,
    expert_groups_in_process,
    groups_in_process,
    play_in_process,
    run_together,
)

from pipeloom.cost.stages import layers_of_pieces
from pipeloom.data.windows import mark_begins
from pipeloom.execute.communication.group import Alone, Groups
from pipeloom.execute.stages.batch import Batch
from pipeloom.training import expert_loads
from pipeloom.training import pipeline as module
from pipeloom.training.equivalence import Gradients, _joined, compare, reference_gradients
from pipeloom.training.inference.evaluation import MeanLoss, mean_loss
from pipeloom.training.optimizers.optimizer import make_optimizer
from pipeloom.training.optimizers.updates_within import make_updates
from pipeloom.training.pipeline import Pipeline
from pipeloom.workload.sharing import ranks_of_owners


def loads_in_process(replicas, config, world, modules, *_):
    """The part that sums loads of experts, over ranks that are threads: each sum blocks where it is needed."""

    def all_reduce(counts):
        return lambda: replicas.size == 1 or replicas.sum(counts)

    with patch.object(expert_loads, "make_load_group", lambda *_: SimpleNamespace(all_reduce=all_reduce)):
        return expert_loads.loads_of(config, world, modules, None, None)


class SharedRanks(Alone):
    """The ranks of a set of weights that stages share; ``OneProcess`` sums their gradients behind the step."""

    def __init__(self, size, index):
        self.size, self.index = size, index


def shared_in_process(config, world, placement, _):
    """As ``shared_groups``."""
    sharing, layout = config.model.sharing, config.layout
    if sharing is None:
        return {}
    sets = ranks_of_owners(sharing, layers_of_pieces(layout.partition), placement.rank_by_stage)
    groups = {owner: sorted(one[rank] for one in layout.pipelines() for rank in ranks) for owner, ranks in sets.items()}
    return {
        owner: SharedRanks(len(ranks), ranks.index(world.rank))
        for owner, ranks in groups.items()
        if world.rank in ranks
    }


class OneProcess:
    """The pipelines of all ranks of a run, each with its optimizer.

    Args:
        config: resolved.
        trains: whether stages are trained, or have weights only and run forwards.

    Attributes:
        config: as given.
        pipelines, optimizers, updates: by rank.
    """

    def __init__(self, config, *, trains=True):
        self.config, layout = config, config.layout
        lanes, posts, wires = Neighborhood(), defaultdict(Post), defaultdict(MovePost)
        groups = [groups_in_process(one()) for one in (layout.shard_groups, layout.copy_groups, layout.tensor_groups)]
        teams = blocking_groups_in_process(layout.tensor_groups())
        rings = context_groups_in_process(layout.context_groups())
        travels = expert_groups_in_process(layout.expert_groups())
        alike = groups_in_process(layout.same_expert_groups())
        replicas = blocking_groups_in_process(layout.data_groups())

        # What every rank makes for itself where there are processes.
        shapes, honest = {}, Pipeline._outputs

        def outputs(pipeline, microbatch_size, num_tokens):
            key = pipeline._place.tensor, microbatch_size, num_tokens
            if key not in shapes:
                shapes[key] = honest(pipeline, microbatch_size, num_tokens)
            return shapes[key]

        schedules = {name: cache(getattr(module, name)) for name in ("training_schedule", "forward_schedule")}

        def place(rank):
            here = layout.coordinates(rank)
            return here.data, here.tensor

        def same_experts(rank):
            own, alone = alike[rank], Alone()
            return Groups(alone, own) if layout.expert_shard == "none" else Groups(own, alone)

        def build(rank):
            connections = {
                "make_groups": lambda *_: Groups(*(one[rank] for one in groups)),
                "make_tensor_group": lambda *_: teams[rank],
                "make_context_group": lambda *_: rings[rank],
                "shared_groups": shared_in_process,
                "make_expert_group": lambda *_: travels[rank],
                "loads_of": partial(loads_in_process, replicas[rank]),
                "Lanes": lambda *_: InProcessLanes(lanes),
                "Transport": lambda own, *_: posts[place(rank)].transport(own),
                "make_wires": lambda schedule, *_: wires[place(rank)].wires(schedule),
                "Watch": lambda *_, **__: SimpleNamespace(end=lambda: None, positions=lambda: ""),
            }
            world = SimpleNamespace(
                rank=rank,
                size=layout.num_ranks,
                device=torch.device("cpu"),
                store=None,
                timeout=timedelta(seconds=10),
                sum=lambda numbers: numbers,  # each rank's own share
            )
            with ExitStack() as stack:
                stack.enter_context(patch.object(Pipeline, "_outputs", outputs))
                groups_of = lambda *_: same_experts(rank)  # noqa: E731
                stack.enter_context(patch.object(expert_loads, "make_same_experts_groups", groups_of))
                for name, made in (connections | schedules).items():
                    stack.enter_context(patch.object(module, name, made))
                return Pipeline(config, world, trains=trains)

        self.pipelines = [build(rank) for rank in range(layout.num_ranks)]
        self.updates = []
        self.optimizers = [self._optimizer(pipeline) for pipeline in self.pipelines if trains]

    def _optimizer(self, pipeline):
        """As the trainer makes it."""
        parts, store = pipeline.data_parallel.parts, pipeline.store
        optimizer = make_optimizer(self.config.optimizer, parts, begins=store is None)
        self.updates.append(make_updates(self.config.optimizer, optimizer, pipeline))
        return optimizer

    def step(self):
        """One step on drawn tokens, of three documents a window where attention ends at them; the results by rank."""
        config = self.config
        draw = np.random.default_rng(0)
        self._windows = draw.integers(config.model.vocab_size, size=(config.layout.batch_size, config.data.seq_len + 1))
        if config.data.by_document:
            for row in self._windows:
                mark_begins(row, [0, *draw.choice(np.arange(1, len(row)), 2, replace=False)])
        ranks = [self._steps(pipeline, self._windows) for pipeline in self.pipelines]
        blocks = self.config.model.experts is not None and config.layout.dp > 1
        results = play_in_process(ranks, in_turns=config.layout.tp * config.layout.cp > 1 or blocks)
        self._sum_shared()
        return results

    def _sum_shared(self):
        """Sum the gradients of weights that stages share."""
        found = defaultdict(list)
        for pipeline in self.pipelines:
            for one in pipeline.data_parallel.shared:
                assert one.is_pending
                one.close()
                found[one.owner].append(one)
        for sets in found.values():
            assert {(one.group.size, one.group.index) for one in sets} == {(len(sets), n) for n in range(len(sets))}
            total = sum(one.gradient for one in sets)
            for one in sets:
                one.gradient.copy_(total)

    def mean_loss(self, batches):
        """Loss and tokens of batches, as evaluation and validation compute them."""
        found = run_together([partial(mean_loss, one, one._world, batches) for one in self.pipelines])
        (tokens,) = {one.tokens for one in found}
        return MeanLoss(sum(one.loss for one in found), tokens)

    def differences(self, results):
        """Of the step's loss and gradients, with these results, from those of a single process; by name."""
        layout = self.config.layout
        slices, gradients = [pipeline.slices() for pipeline in self.pipelines], self.gradients()
        parts = [
            Gradients(pipeline.counted_loss(result), own)
            for pipeline, result, own in zip(self.pipelines, results, gradients, strict=True)
        ]
        number, by_document = layout.dp * layout.num_microbatches, self.config.data.by_document
        batch = Batch.of(self._windows, number, torch.device("cpu"), by_document=by_document)
        return compare(_joined(parts, slices), reference_gradients(self.config, batch))

    def gradients(self):
        """For each rank its whole gradients by name; of ranks that hold the same ones, on the first."""

        def of_rank(rank, pipeline):
            found = {}
            for stage in pipeline.data_parallel.weights:
                for number, segment in enumerate(pipeline.data_parallel.segments_of(stage)):
                    lists = self.config.layout.shard_groups()
                    if number > 0:
                        lists = self.config.layout.same_expert_groups() if segment.groups.shard.size > 1 else [[rank]]
                    (group,) = [ranks for ranks in lists if rank in ranks]
                    if segment.replica_share[0] == 0:
                        others = [self.pipelines[other].data_parallel.segments_of(stage)[number] for other in group]
                        shards = [other.weights.gradient for other in others]
                        found |= segment.weights.order.views(torch.cat(shards))
            for one in pipeline.data_parallel.shared:
                found |= one.weights.order.views(one.gradient)
            return found

        return [of_rank(rank, pipeline) for rank, pipeline in enumerate(self.pipelines)]

    @staticmethod
    def _steps(pipeline, windows):
        batch = pipeline.batch(windows)
        if pipeline._slices is not None:
            batch = batch.cut(pipeline._slices)
        executor = pipeline._trainer
        documents = module._documents(batch, pipeline.schedule.num_slices)
        objective = pipeline._loss_of(batch, pipeline._config.training.z_loss)
        return executor, executor.steps(batch.inputs, objective, documents)
