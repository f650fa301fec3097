"""What a run does on fewer nodes than its own: with fewer replicas, or with the layout that the planner finds."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

from pipeloom.config import RunConfig, decided_problems
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.errors import PipeloomError, UserError
from pipeloom.planner.launch import Wanted, launch_problems
from pipeloom.planner.left_out import unpriced
from pipeloom.planner.plan import Plan, make_question, of_training, plan
from pipeloom.planner.question import Question
from pipeloom.planner.run_step import predict_step
from pipeloom.predict.describe import describe
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.dtypes import dtype_of
from pipeloom.workload.launchers import LAUNCHERS, PIPELOOM, Launcher, LauncherName
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class OnNodes:
    """A layout that some of the nodes run.

    Attributes:
        num_nodes: that it uses; 0 if nothing fits.
        step: its predicted step; ``None`` if nothing fits.
        is_proved: whether no search that it is from was cut short, so that a longer one finds nothing faster.
    """

    num_nodes: int = 0
    step: SimulatedStep | None = None
    is_proved: bool = True

    @property
    def step_s(self) -> float:
        """Seconds of its step; infinite if nothing fits."""
        return math.inf if self.step is None else self.step.prediction.step_time_s


Ways = Callable[[int], OnNodes]
"""Number of nodes that are up -> what the training runs on them."""


def nodes_of(config: RunConfig) -> int:
    """Number of nodes of a run that fail alone: hosts, of which a node such as an NVL72 has several."""
    return math.ceil(config.layout.num_ranks / describe(config).cluster.host_size)


def waits(config: RunConfig) -> Ways:
    """The run's own layout, on all of its nodes or not at all."""
    own = OnNodes(nodes_of(config), predict_step(config))
    return lambda num_up: own if num_up >= own.num_nodes else OnNodes()


def fewer_replicas(config: RunConfig) -> Ways:
    """The same pipeline with the most replicas for which there are nodes, which divide the same batch evenly."""
    per_node, own = describe(config).cluster.host_size, waits(config)(nodes_of(config))

    @cache
    def on(num_up: int) -> OnNodes:
        if num_up >= own.num_nodes:
            return own
        for layout in config.layout.with_fewer_replicas(num_up * per_node):
            if (found := _fitting(config.under(layout))) is not None:
                return OnNodes(math.ceil(layout.num_ranks / per_node), found)
        return OnNodes()

    return on


def _fitting(config: RunConfig) -> SimulatedStep | None:
    """The step of a run, if it can be trained and fits its devices."""
    if decided_problems(config):
        return None
    try:
        step = predict_step(config)
    except PipeloomError:
        return None
    return step if step.prediction.fits else None


def launcher_of(config: RunConfig, placed: Placed) -> Launcher:
    """The program that starts a run: the one whose speed its predictions have, if it trains it; else pipeloom."""
    run, cluster = placed.run, placed.cluster
    wanted = Wanted(config.resolved_model, run.seq, run.precision, run.products, run.attention, boundary=run.boundary)
    named = (one for one in LAUNCHERS.values() if one.software == config.machine.software)
    able = (one for one in named if not launch_problems(one, wanted.by(config), cluster, run.num_devices))
    return next(able, PIPELOOM)


def question_on(
    config: RunConfig,
    run: Run,
    cluster: str | Cluster,
    program: str,
    *,
    num_devices: int,
    launcher: LauncherName = "pipeloom",
) -> Question:
    """The question for the training of a run on another number of devices, with the same batch.

    Args:
        config: of the run.
        run: described by it.
        cluster: its name or file, or the cluster.
        program: name or file of the training program.
        num_devices: to use.
        launcher: the program that starts it, within whose rules layouts are searched.

    Raises:
        UserError: cluster, program and run do not fit together.
    """
    question = make_question(
        run.shape,
        cluster,
        num_devices=num_devices,
        global_batch=config.layout.batch_size,
        seq=run.seq,
        software=program if LAUNCHERS[launcher].is_own else None,
        launcher=launcher,
        dtype=dtype_of(run.precision),
        matmul_dtype=config.training.matmul_dtype,
        attention=run.attention,
        fused_norm=run.fused_norm,
        boundary=run.boundary,
    )
    # A training resumes with the balance that it began with, whichever orders that leaves out.
    return replace(of_training(question, config), balance=config.model.known_balance)


