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
from pipeloom.families.steady import lengthened
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

Rule = tuple[int, ...]
"""Priorities of list scheduling (``clocked.list_schedule``)."""

_PATIENCE = (0.0, 1.0)
TRIES = 500
"""Changes that each run of the local search tries; fewer where there are many actions."""
_STEADY_ROUNDS, _WORTH = 4, 1.5
"""Micro-batches for each rank with which most steps are steady in their middle (``lengthened``), and how many times as
many a step has for which this is tried."""
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


Candidate = tuple["Way", TimedRows]
"""How rows were made, and the rows."""


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


def best_schedule(task: Task, aim: Aim = "step", tries: int = TRIES, ways: Sequence["Way"] = ()) -> Found:
    """Search for the fastest schedule; deterministic, and not always optimal.

    Args:
        task: seconds, memory and sizes.
        aim: what to minimize.
        tries: changes that each run of the local search tries; 0 skips the local search.
        ways: the only ways to make candidates, as of ``best_ways``; empty, or if none of them fits, for all.
    """

    def shortest(timed: TimedRows) -> float:
        return _merit(task, aim, timed)[0]

    made = [(way, timed) for way in ways if (timed := way.rows(task)) is not None] or candidates(task)
    starts = sorted(made, key=lambda each: _merit(task, aim, each[1]))
    way, timed = starts[0]
    origin = str(way)
    if tries and shortest(timed) > _least_s(task, aim) / _unit_s(task) * (1 + 1e-6):
        changed = [(f"{name}, changed", better) for name, better in _changed(task, starts, shortest, tries)]
        origin, timed = min([(origin, timed), *changed], key=lambda each: _merit(task, aim, each[1]))
    step_s, rank_s = _times(task, timed)
    schedule = Schedule(timed.rows, task.placement, task.num_microbatches).promising_its_peak()
    return Found(schedule, step_s, rank_s, origin)


def _unit_s(task: Task) -> float:
    return float(task.clock.seconds.max())


def _merit(task: Task, aim: Aim, timed: TimedRows) -> tuple[float, ...]:
    """What candidates are compared by, less is better: rounded times, the aim's first, then memory."""
    times, unit_s = _times(task, timed), _unit_s(task)
    ordered = times if aim == "step" else times[::-1]
    return (*(round(each_s / unit_s, 6) for each_s in ordered), _kept(task, timed))


