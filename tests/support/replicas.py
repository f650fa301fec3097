"""All ranks of a data-parallel layout over toy pipelines, in one process."""

import torch
from in_process import Neighborhood, Post, groups_in_process, play_in_process
from toy import Toy, objective

from pipeloom.config import OptimizerConfig
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.group import Groups
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.stages.stage import Stage
from pipeloom.execute.stages.weights import FlatPart
from pipeloom.families import make_schedule
from pipeloom.passes import add_data_parallel, exchanges, lower
from pipeloom.training.optimizers.optimizer import make_optimizer


class Cluster:
    """All ranks of a layout over a toy model, in this process."""

    def __init__(self, layout, schedule, dtype=torch.float64):
        self.layout, self.schedule = layout, schedule
        self.toy = Toy(layout.num_stages, layout.dp * layout.num_microbatches, dtype)
        lanes, posts = Neighborhood(), [Post() for _ in range(layout.dp)]
        shards, copies = groups_in_process(layout.shard_groups()), groups_in_process(layout.copy_groups())
        self.parallel, self.executors = [], []
        for rank in range(layout.num_ranks):
            place = layout.coordinates(rank)
            own = self.schedule.placement.stages_of(place.pipeline)
            modules = {index: module for index, module in enumerate(self.toy.modules()) if index in own}
            groups = Groups(shards[rank], copies[rank])
            lane = lanes.lane(Clock())
            parallel = DataParallel(self.schedule, modules.items(), layout.shard, groups, lane, dtype=dtype)
            stages = {
                index: Stage(
                    module,
                    index,
                    self.toy.outputs()[index],
                    needs_input_gradient=index > 0,
                    splits=index in schedule.split_stages,
                )
                for index, module in modules.items()
            }
            self.parallel.append(parallel)
            self.executors.append(
                Executor(
                    self.schedule,
                    place.pipeline,
                    [Compute(stages), Messages(self.toy.outputs()), parallel],
                    transport=posts[place.data].transport(place.pipeline),
                    clock=Clock(),
                )
            )
        self.optimizers = [adamw(parallel.parts) for parallel in self.parallel]

    def step(self):
        """One step of training; the results by rank."""
        size, inputs = self.layout.num_microbatches, self.toy.inputs()
        ranks = []
        for rank, executor in enumerate(self.executors):
            first = self.layout.coordinates(rank).data * size
            loss = lambda output, number, first=first: objective(output, first + number)  # noqa: E731
            ranks.append((executor, executor.steps(inputs[first : first + size], loss)))
        results = play_in_process(ranks)
        self.gradients = [self._whole(rank, "gradient") for rank in range(self.layout.num_ranks)]
        for optimizer, parallel in zip(self.optimizers, self.parallel, strict=True):
            optimizer.step()
            parallel.refresh()
        return results

    def parameters(self):
        """By rank, stage and name what the optimizer holds."""
        return [self._whole(rank, "shard") for rank in range(self.layout.num_ranks)]

    def _whole(self, rank, what):
        """Put together from the shards of the rank's group, as a reader of the ranks' memory would."""
        (group,) = [group for group in self.layout.shard_groups() if rank in group]
        found = {}
        for stage, weights in self.parallel[rank].weights.items():
            parts = [getattr(self.parallel[other].weights[stage], what) for other in group]
            found |= {(stage, name): view for name, view in weights.order.views(torch.cat(parts)).items()}
        return found


def cluster_of(layout, family="breadth-first", *, gradient_buffers=None, residency=2, prefetch=1, dtype=torch.float64):
    choice = {"pp": layout.pp, "loops": layout.num_loops, "num_microbatches": layout.num_microbatches}
    added = exchanges(layout.shard, residency=residency, prefetch=prefetch, gradient_buffers=gradient_buffers)
    return Cluster(layout, add_data_parallel(lower(make_schedule(family, **choice)), *added), dtype)


def adamw(parts):
    return make_optimizer(OptimizerConfig(lr=0.05, weight_decay=0.3), parts)


def parts_of(parameters):
    """What an optimizer updates in a module that is not distributed."""
    return [FlatPart(parameter, 0, parameter.ndim >= 2) for parameter in parameters]
