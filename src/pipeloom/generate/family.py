"""What a family of schedules is, and the registry by name.

A new family is one file in this folder: a function that returns each rank's compute actions, under
``@family(...)``. Everything else (proof, lowering, simulation, picture, run) reads the schedule that comes out.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeloom.errors import ConfigError
from pipeloom.schedule import PLACEMENTS, Action, Kind, Placement, Schedule


@dataclass(frozen=True)
class Request:
    """What a family is asked for.

    Attributes:
        placement: stage -> pipeline rank.
        num_microbatches: micro-batches of a step, at least 1.
        group_size: micro-batches that run through one local stage before the next, where a family groups.
    """

    placement: Placement
    num_microbatches: int
    group_size: int

    @property
    def loops(self) -> int:
        """Stages for each pipeline rank."""
        return self.placement.num_stages // self.placement.num_ranks

    @property
    def is_looped(self) -> bool:
        """Whether stages go round the ranks, which the closed forms for warm-up assume."""
        return self.placement == Placement.looped(self.placement.num_ranks, self.loops)

    def local_stages(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, ascending."""
        return self.placement.stages_of(rank)


@dataclass(frozen=True)
class Rows:
    """What a family answers.

    Attributes:
        rows: each rank's compute actions.
        max_stage_inputs: the family's promise of how many stage inputs each rank holds; verified.
    """

    rows: Sequence[Sequence[Action]]
    max_stage_inputs: Sequence[int]


Rule = Callable[[Request], Rows]


@dataclass(frozen=True)
class Family:
    """A named rule that makes schedules.

    Attributes:
        name: as the command line spells it.
        rule: makes the rows.
        summary: one line for people.
        is_looped: takes several stages for each rank; otherwise exactly one.
        is_grouped: takes a group size.
        has_backward: trains; otherwise forward only.
        instead: the family to use when ``is_looped`` is violated.
    """

    name: str
    rule: Rule
    summary: str
    is_looped: bool
    is_grouped: bool
    has_backward: bool
    instead: str | None


FAMILIES: dict[str, Family] = {}
"""Every family by name."""


def family(
    name: str,
    *,
    is_looped: bool,
    is_grouped: bool = False,
    has_backward: bool = True,
    instead: str | None = None,
) -> Callable[[Rule], Rule]:
    """Register a rule under a name; the first line of its docstring becomes the summary."""

    def register(rule: Rule) -> Rule:
        assert name not in FAMILIES, f"two families are called {name}"
        summary = (rule.__doc__ or "").strip().splitlines()[0]
        FAMILIES[name] = Family(name, rule, summary, is_looped, is_grouped, has_backward, instead)
        return rule

    return register


def make_schedule(
    name: str,
    *,
    pp: int,
    num_microbatches: int,
    loops: int = 1,
    group_size: int | None = None,
    placement: str | None = None,
) -> Schedule:
    """Make a compute-only schedule.

    Args:
        name: a key of ``FAMILIES``.
        pp: pipeline ranks, at least 1.
        num_microbatches: micro-batches of a step, at least 1.
        loops: stages for each rank, at least 1.
        group_size: for grouped families, between ``pp`` and ``num_microbatches``; ``None`` for ``pp``.
        placement: a key of ``PLACEMENTS``; ``None`` for looped.

    Raises:
        ConfigError: with everything that is wrong with the request.
        ScheduleError: the family's rows break a rule, which is a fault of the family.
    """
    problems = request_problems(
        name, pp=pp, num_microbatches=num_microbatches, loops=loops, group_size=group_size, placement=placement
    )
    if problems:
        raise ConfigError(problems, f"schedule '{name}'")
    chosen = FAMILIES[name]
    request = Request(
        placement=PLACEMENTS[placement or "looped"](pp, loops),
        num_microbatches=num_microbatches,
        group_size=group_size or pp,
    )
    answer = chosen.rule(request)
    return Schedule(
        rows=tuple(tuple(row) for row in answer.rows),
        placement=request.placement,
        num_microbatches=num_microbatches,
        first_backward_stage=0 if chosen.has_backward else request.placement.num_stages,
        max_stage_inputs=tuple(answer.max_stage_inputs),
    )


def request_problems(
    name: str, *, pp: int, num_microbatches: int, loops: int, group_size: int | None, placement: str | None
) -> list[str]:
    """Everything that is wrong with a request, one sentence each; empty if nothing is."""
    problems = [
        f"{what} must be at least 1, found {value}"
        for what, value in (("pp", pp), ("loops", loops), ("the number of micro-batches", num_microbatches))
        if value < 1
    ]
    if placement is not None and placement not in PLACEMENTS:
        problems.append(_unknown("placement", placement, PLACEMENTS))
    if name not in FAMILIES:
        return [*problems, _unknown("schedule", name, FAMILIES)]
    chosen = FAMILIES[name]
    if loops > 1 and not chosen.is_looped:
        problems.append(f"{name} runs one stage on each rank, found loops {loops}; use {chosen.instead} or loops 1")
    if group_size is not None and not chosen.is_grouped:
        problems.append(f"{name} takes no group size, found {group_size}; use hybrid or leave it out")
    elif group_size is not None and not problems and not pp <= group_size <= num_microbatches:
        problems.append(
            f"the group size must lie between pp {pp} and the number of micro-batches {num_microbatches}, "
            f"found {group_size}"
        )
    return problems


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"there is no {what} '{name}'; {hint}known: {', '.join(known)}"


def forward(stage: int, microbatch: int) -> Action:
    """``{stage}F{microbatch}``."""
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """``{stage}B{microbatch}``."""
    return Action(Kind.BACKWARD, stage, microbatch)
