"""All ranks of a layout over a small transformer in one process, and a single process without a pipeline."""

from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from in_process import Neighborhood, Post, blocking_groups_in_process, groups_in_process, play_in_process
from replicas import adamw, parts_of
from stage_outputs import stage_outputs

from pipeloom.config import ModelConfig
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.group import Groups
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.parts.tied import Tied
from pipeloom.execute.stages.stage import Stage
from pipeloom.families import make_schedule
from pipeloom.model import TIED_NAME, SplitVocabulary, TensorParallel, Transformer, build_stage, stage_pieces
from pipeloom.model.tensor_parallel import WHOLE
from pipeloom.passes import add_data_parallel, add_tied, exchanges, lower

VOCAB, NUM_TOKENS, ROWS = 11, 6, 2


@dataclass(frozen=True)
class SmallModel:
    """A transformer in float64 with the pieces of each stage, and a batch."""

    partition: tuple[int, ...]
    num_microbatches: int
    family: str = "llama"
    tied: bool = True
    recompute: str = "none"

    @property
    def config(self):
        layers = sum(self.partition) - 2
        sizes = {"num_layers": layers, "hidden_size": 8, "num_heads": 2, "ffn_size": 12, "tied": self.tied}
        return ModelConfig(family=self.family, **sizes).resolve(VOCAB)

    def stage(self, index, device="cpu", parallel=WHOLE):
        stage = self._build(stage_pieces(self.partition)[index], device, parallel)
        stage.set_recompute((self.recompute,) * self.config.num_layers)
        return stage

    def whole(self):
        return self._build(range(sum(self.partition)), "cpu", WHOLE)

    def _build(self, pieces, device, parallel):
        sizes = {"max_positions": NUM_TOKENS, "seed": 3, "dtype": torch.float64}
        return build_stage(self.config, pieces, **sizes, device=device, parallel=parallel)

    @cache  # noqa: B019  there are few models, and they are small
    def tokens(self):
        generator = torch.Generator().manual_seed(7)
        return [torch.randint(VOCAB, (ROWS, NUM_TOKENS), generator=generator) for _ in range(self.num_microbatches)]

    def outputs(self, parallel=WHOLE):
        first = TensorSpec((ROWS, NUM_TOKENS), torch.int64)
        return stage_outputs(lambda index: self.stage(index, "meta", parallel), len(self.partition), first)

    def loss(self, logits, number, parallel=WHOLE):
        """A loss that differs between micro-batches."""
        targets = self.tokens()[number].roll(-1, 1).flatten()
        return SplitVocabulary(parallel, VOCAB).summed_cross_entropy(logits.flatten(0, 1), targets) / (number + 1)


@cache
def plain_steps(model, num_steps):
    """Gradients of every step, and the parameters after the last, of one process."""
    whole = model.whole()
    named = dict(whole.named_parameters())
    optimizer = adamw(parts_of(named.values()))
    gradients = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        for number, tokens in enumerate(model.tokens()):
            model.loss(whole(tokens), number).backward()
        gradients.append({name: p.grad.clone() for name, p in named.items()})
        optimizer.step()
    return gradients, {name: p.detach() for name, p in named.items()}


