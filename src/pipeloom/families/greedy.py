"""Searches a schedule for given seconds of stages and given memory of ranks.

Candidates come from list scheduling with several priority rules, and from the orders of the families with weight
gradients inserted. A local search improves the fastest of them. This extends the heuristic of arXiv 2401.10241, section
3.1; ``docs/simulate.md`` compares its results with optimal ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal

import numpy as np

from pipeloom.errors import ConfigError, ScheduleError
from pipeloom.families.family import FAMILIES, Choice, Request, Rows, family
from pipeloom.families.local_search import SearchProblem, local_search
from pipeloom.families.weight_gradients import (
    StageProfile,
    TimedRows,
    insert_weight_gradients,
    timed_rows,
    without_weight_gradients,
)
from pipeloom.schedule import PLACEMENTS, Placement, Row, Schedule
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.kernels import clocked

Aim = Literal["step", "rank"]
"""What to minimize: the time of the whole step; or the longest time from a rank's first action to its last, which is
the time per step if ranks need not wait for each other between steps."""

_PATIENCE = (0.0, 1.0)
TRIES = 500
"""Changes that each run of the local search tries; fewer where there are many actions."""
_RUNS = 12
"""Runs of the local search; they begin with the best candidates in turn, each with another seed."""
_MOST_ACTIONS = 100_000
"""Limit of the actions in all changed orders of one run of the local search."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The input of a search for a schedule.

    Attributes:
        placement: stage -> rank; every rank has equally many stages.
        num_microbatches: of the step.
        forward_s: for each stage, seconds of its forward for one micro-batch.
        input_s: for each stage, seconds of its input gradient.
        weight_s: for each stage, seconds of its weight gradient.
        boundary_s: for each boundary between a stage and the next one, seconds of one message; empty for 0. Ignored
            where both stages are on one rank.
        budgets: for each rank its limit of activation memory, in the unit of ``kept``.
        kept: for each stage the memory that a micro-batch takes from its forward to the end of its input gradient;
            empty for 1 each, so that budgets count stage inputs.
        pending: for each stage the memory from there to the end of its weight gradient; empty for the same.

    Raises:
        ConfigError: lengths that do not match, or a rank whose budget is below one micro-batch on each of its stages.
    """

    placement: Placement
    num_microbatches: int
    forward_s: Sequence[float]
    input_s: Sequence[float]
    weight_s: Sequence[float]
    budgets: Sequence[float]
    boundary_s: Sequence[float] = ()
    kept: Sequence[float] = ()
    pending: Sequence[float] = ()

    def __post_init__(self) -> None:
        """Check lengths and budgets."""
        problems = self._problems()
        if problems:
            raise ConfigError(problems, "the task of a schedule")

    def _problems(self) -> list[str]:
        stages, ranks = self.placement.num_stages, self.placement.num_ranks
        lengths = [(name, len(getattr(self, name)), stages) for name in ("forward_s", "input_s", "weight_s")]
        lengths += [(name, len(found), stages) for name in ("kept", "pending") if (found := getattr(self, name))]
        lengths += [("boundary_s", len(self.boundary_s), stages - 1)] if self.boundary_s else []
        lengths.append(("budgets", len(self.budgets), ranks))
        wrong = [each for each in lengths if each[1] != each[2]]
        problems = [f"{name} must have {wanted} values, found {found}" for name, found, wanted in wrong]
        if self.num_microbatches < 1:
            problems.append(f"the number of micro-batches must be at least 1, found {self.num_microbatches}")
        if len({len(self.placement.stages_of(rank)) for rank in range(ranks)}) > 1:
            problems.append(f"every rank must have equally many stages, found {self.placement.rank_by_stage}")
        if problems:
            return problems
        needed = [sum(self.clock.kept[stage] for stage in self.placement.stages_of(rank)) for rank in range(ranks)]
        return [
            f"rank {rank} needs room for an input of each of its stages, {need:g}, found {room:g}"
            for rank, (need, room) in enumerate(zip(needed, self.budgets, strict=True))
            if need > room * (1 + 1e-12)
        ]

    @cached_property
    def clock(self) -> StageProfile:
        """Seconds and memory of stages, as the clock takes them."""
        num_stages = self.placement.num_stages
        kept = np.array(self.kept or np.ones(num_stages), np.float64)
        crosses = np.array([self.placement.crosses(stage) for stage in range(num_stages)])
        over_s = np.append(np.array(self.boundary_s or np.zeros(num_stages - 1), np.float64), 0.0)
        return StageProfile(
            seconds=np.array([self.forward_s, self.input_s, self.weight_s], np.float64),
            over_s=np.where(crosses, over_s, 0.0),
            kept=kept,
            pending=np.array(self.pending, np.float64) if self.pending else kept,
        )


Candidate = tuple[str, TimedRows]
"""How rows were made, for reports, and the rows."""


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        schedule: compute actions; ``max_stage_inputs`` is what its ranks hold.
        step_s: seconds of the step, messages included.
        rank_s: the longest time from a rank's first action to the end of its last.
        origin: how it was made, for reports.
    """

    schedule: Schedule
    step_s: float
    rank_s: float
    origin: str


