"""Data parallelism, every rank in one process: two steps equal the single process, at every sharding level."""

from dataclasses import replace

import pytest
from families import SOME, fitting
from in_process import Post
from replicas import Cluster, adamw, cluster_of, parts_of
from thinned import thinned
from torch import nn
from toy import WIDTH, objective

from pipeloom.analysis.bubble import account_bubble
from pipeloom.errors import UserError
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.group import Alone, Groups
from pipeloom.execute.executor import Executor
from pipeloom.execute.parts.compute import Compute
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.parts.messages import Messages
from pipeloom.execute.stages.stage import Stage
from pipeloom.schedule import Action, Kind, Level
from pipeloom.trace import merge
from pipeloom.workload.layout import Layout

LEVELS = ("none", "optimizer", "gradients", "full")
STEPS = 2


def plain_steps(toy):
    """Gradients of every step, and the parameters after the last, of one process without any of this."""
    modules = toy.modules()
    named = {(stage, name): p for stage, m in enumerate(modules) for name, p in m.named_parameters()}
    optimizer = adamw(parts_of(named.values()))
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


EVERY_OTHER = [(family, *case) for n, family in enumerate(SOME) for case in CASES[n % 2 :: 2]]
"""Each case with half of the families, each family with half of the cases."""


@pytest.mark.parametrize(("family", "shard", "pp", "dp", "replicate", "num_microbatches"), EVERY_OTHER)
def test_steps_equal_the_single_process(family, shard, pp, dp, replicate, num_microbatches):
    loops = fitting(family, 2)["loops"]
    layout = Layout(pp=pp, loops=loops, dp=dp, replicate=replicate, shard=shard, num_microbatches=num_microbatches)
    gradients, parameters = differences(cluster_of(layout, family))
    assert gradients < 1e-9
    assert parameters < 1e-9


def layout_of(shard, **changes):
    return replace(Layout(pp=2, loops=4, dp=2, shard=shard, num_microbatches=4), **changes)