def without_ranks(config: RunConfig, num_ranks: int, budget_s: float) -> tuple[SimulatedStep, SimulatedStep] | None:
    """The run's step, and that of the fastest layout for its batch without some of its ranks.

    Args:
        config: resolved.
        num_ranks: how many ranks are left out at least.
        budget_s: seconds of the search for each number of ranks.

    Returns:
        Both steps, predicted for the same cluster; ``None`` if no layout divides the batch among fewer ranks.

    Raises:
        UserError: the run has settings that no search prices.
    """
    if problems := unpriced(config):
        raise UserError("; ".join(problems.values()))
    placed = describe(config)
    for num_devices in range(config.layout.num_ranks - num_ranks, 0, -1):
        found = _planned_on(config, placed, num_devices, budget_s)
        if found is not None and found.best is not None:
            return predict_step(config), found.best
    return None


def _planned_on(
    config: RunConfig, placed: Placed, num_devices: int, budget_s: float, launcher: LauncherName = "pipeloom"
) -> Plan | None:
    program = config.machine.software
    try:
        question = question_on(config, placed.run, placed.cluster, program, num_devices=num_devices, launcher=launcher)
        return plan(question, count=1, budget_s=budget_s, explains=False)
    except PipeloomError:  # no layout divides the devices and the batch
        return None


def planned(config: RunConfig, budget_s: float, numbers: Iterable[int], kept: Ways) -> Ways:
    """The fastest layout of the run's program for the same batch on the nodes that are up, or on fewer of them.

    With more nodes up it is never slower: the layouts of all smaller numbers take part, of these and of those that
    divide better (``dividing``), and the pipeline of the run with as many replicas as there are nodes for.

    Args:
        config: of the run, which a search prices (``left_out.unpriced``).
        budget_s: seconds of the search for each number of nodes.
        numbers: of nodes that will be up.
        kept: what the pipeline of the run does on fewer nodes (``fewer_replicas``).
    """
    placed, most = describe(config), nodes_of(config)
    per_node, launcher = placed.cluster.host_size, launcher_of(config, placed).name

    def tried(number: int) -> list[int]:
        return dividing(min(number, most), per_node, config.layout.batch_size)

    likely = {number for one in numbers for number in tried(one)}

    @cache
    def best(num_nodes: int) -> OnNodes:
        found = _planned_on(config, placed, num_nodes * per_node, budget_s, launcher)
        if found is None:
            return OnNodes()
        return OnNodes(0 if found.best is None else num_nodes, found.best, found.stopped is None)

    @cache
    def on(num_up: int) -> OnNodes:
        among = [kept(num_up), *(best(number) for number in sorted(likely.union(tried(num_up))) if number <= num_up)]
        if all(one.step is None for one in among):
            # Where none of these numbers divides the batch, a smaller one may.
            smaller = (best(number) for number in range(min(num_up, most) - 1, 0, -1))
            among += [next((one for one in smaller if one.step is not None), OnNodes())]
        found = min(among, key=attrgetter("step_s"))
        return replace(found, is_proved=all(one.is_proved for one in among))

    return on


def dividing(num_nodes: int, per_node: int, batch: int) -> list[int]:
    """Numbers of nodes whose layouts may be the fastest on so many: this one, and lower ones that divide better.

    Data-parallel ranks divide the batch, and powers of two also go to other axes. What is left of the devices takes
    pipeline ranks: with a batch of 512, 63 of them on 63 nodes, 15 on 60, 7 on 56. Each number leaves at most half as
    many as the one before, so there are at most log2 of them.

    Args:
        num_nodes: that are up.
        per_node: devices of each.
        batch: in sequences.
    """
    found, least = list[int](), math.inf
    for number in range(num_nodes, 0, -1):
        num_devices = number * per_node
        left = num_devices // math.gcd(num_devices, batch << num_devices.bit_length())
        if 2 * left <= least:
            found.append(number)
            least = left
    return found