class TransformerCluster:
    """All ranks of a layout, in this process."""

    def __init__(self, layout, schedule, family="llama", *, tied=True):
        self.layout, self.schedule = layout, schedule
        partition = layout.partition or (1,) * (layout.num_stages - 1) + (2,)
        self.model = SmallModel(partition, layout.dp * layout.num_microbatches, family, tied, layout.recompute)
        self.lanes, self.posts = Neighborhood(), [Post() for _ in range(layout.dp * layout.tp)]
        shards, copies = groups_in_process(layout.shard_groups()), groups_in_process(layout.copy_groups())
        sums, teams = (make(layout.tensor_groups()) for make in (groups_in_process, blocking_groups_in_process))
        self.teams = [TensorParallel(teams[rank], layout.sequence_parallel) for rank in range(layout.num_ranks)]
        self.outputs = [self.model.outputs(team) for team in self.teams[: layout.tp]]  # the same for all pipelines
        self.parallel, self.executors, self.tied = [], [], []
        for rank in range(layout.num_ranks):
            own = schedule.placement.stages_of(layout.coordinates(rank).pipeline)
            modules = ((index, self.model.stage(index, parallel=self.teams[rank])) for index in own)
            groups, lane = Groups(shards[rank], copies[rank], sums[rank]), self.lanes.lane(Clock())
            shared = {"replicated": Transformer.replicated, "sums_replicated": layout.sequence_parallel}
            self.parallel.append(DataParallel(schedule, modules, layout.shard, groups, lane, **shared))
            self.tied.append(self._tied(self.parallel[-1].weights, self.teams[rank]) if tied else None)
            self.executors.append(self.executor(rank, schedule))
        self.optimizers = [adamw(parallel.parts) for parallel in self.parallel]

    def _tied(self, weights, team):
        last = self.schedule.num_stages - 1
        if last == 0:
            return None
        return Tied(
            TIED_NAME,
            TensorSpec.of(self.model.stage(0, "meta", team).get_parameter(TIED_NAME)),
            gradient_dtype=torch.float64,
            lender=weights.get(0),
            borrower=weights[last].module if last in weights else None,
        )

    def executor(self, rank, schedule):
        place, parallel = self.layout.coordinates(rank), self.parallel[rank]
        outputs = self.outputs[place.tensor]
        first, split = schedule.first_backward_stage, schedule.split_stages
        stages = {
            index: Stage(one.module, index, outputs[index], needs_input_gradient=index > first, splits=index in split)
            for index, one in parallel.weights.items()
        }
        return Executor(
            schedule,
            place.pipeline,
            [Compute(stages), Messages(outputs), parallel, *([self.tied[rank]] if self.tied[rank] else [])],
            transport=self.posts[place.data * self.layout.tp + place.tensor].transport(place.pipeline),
            clock=Clock(),
        )

    def play(self, executors=None):
        """One step of these executors, without the optimizer; the results by rank."""
        size, tokens = self.layout.num_microbatches, self.model.tokens()
        ranks = []
        for rank, executor in enumerate(executors or self.executors):
            first = self.layout.coordinates(rank).data * size
            loss = partial(self._loss, first, self.teams[rank])
            ranks.append((executor, executor.steps(tokens[first : first + size], loss)))
        return play_in_process(ranks, in_turns=self.layout.tp > 1)

    def _loss(self, first, team, output, number):
        return self.model.loss(output, first + number, team)

    def step(self):
        """One step of training; by rank its gradients by name."""
        self.results = self.play()
        gradients = self.whole("gradient")
        for optimizer in self.optimizers:
            optimizer.step()
        return gradients

    def whole(self, what):
        """By rank and name what its shard group holds of the rank's slices: ``gradient`` or ``shard``."""
        found = []
        for rank in range(self.layout.num_ranks):
            (group,) = [group for group in self.layout.shard_groups() if rank in group]
            views = {}
            for stage, weights in self.parallel[rank].weights.items():
                parts = [getattr(self.parallel[other].weights[stage], what) for other in group]
                views |= weights.order.views(torch.cat(parts))
            found.append({name: view.clone() for name, view in views.items()})
        return found

    def worst_difference(self, found, expected):
        """Largest difference between each rank's tensors and its slices of the whole ones, by name."""
        worst = 0.0
        for rank, tensors in enumerate(found):
            slices = {}
            for weights in self.parallel[rank].weights.values():
                slices |= weights.module.slices()
            for name, tensor in tensors.items():
                here = slices[name].of(expected[name], tensor.shape)
                worst = max(worst, float((tensor - here).abs().max()))
        return worst


def differences(cluster, num_steps=2):
    """Worst differences of gradients and parameters from the single process, over all ranks and steps."""
    gradients, parameters = plain_steps(replace(cluster.model, recompute="none"), num_steps)
    worst = max(cluster.worst_difference(cluster.step(), gradients[step]) for step in range(num_steps))
    found = cluster.whole("shard")
    assert set().union(*found) == parameters.keys()
    return max(worst, cluster.worst_difference(found, parameters))


def schedule_of(layout, family, *, tied):
    """A family's schedule with everything that a step over a layout has."""
    if tied:
        return tied_schedule(layout, family)
    sizes = {"pp": layout.pp, "loops": layout.num_loops, "num_microbatches": layout.num_microbatches}
    return complete(layout, make_schedule(family, **sizes), tied=False)


def tied_schedule(layout, family, placement=None, *, gradient_buffers=None, residency=2, num_microbatches=None):
    """A family's schedule with everything that a tied model's step over a layout has."""
    count = num_microbatches or layout.num_microbatches
    sizes = {"pp": layout.pp, "loops": layout.num_loops, "num_microbatches": count, "placement": placement}
    return complete(
        layout, make_schedule(family, **sizes), tied=True, gradient_buffers=gradient_buffers, residency=residency
    )


def complete(layout, schedule, *, tied, gradient_buffers=None, residency=2):
    """A compute-only schedule with everything else that a step over a layout has."""
    schedule = lower(schedule)
    return _shared(layout, add_tied(schedule) if tied else schedule, gradient_buffers, residency)


def _shared(layout, schedule, gradient_buffers=None, residency=2):
    if layout.dp == 1 and not layout.sequence_parallel:
        return schedule
    added = exchanges(layout.shard, residency=residency, prefetch=1, gradient_buffers=gradient_buffers)
    return add_data_parallel(schedule, *added)