@pytest.mark.parametrize("family", ["depth-first", "breadth-first", "hybrid"])
@pytest.mark.parametrize("shard", ["gradients", "full"])
@pytest.mark.parametrize("buffers", thinned([1, 2, 3], 2))
def test_several_reductions_of_a_stage_add_up_within_the_buffers(family, shard, buffers):
    cluster = cluster_of(layout_of(shard, num_microbatches=6), family, gradient_buffers=buffers)
    if family == "depth-first" and buffers == 1:
        assert sum(action.kind is Kind.REDUCE_GRAD for action in cluster.schedule.rows[0]) > 4
    gradients, parameters = differences(cluster)
    assert max(gradients, parameters) < 1e-9
    held = [result.held for result in cluster.step()]
    assert all(1 <= h.gradients <= buffers for h in held)


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
@pytest.mark.parametrize("prefetch", thinned([0, 1, 4], 2))
def test_gathered_weights_stay_within_the_residency_and_are_freed(family, residency, prefetch):
    cluster = cluster_of(layout_of("full"), family, residency=residency, prefetch=prefetch)
    gradients, parameters = differences(cluster)
    assert max(gradients, parameters) < 1e-9
    held = [result.held for result in cluster.step()]
    stage_bytes = 2 * -(-(WIDTH * WIDTH + WIDTH) // 2) * 8
    assert max(h.gathered for h in held) <= residency
    shards_bytes = sum(weights.shard.nbytes for weights in cluster.parallel[0].weights.values())
    assert max(h.weights_bytes for h in held) <= residency * stage_bytes + shards_bytes
    for parallel in cluster.parallel:
        for weights in parallel.weights.values():
            assert weights.whole.untyped_storage().nbytes() == 0
            assert weights.shard.nbytes == stage_bytes // 2


def test_the_trace_of_a_step_is_one_of_the_schedule_with_every_collective():
    cluster = cluster_of(layout_of("full"))
    results = cluster.step()
    for data in range(2):
        trace = merge(results[rank].trace for rank in cluster.layout.pipelines()[data])
        spans = [span.action for span in trace.spans if span.lane.name == "data-parallel" and span.rank == 0]
        assert spans == [action for action in cluster.schedule.rows[0] if action.microbatch is None]
        accounts = account_bubble(cluster.schedule, trace)  # refuses what is not a trace of the schedule
        assert all(account.compute_s > 0 for account in accounts)


class Reluctant:
    """A lane whose jobs run when somebody waits for one, with the jobs before it; lists what was waited for, where."""

    def __init__(self):
        self.waits, self.jobs, self.executor = [], [], None

    def start(self, job):
        self.jobs.append(ReluctantCollective(self, job, self.executor._actions[self.executor._slot]))
        return self.jobs[-1]

    def run_until(self, collective):
        actions, slot = self.executor._actions, self.executor._slot
        self.waits.append((str(actions[slot]) if slot < len(actions) else "end", str(collective.action)))
        for job in self.jobs[: self.jobs.index(collective) + 1]:
            job.run()


class ReluctantCollective:
    def __init__(self, lane, job, action):
        self.lane, self.job, self.action, self.has_run = lane, job, action, False
        self.begin = self.end = 0.0

    def run(self):
        for finish in self.job:
            finish()
        self.has_run = True

    def is_done(self):
        return self.has_run

    def wait(self, timeout_s):
        self.lane.run_until(self)
        return True

    def take(self):
        return None


def waits_of(shard, **options):
    """What one rank waits for and at which action, breadth-first with three stages and two micro-batches."""
    layout = Layout(pp=1, loops=3, dp=1, shard=shard, num_microbatches=2)
    shape = cluster_of(layout, **options)
    toy, schedule, lane = shape.toy, shape.schedule, Reluctant()
    modules = toy.modules()
    groups = Groups(Alone(), Alone())
    parallel = DataParallel(schedule, enumerate(modules), shard, groups, lane)
    stages = {
        index: Stage(module, index, toy.outputs()[index], needs_input_gradient=index > 0)
        for index, module in enumerate(modules)
    }
    transport = Post().transport(0)
    executor = Executor(schedule, 0, [Compute(stages), parallel], transport=transport, clock=Clock())
    lane.executor = executor
    executor.run(toy.inputs(), objective)
    started = [collective.action for collective in lane.jobs]  # each where the executor stood in its row
    assert started == [action for action in schedule.rows[0] if action.microbatch is None]
    return [(at, awaited) for at, awaited in lane.waits if "RESHARD" not in awaited]


def test_nothing_waits_for_a_reduction_before_the_end_of_the_step():
    assert waits_of("none") == [("end", "2REDUCE_GRAD"), ("end", "1REDUCE_GRAD"), ("end", "0REDUCE_GRAD")]


def test_the_first_compute_action_on_a_stage_waits_for_its_gather():
    found = waits_of("full", residency=2, prefetch=1)
    gathers = [(at, awaited) for at, awaited in found if "UNSHARD" in awaited]
    assert gathers == [
        ("0F0", "0UNSHARD"),
        ("1F0", "1UNSHARD"),
        ("2F0", "2UNSHARD"),
        ("0B0", "0UNSHARD"),
    ]
    assert [at for at, awaited in found if "REDUCE" in awaited] == ["end"] * 3


def test_with_one_gradient_buffer_the_next_stage_waits_for_the_reduction_before_it():
    assert waits_of("gradients", gradient_buffers=1)[3:] == [
        ("1B0", "2REDUCE_GRAD"),
        ("0B0", "1REDUCE_GRAD"),
        ("end", "0REDUCE_GRAD"),
    ]


def test_with_two_gradient_buffers_the_stage_after_the_next_waits():
    assert waits_of("gradients", gradient_buffers=2)[3:] == [
        ("0B0", "2REDUCE_GRAD"),
        ("end", "1REDUCE_GRAD"),
        ("end", "0REDUCE_GRAD"),
    ]


def test_without_data_parallelism_such_a_schedule_is_refused():
    cluster = cluster_of(layout_of("full"))
    parts = [Compute({}), Messages(cluster.toy.outputs())]
    with pytest.raises(UserError, match="nothing to run REDUCE_GRAD, RESHARD, UNSHARD with"):
        Executor(cluster.schedule, 0, parts, transport=Post().transport(0), clock=Clock())
