"""Data parallelism, every rank in one process: three steps equal the single process, at every sharding level."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from toy import WIDTH, Toy, objective

from pipeloom.config import OptimizerConfig
from pipeloom.execute.clock import HostClock
from pipeloom.execute.collectives import Groups, InProcessGroups
from pipeloom.execute.data_parallel import DataParallel
from pipeloom.execute.drive import play_in_process
from pipeloom.execute.executor import Executor
from pipeloom.execute.lanes import Neighborhood
from pipeloom.execute.stage import Stage
from pipeloom.execute.transport import Post
from pipeloom.generate import FAMILIES, make_schedule
from pipeloom.layout import Layout
from pipeloom.schedule import Action, Kind, Level, add_data_parallel, lower
from pipeloom.train.optimizer import make_adamw

LEVELS = ("none", "optimizer", "gradients", "full")
TRAINING = [name for name, family in FAMILIES.items() if family.has_backward]
STEPS = 3


class Cluster:
    """All ranks of a layout over a toy model, in this process."""

    def __init__(self, layout, schedule):
        self.layout, self.schedule = layout, schedule
        self.toy = Toy(layout.num_stages, layout.dp * layout.num_microbatches)
        lanes, posts = Neighborhood(), [Post() for _ in range(layout.dp)]
        shards, copies = _groups(layout.shard_groups()), _groups(layout.copy_groups())
        self.parallel, self.executors = [], []
        for rank in range(layout.num_ranks):
            place = layout.coordinates(rank)
            own = self.schedule.placement.stages_of(place.pipeline)
            modules = {index: module for index, module in enumerate(self.toy.modules()) if index in own}
            groups = Groups(shards[rank], copies[rank])
            parallel = DataParallel(self.schedule, modules.items(), layout.shard, groups, lanes.lane(HostClock()))
            stages = {
                index: Stage(module, index, self.toy.outputs()[index], needs_input_gradient=index > 0)
                for index, module in modules.items()
            }
            self.parallel.append(parallel)
            self.executors.append(
                Executor(
                    self.schedule,
                    place.pipeline,
                    stages,
                    outputs=self.toy.outputs(),
                    transport=posts[place.data].transport(place.pipeline),
                    clock=HostClock(),
                    data_parallel=parallel,
                )
            )
        self.optimizers = [adamw(*parallel.optimizer_parts()) for parallel in self.parallel]

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
        for optimizer in self.optimizers:
            optimizer.step()
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


def cluster_of(layout, family="breadth-first", *, gradient_buffers=None, residency=2, prefetch=1):
    choice = {"pp": layout.pp, "loops": layout.loops, "num_microbatches": layout.num_microbatches}
    schedule = add_data_parallel(
        lower(make_schedule(family, **choice)),
        layout.shard,
        residency=residency,
        prefetch=prefetch,
        gradient_buffers=gradient_buffers,
    )
    return Cluster(layout, schedule)


def _groups(lists):
    return {
        rank: shared.group(index)
        for ranks in lists
        for shared in [InProcessGroups(len(ranks))]
        for index, rank in enumerate(ranks)
    }


def adamw(decayed, plain):
    return make_adamw(OptimizerConfig(lr=0.05, weight_decay=0.3), decayed, plain)


def plain_steps(toy):
    """Gradients of every step, and the parameters after the last, of one process without any of this."""
    modules = toy.modules()
    named = {(stage, name): p for stage, m in enumerate(modules) for name, p in m.named_parameters()}
    optimizer = adamw([p for p in named.values() if p.ndim >= 2], [p for p in named.values() if p.ndim < 2])
    gradients = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for number, tensor in enumerate(toy.inputs()):
            objective(nn.Sequential(*modules)(tensor), number).backward()
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        optimizer.step()
    return gradients, named


def worst(found, expected):
    return max(float((tensor - expected[name].detach()).abs().max()) for name, tensor in found.items())


def differences(cluster):
    """Worst differences of gradients and parameters from the single process, over all ranks and steps."""
    gradients, parameters = plain_steps(cluster.toy)
    by_step = []
    for step in range(STEPS):
        cluster.step()
        by_step += [worst(found, gradients[step]) for found in cluster.gradients]
    seen = set().union(*(found.keys() for found in cluster.gradients))
    assert seen == parameters.keys()
    return max(by_step), max(worst(found, parameters) for found in cluster.parameters())


SIZES = [(2, 2, None, 1), (2, 2, None, 3), (2, 2, None, 8), (2, 4, None, 3), (1, 3, None, 8)]
HYBRID = [(2, 4, 2, 1), (2, 4, 2, 3), (1, 4, 4, 3)]
CASES = [(shard, *size) for shard in LEVELS for size in SIZES + ([] if shard == "none" else HYBRID)]


@pytest.mark.parametrize(("shard", "pp", "dp", "replicate", "num_microbatches"), CASES)
@pytest.mark.parametrize("family", TRAINING)
def test_three_steps_equal_the_single_process(family, shard, pp, dp, replicate, num_microbatches):
    loops = 2 if FAMILIES[family].is_looped else 1
    layout = Layout(pp=pp, loops=loops, dp=dp, replicate=replicate, shard=shard, num_microbatches=num_microbatches)
    gradients, parameters = differences(cluster_of(layout, family))
    assert gradients < 1e-9
    assert parameters < 1e-9


def layout_of(shard, **changes):
    return replace(Layout(pp=2, loops=4, dp=2, shard=shard, num_microbatches=4), **changes)


@pytest.mark.parametrize("family", ["depth-first", "breadth-first", "hybrid"])
@pytest.mark.parametrize("shard", ["gradients", "full"])
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_several_reductions_of_a_stage_add_up_within_the_buffers(family, shard, buffers):
    cluster = cluster_of(layout_of(shard, num_microbatches=6), family, gradient_buffers=buffers)
    if family == "depth-first" and buffers == 1:
        assert sum(action.kind is Kind.REDUCE_GRAD for action in cluster.schedule.rows[0]) > 4
    gradients, parameters = differences(cluster)
    assert max(gradients, parameters) < 1e-9
    held = [result.held for result in cluster.step()]
    stage_bytes = (WIDTH * WIDTH + WIDTH) * 8
    assert all(1 <= h.gradients <= buffers for h in held)
    assert all(h.gradient_bytes == h.gradients * stage_bytes for h in held)


@pytest.mark.parametrize("shard", LEVELS)
def test_a_reduction_behind_every_backward_adds_up(shard):
    plain = cluster_of(layout_of(shard)).schedule
    rows = []
    for row in plain.rows:
        kept = [action for action in row if action.kind is not Kind.REDUCE_GRAD]
        pairs = [(a, Action(Kind.REDUCE_GRAD, a.stage)) if a.kind is Kind.BACKWARD else (a,) for a in kept]
        rows.append([action for pair in pairs for action in pair])
    schedule = replace(plain, rows=tuple(map(tuple, rows)), level=Level.COMMUNICATION)
    gradients, parameters = differences(Cluster(layout_of(shard), schedule))
    assert max(gradients, parameters) < 1e-9


@pytest.mark.parametrize("family", ["depth-first", "breadth-first", "hybrid"])
@pytest.mark.parametrize("residency", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_gathered_weights_stay_within_the_residency_and_are_freed(family, residency, prefetch):
    cluster = cluster_of(layout_of("full"), family, residency=residency, prefetch=prefetch)
    gradients, parameters = differences(cluster)
    assert max(gradients, parameters) < 1e-9
    held = [result.held for result in cluster.step()]
    stage_bytes = 2 * -(-(WIDTH * WIDTH + WIDTH) // 2) * 8
    assert max(h.gathered for h in held) <= residency
    assert max(h.gathered_bytes for h in held) <= residency * stage_bytes
    for parallel in cluster.parallel:
        for weights in parallel.weights.values():
            assert weights.whole.untyped_storage().nbytes() == 0
            assert weights.shard.nbytes == stage_bytes // 2