def best_schedule(task: Task, aim: Aim = "step", tries: int = TRIES) -> Found:
    """Search for the fastest schedule; deterministic, and not always optimal.

    Args:
        task: seconds, memory and sizes.
        aim: what to minimize.
        tries: changes that each run of the local search tries; 0 skips the local search.
    """
    unit_s = float(task.clock.seconds.max())

    def seconds(timed: TimedRows) -> tuple[float, ...]:
        times = _times(task, timed)
        return tuple(round(each_s / unit_s, 6) for each_s in (times if aim == "step" else times[::-1]))

    def shortest(timed: TimedRows) -> float:
        return seconds(timed)[0]

    def merit(candidate: Candidate) -> tuple[float, ...]:
        return (*seconds(candidate[1]), _kept(task, candidate[1]))

    starts = sorted(_candidates(task), key=merit)
    origin, timed = starts[0]
    if tries and shortest(timed) > _least_s(task, aim) / unit_s * (1 + 1e-6):
        changed = [(f"{name}, changed", better) for name, better in _changed(task, starts, shortest, tries)]
        origin, timed = min([starts[0], *changed], key=merit)
    step_s, rank_s = _times(task, timed)
    made = Schedule(timed.rows, task.placement, task.num_microbatches)
    return Found(replace(made, max_stage_inputs=made.peak_stage_inputs), step_s, rank_s, origin)