def _distinct(starts: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without those whose rows are equal to an earlier one's."""
    different: dict[tuple[bytes, ...], Candidate] = {}
    for start in starts:
        different.setdefault(tuple(b"".join(array.tobytes() for array in row.arrays) for row in start[1].rows), start)
    return list(different.values())


def _changed(
    task: Task, starts: Sequence[Candidate], merit: Callable[[TimedRows], float], tries: int
) -> Iterator[tuple[str, TimedRows]]:
    """What the local search makes of the first few distinct candidates."""
    clocks = [task.clock.with_patience(patience, pulls=False) for patience in _PATIENCE]
    problem = SearchProblem(task.placement, task.budgets, clocks, merit)
    num_actions = 2 * task.placement.num_stages * task.num_microbatches
    best = _distinct(starts)[:_RUNS]
    for seed in range(_RUNS):
        way, timed = best[seed % len(best)]
        yield str(way), local_search(problem, timed, min(tries, _MOST_ACTIONS // num_actions), seed)


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


@dataclass(frozen=True)
class Way:
    """How a candidate is made: by list scheduling with a priority rule, or from the order of a family.

    Attributes:
        rule: priorities (``clocked.list_schedule``); empty for the order of a family.
        family: name of the family; empty for list scheduling.
        patience: an idle rank runs a weight gradient if it would be idle for at least this fraction of it.
        keeps_room: whether a forward leaves memory for an input of each later stage of its rank.
        pulls: whether an idle rank runs the next forward of its first stage out of turn.
        is_whole: whether a micro-batch is taken to keep all of its memory until its weight gradient.
    """

    rule: Rule = ()
    family: str = ""
    patience: float = 0.0
    keeps_room: bool = True
    pulls: bool = False
    is_whole: bool = False

    def __str__(self) -> str:
        """For reports."""
        if self.rule:
            return f"priorities {self.rule}, patience {self.patience:g}"
        return f"{self.family}, patience {self.patience:g}{', ahead' * self.pulls}{', whole' * self.is_whole}"

    def rows(self, task: Task) -> TimedRows | None:
        """Rows for a task; ``None`` where a rank runs out of memory, or the family does not support the sizes."""
        few = _STEADY_ROUNDS * task.placement.num_ranks
        if task.num_microbatches >= _WORTH * few:
            short = self._clocked(replace(task, num_microbatches=few))
            longer = None if short is None else lengthened(short, task.num_microbatches - few)
            if longer is not None:
                return longer
        return self._clocked(task)

    def _clocked(self, task: Task) -> TimedRows | None:
        """``rows``, all of them run on the clock."""
        if self.rule:
            return _listed(task, self.rule, self.patience, keeps_room=self.keeps_room)
        orders = _order(self.family, task.placement, task.num_microbatches)
        if orders is None:
            return None
        clock = (task.clock.keeping_all() if self.is_whole else task.clock).with_patience(
            self.patience, pulls=self.pulls
        )
        try:
            return insert_weight_gradients(orders, task.placement, task.budgets, clock)
        except ScheduleError:
            return None  # it does not fit


def best_ways(task: Task, most: int, rules: Sequence[Rule] | None = None, aim: Aim = "rank") -> tuple[Way, ...]:
    """The ``most`` ways that make the best distinct candidates of a task, the best first.

    For ``best_schedule`` of a larger task of the same proportions: which priority rule is best depends on the ratios of
    the seconds, much less on the numbers of ranks and micro-batches.

    Args:
        task: seconds, memory and sizes.
        most: number of ways.
        rules: priorities of list scheduling to try; ``None`` for all.
        aim: what to minimize.
    """
    made = candidates(task, rules)
    found = sorted(((_merit(task, aim, timed), way, timed) for way, timed in made), key=lambda each: each[0])
    return tuple(way for way, _ in _distinct([(way, timed) for _, way, timed in found])[:most])


def candidates(task: Task, rules: Sequence[Rule] | None = None) -> Iterator[Candidate]:
    """What list scheduling (with ``rules``) and the families make of a task, some of it several times."""
    for way in _ways(task, rules):
        timed = way.rows(task)
        if timed is not None:
            yield way, timed


def _ways(task: Task, rules: Sequence[Rule] | None) -> Iterator[Way]:
    is_looped = task.placement.num_stages > task.placement.num_ranks
    among = range(3) if is_looped else range(1)
    for rule in product(range(3), among, among, among) if rules is None else rules:
        for patience, keeps_room in product(_PATIENCE, (True, False) if is_looped else (True,)):
            yield Way(rule=rule, patience=patience, keeps_room=keeps_room)
    has_whole = task.clock.keeping_all() is not task.clock
    for name in _families(task.placement, task.num_microbatches):
        for patience, pulls in product(_PATIENCE, (False, True) if is_looped else (False,)):
            for is_whole in (False, True) if has_whole else (False,):
                yield Way(family=name, patience=patience, pulls=pulls, is_whole=is_whole)


@lru_cache(maxsize=64)
def _families(placement: Placement, num_microbatches: int) -> tuple[str, ...]:
    """The families that run on the placement, of those with equal orders the first."""
    found: dict[tuple[Row, ...], str] = {}
    for name in [name for name, known in FAMILIES.items() if known.has_backward and not known.is_found]:
        orders = _order(name, placement, num_microbatches)
        if orders is not None:
            found.setdefault(orders, name)
    return tuple(found.values())


@lru_cache(maxsize=256)
def _order(name: str, placement: Placement, num_microbatches: int) -> tuple[Row, ...] | None:
    """A family's order of forwards and input gradients; ``None`` if it does not support the sizes."""
    choice = choice_on(name, placement, num_microbatches)
    return None if choice is None else tuple(map(without_weight_gradients, choice.make().rows))


def choice_on(name: str, placement: Placement, num_microbatches: int) -> Choice | None:
    """A family on a placement; ``None`` if it does not support the sizes."""
    pp = placement.num_ranks
    loops = placement.num_stages // pp
    for where in [where for where, make in PLACEMENTS.items() if make(pp, loops) == placement]:
        choice = Choice(family=name, pp=pp, loops=loops, num_microbatches=num_microbatches, placement=where)
        if not choice.problems():
            return choice
    return None


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
