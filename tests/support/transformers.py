"""All ranks of a layout over a small tied transformer in one process, and a single process that knows no pipeline."""

from dataclasses import dataclass
from functools import cache

import torch
from replicas import adamw, groups_in_process
from torch.nn import functional

from pipeloom.config import ModelConfig
from pipeloom.execute.boundary import TensorSpec, stage_outputs
from pipeloom.execute.clock import HostClock
from pipeloom.execute.collectives import Groups
from pipeloom.execute.data_parallel import DataParallel
from pipeloom.execute.drive import play_in_process
from pipeloom.execute.executor import Executor
from pipeloom.execute.lanes import Neighborhood
from pipeloom.execute.stage import Stage
from pipeloom.execute.tied import Tied
from pipeloom.execute.transport import Post
from pipeloom.generate import make_schedule
from pipeloom.model import TIED_NAME, build_stage, stage_pieces
from pipeloom.schedule import add_data_parallel, add_tied, lower

VOCAB, NUM_TOKENS, ROWS = 11, 5, 2


@dataclass(frozen=True)
class SmallModel:
    """A transformer in float64 with the pieces of each stage, and a batch."""

    partition: tuple[int, ...]
    num_microbatches: int
    family: str = "llama"
    tied: bool = True

    @property
    def config(self):
        layers = sum(self.partition) - 2
        sizes = {"num_layers": layers, "hidden_size": 8, "num_heads": 2, "ffn_size": 12, "tied": self.tied}
        return ModelConfig(family=self.family, **sizes).resolve(VOCAB)

    def stage(self, index, device="cpu"):
        return self._build(stage_pieces(self.partition)[index], device)

    def whole(self):
        return self._build(range(sum(self.partition)), "cpu")

    def _build(self, pieces, device):
        return build_stage(self.config, pieces, max_positions=NUM_TOKENS, seed=3, dtype=torch.float64, device=device)

    @cache  # noqa: B019  there are few models, and they are small
    def tokens(self):
        generator = torch.Generator().manual_seed(7)
        return [torch.randint(VOCAB, (ROWS, NUM_TOKENS), generator=generator) for _ in range(self.num_microbatches)]

    def outputs(self):
        first = TensorSpec((ROWS, NUM_TOKENS), torch.int64)
        return stage_outputs(lambda index: self.stage(index, "meta"), len(self.partition), first)

    def loss(self, logits, number):
        """Tells micro-batches apart."""
        targets = self.tokens()[number].roll(-1, 1)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / (number + 1)


@cache
def plain_steps(model, num_steps):
    """Gradients of every step, and the parameters after the last, of one process."""
    whole = model.whole()
    named = dict(whole.named_parameters())
    optimizer = adamw([p for p in named.values() if p.ndim >= 2], [p for p in named.values() if p.ndim < 2])
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

    def __init__(self, layout, schedule, family="llama"):
        self.layout, self.schedule = layout, schedule
        partition = layout.partition or (1,) * (layout.num_stages - 1) + (2,)
        self.model = SmallModel(partition, layout.dp * layout.num_microbatches, family)
        self.lanes, self.posts = Neighborhood(), [Post() for _ in range(layout.dp)]
        shards, copies = groups_in_process(layout.shard_groups()), groups_in_process(layout.copy_groups())
        self.outputs, self.parallel, self.executors, self.tied = self.model.outputs(), [], [], []
        for rank in range(layout.num_ranks):
            place = layout.coordinates(rank)
            own = schedule.placement.stages_of(place.pipeline)
            modules = ((index, self.model.stage(index)) for index in own)
            groups, lane = Groups(shards[rank], copies[rank]), self.lanes.lane(HostClock())
            self.parallel.append(DataParallel(schedule, modules, layout.shard, groups, lane))
            self.tied.append(self._tied(self.parallel[-1].weights))
            self.executors.append(self.executor(rank, schedule))
        self.optimizers = [adamw(*parallel.optimizer_parts()) for parallel in self.parallel]

    def _tied(self, weights):
        last = self.schedule.num_stages - 1
        if last == 0:
            return None
        return Tied(
            TIED_NAME,
            TensorSpec.of(self.model.stage(0, "meta").get_parameter(TIED_NAME)),
            gradient_dtype=torch.float64,
            lender=weights.get(0),
            borrower=weights[last].module if last in weights else None,
        )

    def executor(self, rank, schedule):
        place, parallel = self.layout.coordinates(rank), self.parallel[rank]
        stages = {
            index: Stage(
                one.module, index, self.outputs[index], needs_input_gradient=index > schedule.first_backward_stage
            )
            for index, one in parallel.weights.items()
        }
        return Executor(
            schedule,
            place.pipeline,
            stages,
            outputs=self.outputs,
            transport=self.posts[place.data].transport(place.pipeline),
            clock=HostClock(),
            data_parallel=parallel,
            tied=self.tied[rank],
        )

    def play(self, executors=None):
        """One step of these executors, without the optimizer; the results by rank."""
        size, tokens = self.layout.num_microbatches, self.model.tokens()
        ranks = []
        for rank, executor in enumerate(executors or self.executors):
            first = self.layout.coordinates(rank).data * size
            loss = lambda output, number, first=first: self.model.loss(output, first + number)  # noqa: E731
            ranks.append((executor, executor.steps(tokens[first : first + size], loss)))
        return play_in_process(ranks)

    def step(self):
        """One step of training; by rank its gradients by name."""
        self.results = self.play()
        gradients = self.whole("gradient")
        for optimizer in self.optimizers:
            optimizer.step()
        return gradients

    def whole(self, what):
        """By rank and name what its shard group holds: ``gradient`` or ``shard``."""
        found = []
        for rank in range(self.layout.num_ranks):
            (group,) = [group for group in self.layout.shard_groups() if rank in group]
            views = {}
            for stage, weights in self.parallel[rank].weights.items():
                parts = [getattr(self.parallel[other].weights[stage], what) for other in group]
                views |= weights.order.views(torch.cat(parts))
            found.append({name: view.clone() for name, view in views.items()})
        return found


def tied_schedule(layout, family, placement="looped", *, gradient_buffers=None, residency=2, num_microbatches=None):
    """A family's schedule with everything that a tied model's step over a layout has."""
    count = num_microbatches or layout.num_microbatches
    sizes = {"pp": layout.pp, "loops": layout.loops, "num_microbatches": count, "placement": placement}
    schedule = add_tied(lower(make_schedule(family, **sizes)))
    if layout.dp == 1:
        return schedule
    return add_data_parallel(schedule, layout.shard, residency=residency, prefetch=1, gradient_buffers=gradient_buffers)