def _changed(
    task: Task, starts: Sequence[Candidate], merit: Callable[[TimedRows], float], tries: int
) -> Iterator[Candidate]:
    """What the local search makes of the first few distinct candidates."""
    different: dict[tuple[bytes, ...], Candidate] = {}
    for start in starts:
        different.setdefault(tuple(b"".join(array.tobytes() for array in row.arrays) for row in start[1].rows), start)
    clocks = [task.clock.with_patience(patience, pulls=False) for patience in _PATIENCE]
    problem = SearchProblem(task.placement, task.budgets, clocks, merit)
    num_actions = 2 * task.placement.num_stages * task.num_microbatches
    best = list(different.values())[:_RUNS]
    for seed in range(_RUNS):
        name, timed = best[seed % len(best)]
        yield name, local_search(problem, timed, min(tries, _MOST_ACTIONS // num_actions), seed)


def _least_s(task: Task, aim: Aim) -> float:
    """Lower bound: a rank's work; for a whole step also the forwards before its first one."""
    clock, least_s = task.clock, 0.0
    for rank in range(task.placement.num_ranks):
        own = task.placement.stages_of(rank)
        work_s = task.num_microbatches * float(clock.seconds[:, list(own)].sum())
        wait_s = float((clock.seconds[0] + clock.over_s)[: own[0]].sum()) if aim == "step" else 0.0
        least_s = max(least_s, wait_s + work_s)
    return least_s


def _kept(task: Task, timed: TimedRows) -> float:
    """Peak activation memory, summed over ranks."""
    kept, pending = task.clock.kept, task.clock.pending
    change = np.stack([kept, np.zeros_like(kept), pending - kept, -pending])  # by the kinds F, B, I, W
    return sum(float(np.cumsum(change[row.kind, row.stage]).max()) for row in timed.rows)


def _times(task: Task, timed: TimedRows) -> tuple[float, float]:
    """``step_s`` and ``rank_s`` of ``Found``."""
    begins, ends = list[float](), list[float]()
    for row, starts in zip(timed.rows, timed.starts, strict=True):
        half = np.maximum(row.kind - 1, 0)
        begins.append(float(starts.min()))
        ends.append(float((starts + task.clock.seconds[half, row.stage]).max()))
    return max(ends), max(end - begin for begin, end in zip(begins, ends, strict=True))


def _candidates(task: Task) -> Iterator[Candidate]:
    is_looped = task.placement.num_stages > task.placement.num_ranks
    among = range(3) if is_looped else range(1)
    for rule in product(range(3), among, among, among):
        for patience, keeps_room in product(_PATIENCE, (True, False) if is_looped else (True,)):
            timed = _listed(task, rule, patience, keeps_room=keeps_room)
            if timed is not None:
                yield f"priorities {rule}, patience {patience:g}", timed
    whole = task.clock.keeping_all()
    for name, orders in _orders(task.placement, task.num_microbatches):
        for patience, pulls in product(_PATIENCE, (False, True) if is_looped else (False,)):
            for clock in (task.clock,) if whole is task.clock else (task.clock, whole):
                try:
                    timed = insert_weight_gradients(
                        orders, task.placement, task.budgets, clock.with_patience(patience, pulls=pulls)
                    )
                except ScheduleError:
                    continue  # it does not fit
                yield f"{name}, patience {patience:g}{', ahead' * pulls}{', whole' * (clock is whole)}", timed


@lru_cache(maxsize=64)
def _orders(placement: Placement, num_microbatches: int) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """The orders of forwards and input gradients of every family that runs on the placement, each order once."""
    pp = placement.num_ranks
    loops = placement.num_stages // pp
    placements = [name for name, make in PLACEMENTS.items() if make(pp, loops) == placement]
    found: dict[tuple[Row, ...], str] = {}
    for name in [name for name, known in FAMILIES.items() if known.has_backward and not known.is_found]:
        for where in placements:
            choice = Choice(family=name, pp=pp, loops=loops, num_microbatches=num_microbatches, placement=where)
            if not choice.problems():
                found.setdefault(tuple(map(without_weight_gradients, choice.make().rows)), name)
                break
    return tuple((name, orders) for orders, name in found.items())


def _listed(task: Task, rule: Sequence[int], patience: float, *, keeps_room: bool) -> TimedRows | None:
    """Rows from one priority rule; ``None`` where a rank runs out of memory (``clocked.list_schedule``)."""
    placement = task.placement
    state = clocked.begin(placement.num_ranks, placement.num_stages, task.num_microbatches)
    run = kernel(clocked.list_schedule, state.kind.size)
    run(task.clock.world(placement, task.budgets), state, np.array(rule, np.int64), patience, keeps_room)
    return timed_rows(state)


@family("zb-1p", is_looped=False, instead="interleaved-zb", splits_backward=True, is_found=True)
def zb_1p(request: Request) -> Rows:
    """The best found in 1F1B's memory where F, I and W take equally long (arXiv 2401.10241, section 3.1)."""
    return _found(request, "zb-1p")


@family("zb-2p", is_looped=False, instead="interleaved-zb", splits_backward=True, is_found=True)
def zb_2p(request: Request) -> Rows:
    """The same in twice 1F1B's memory; ranks are never idle after their first action (arXiv 2401.10241, 3.1)."""
    return _found(request, "zb-2p")


INPUTS_BY_RANKS = {"zb-1p": 1, "zb-2p": 2}
"""For each family that searches: stage inputs that a rank may hold, as a multiple of the number of ranks."""


def _found(request: Request, name: str) -> Rows:
    one = (1.0,) * request.placement.num_stages
    pp = request.placement.num_ranks
    budgets = (float(INPUTS_BY_RANKS[name] * pp),) * pp
    task = Task(
        placement=request.placement,
        num_microbatches=request.num_microbatches,
        forward_s=one,
        input_s=one,
        weight_s=one,
        budgets=budgets,
    )
    schedule = best_schedule(task, "rank", tries=0).schedule
    assert schedule.max_stage_inputs is not None
    return Rows(schedule.rows, schedule.max_stage_inputs)
