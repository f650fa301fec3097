"""Families of schedules, their registry, and the choice of one with its sizes.

A new family is one file: a function that returns each rank's compute actions, under ``@family(...)``. Verification,
lowering, simulation, pictures and training take the schedule that it returns.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache

from pipeloom.calls import checked, checked_class
from pipeloom.errors import ConfigError, FamilyError, place_of
from pipeloom.families.check_rows import Rows, checked_rows, naming_family
from pipeloom.passes import add_slices, freeze
from pipeloom.passes.recompute import recompute_beyond
from pipeloom.registry import Registry
from pipeloom.schedule import PLACEMENTS, Action, Kind, Placement, Row, Schedule
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, GOES_BACK
from pipeloom.schedule.whole_batch import interleaved_stage
from pipeloom.system.host_memory import available_memory
from pipeloom.terminal.words import count, format_bytes, unknown_name


@dataclass(frozen=True)
class Request:
    """Sizes for which a family makes rows.

    Examples:
        >>> from pipeloom import Placement, Request
        >>> request = Request(Placement.looped(num_ranks=2, loops=2), num_microbatches=4, group_size=2)
        >>> request.local_stages(0), request.loops
        ((0, 2), 2)

    Attributes:
        placement: stage -> pipeline rank.
        num_microbatches: micro-batches of a step, at least 1.
        group_size: micro-batches that run through one local stage before the next, for grouped families.
        num_slices: token slices of a micro-batch; 1 unless the family is ``slices_itself``.
    """

    placement: Placement
    num_microbatches: int
    group_size: int
    num_slices: int = 1

    @property
    def loops(self) -> int:
        """Stages for each pipeline rank."""
        return self.placement.num_stages // self.placement.num_ranks

    @property
    def is_looped(self) -> bool:
        """Whether the placement is looped (stage ``s`` on rank ``s % pp``), as closed forms for warm-up assume."""
        return self.placement == Placement.looped(self.placement.num_ranks, self.loops)

    def local_stages(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank, ascending."""
        return self.placement.stages_of(rank)


Rule = Callable[[Request], Rows]
HeldInputs = Sequence[Sequence[int]]
"""For each rank, for each of its stages, the stage inputs held at the rank's peak."""
StageInputs = Callable[[Request], HeldInputs | None]
"""Closed form of the stage inputs at the peak; ``None`` where only the rows show them."""
SameAs = Callable[[Request], str | None]
"""Another family that makes the same rows for a request of whole sequences, or ``None``."""


def _no_rule(_request: Request) -> Rows:
    raise AssertionError("registration sets the rule of a family")


@checked_class
@dataclass(frozen=True)
class Family:
    """A named rule that makes schedules.

    ``@family("name", is_looped=True)`` over a rule registers it.

    Examples:
        >>> from pipeloom import Request, Rows, backward, family, forward, make_schedule
        >>> @family("one-by-one", is_looped=False)
        ... def one_by_one(request: Request) -> Rows:
        ...     "Each micro-batch goes forward and back before the next one starts."
        ...     ranks, microbatches = range(request.placement.num_ranks), range(request.num_microbatches)
        ...     rows = [[step(rank, m) for m in microbatches for step in (forward, backward)] for rank in ranks]
        ...     return Rows(rows, max_stage_inputs=[1] * len(rows))
        >>> make_schedule("one-by-one", pp=2, num_microbatches=4)
        Schedule(2 stages on 2 ranks, 4 micro-batches, 16 actions, level compute)

    Attributes:
        name: as the command line spells it.
        is_looped: takes several stages for each rank; otherwise exactly one.
        is_grouped: takes a group size.
        has_backward: trains; otherwise forward only.
        splits_backward: runs input gradients and weight gradients as separate actions.
        is_found: searches for its rows.
        loops: the only number of stages for each rank that it takes; ``None`` for any.
        placement: the only placement that it takes; ``None`` for any.
        instead: family that an error suggests for several stages a rank, if ``is_looped`` is false.
        stage_inputs: closed form of stage inputs, with which the planner rejects layouts without making a schedule;
            ``None`` where there is none.
        slices_itself: makes rows of token slices on a looped placement. Rows of all other families are made of whole
            micro-batches and then sliced (``pipeloom.passes.add_slices``).
        same_as: names another family where that one makes the same schedule; ``None`` where none ever does.
        rule: makes the rows.
        summary: the first line of the rule's docstring.
    """

    name: str
    _: KW_ONLY
    is_looped: bool
    is_grouped: bool = False
    has_backward: bool = True
    splits_backward: bool = False
    is_found: bool = False
    loops: int | None = None
    placement: str | None = None
    instead: str | None = None
    stage_inputs: StageInputs | None = None
    slices_itself: bool = False
    same_as: SameAs | None = None
    rule: Rule = _no_rule
    summary: str = ""

    @property
    def only_loops(self) -> int | None:
        """The only number of stages for each rank that it takes; ``None`` for any."""
        return self.loops if self.is_looped else 1

    def __call__(self, rule: Rule) -> Rule:
        """Register a rule under the name.

        Raises:
            FamilyError: the name is taken or is ``auto``, the docstring is missing, or there is no such placement.
        """
        summary = (rule.__doc__ or "").strip()
        problems: list[str] = []
        # `in` would import plug-ins, which need the package's own families, while these register.
        if FAMILIES.is_taken(self.name):
            problems.append(f"another one of that name is in {place_of(FAMILIES[self.name].rule)}")
        if self.name == AUTO:
            problems.append(f"{AUTO} stands for the family that a run's other settings choose; use another name")
        if not summary:
            problems.append("its rule has no docstring, whose first line is its summary")
        if self.placement is not None and self.placement not in PLACEMENTS:
            problems.append(unknown_name("placement", self.placement, PLACEMENTS))
        if problems:
            raise FamilyError(f"the family '{self.name}' ({place_of(rule)}) is wrong: {'; '.join(problems)}")
        FAMILIES.add(self.name, replace(self, rule=rule, summary=summary.splitlines()[0]))
        return rule


family = Family
"""The decorator of a rule."""
FAMILIES: Registry[Family] = Registry("schedule", "pipeloom.families", Family)
"""Every family by name."""
AUTO = "auto"
"""In place of a name: the family that follows from the other settings of a run."""
_ACTION_BYTES = 150
"""Memory for each action while its schedule is made and verified: 173 to 185 bytes in steps of two million."""
_ALWAYS_THERE = 2**28
"""Bytes that need no check: the planner makes thousands of small schedules, and the check reads files."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A family and its sizes.

    Attributes:
        family: a key of ``FAMILIES``.
        pp: pipeline ranks, at least 1.
        num_microbatches: micro-batches of a step, at least 1.
        loops: stages for each rank, at least 1.
        group_size: for grouped families, from ``smallest_group`` (``pp`` for whole sequences) to
            ``num_microbatches``; ``None`` for the smallest.
        placement: a key of ``PLACEMENTS``; ``None`` for the family's own, or looped.
        num_slices: token slices of each micro-batch, at least 1; 1 for whole sequences.
        keep: for each rank the stage inputs for which it keeps all activations until the backward; the others are
            recomputed (``recompute_beyond``). ``None`` for all.
        frozen_stages: stages from the first on that train nothing and run no backward, fewer than there are.
    """

    family: str
    pp: int
    num_microbatches: int
    loops: int = 1
    group_size: int | None = None
    placement: str | None = None
    num_slices: int = 1
    keep: tuple[int, ...] | None = None
    frozen_stages: int = 0

    def problems(self) -> list[str]:
        """All problems of the choice, one sentence each."""
        sizes = (
            ("pp", self.pp),
            ("loops", self.loops),
            ("the number of micro-batches", self.num_microbatches),
            ("the number of token slices", self.num_slices),
        )
        problems = [f"{what} must be at least 1, found {value}" for what, value in sizes if value < 1]
        if self.placement is not None and self.placement not in PLACEMENTS:
            problems.append(unknown_name("placement", self.placement, PLACEMENTS))
        problems += self._keep_problems()
        if self.family not in FAMILIES:
            return [*problems, FAMILIES.unknown(self.family)]
        # Sizes below 1 would count as no memory at all.
        problems += [] if problems else self._size_problems()
        return problems + self._family_problems(FAMILIES[self.family], are_sizes_right=not problems)

    @property
    def num_actions(self) -> int:
        """Compute actions of a step, recomputation left out."""
        chosen = FAMILIES[self.family]
        stages = self.pp * self.loops
        # F; F and B; or F, I and W.
        backwards = (chosen.has_backward + chosen.splits_backward) * (stages - self.frozen_stages)
        return self.num_microbatches * self.num_slices * (stages + backwards)

    @property
    def least_bytes(self) -> int:
        """Lower bound of the memory that making the schedule takes."""
        return self.num_actions * _ACTION_BYTES

    def _size_problems(self) -> list[str]:
        """A problem if this host lacks the memory to make the schedule."""
        if self.least_bytes <= _ALWAYS_THERE:
            return []
        available = available_memory()
        if self.least_bytes <= available.size_bytes:
            return []
        # Rounded up, so that the message seldom states that 3 GB do not fit into 3 GB.
        needed, there = format_bytes(self.least_bytes, rounds_up=True), format_bytes(available.size_bytes)
        slices = f" x {self.num_slices:,} token slices" if self.num_slices > 1 else ""
        return [
            (
                f"{count(self.pp, 'pipeline rank')} x {count(self.loops, 'loop')} x "
                f"{count(self.num_microbatches, 'micro-batch')}{slices} make "
                f"{self.num_actions:,} actions, which take at least {needed} of memory; "
                f"{there} are {available.source}; choose smaller numbers"
            )
        ]

    def _keep_problems(self) -> list[str]:
        if self.keep is None:
            return []
        known = FAMILIES.get(self.family)
        if known is not None and not known.has_backward:
            return [f"keep recomputes for backwards, of which {self.family} has none; leave it out"]
        problems = (
            [f"keep must be at least 1 on every rank, found {self.keep}"] if min(self.keep, default=0) < 1 else []
        )
        if len(self.keep) != self.pp and self.pp >= 1:
            problems.append(
                f"keep must name the stage inputs of {count(self.pp, 'rank')}, found {count(len(self.keep), 'number')}"
            )
        return problems

    def _family_problems(self, chosen: Family, *, are_sizes_right: bool) -> list[str]:
        problems: list[str] = []
        name, size = self.family, self.group_size
        if self.loops > 1 and not chosen.is_looped:
            instead = f"{chosen.instead} or " if chosen.instead else ""
            problems.append(f"{name} runs one stage on each rank, found loops {self.loops}; use {instead}loops 1")
        if chosen.loops not in (None, self.loops):
            wanted = f"{name} runs {count(chosen.loops or 1, 'stage')} on each rank, found loops {self.loops}"
            problems.append(f"{wanted}; use loops {chosen.loops}")
        if chosen.placement is not None and self.placement not in (None, chosen.placement):
            wanted = f"{name} runs on the placement {chosen.placement}, found {self.placement}"
            problems.append(f"{wanted}; use {chosen.placement} or leave it out")
        if size is not None and not chosen.is_grouped:
            problems.append(f"{name} takes no group size, found {size}; use hybrid or leave it out")
        elif size is not None and are_sizes_right and not self.known_group_size <= size <= self.num_microbatches:
            # With fewer micro-batches than a group, all of them are the only group there is.
            least = f"pp {self.pp}" if self.known_group_size == self.smallest_group else str(self.num_microbatches)
            least += f" / {self.num_slices} token slices" if self.smallest_group < self.pp else ""
            problems.append(
                f"the group size must lie between {least} and the number of micro-batches "
                f"{self.num_microbatches}, found {size}"
            )
        return problems

    @property
    def smallest_group(self) -> int:
        """Fewest micro-batches of a group: with fewer slices than ranks some ranks would be idle."""
        return -(-self.pp // self.num_slices) if self._slices_itself else self.pp

    @property
    def known_group_size(self) -> int:
        """Default group size: the smallest, or all micro-batches where they are fewer."""
        return min(self.smallest_group, self.num_microbatches)

    @property
    def _slices_itself(self) -> bool:
        return FAMILIES[self.family].slices_itself and (self.loops == 1 or self.placement in (None, "looped"))

    def placed(self) -> Placement:
        """The placement of stages on ranks.

        Raises:
            KeyError: no placement has that name (``problems`` reports it).
        """
        return PLACEMENTS[self.placement_name](self.pp, self.loops)

    @property
    def placement_name(self) -> str:
        """A key of ``PLACEMENTS``: the chosen one, else the family's own, else looped."""
        known = FAMILIES.get(self.family)
        own = known.placement if known is not None else None
        return self.placement or own or "looped"

    def make(self) -> Schedule:
        """The compute-only schedule.

        Raises:
            ConfigError: with all problems of the choice.
            ScheduleError: the family's rows break a rule.
            FamilyError: the family raises, returns something else than rows of actions, or splits backwards undeclared.
        """
        problems = self.problems()
        if problems:
            raise ConfigError(problems, f"schedule '{self.family}'")
        chosen, request = FAMILIES[self.family], self._request
        placement = request.placement
        with naming_family(self.family, chosen.rule):
            answer = checked_rows(self.family, chosen.rule, chosen.rule(request))
            schedule = Schedule(
                rows=tuple(map(Row.of, answer.rows)),
                placement=placement,
                num_microbatches=self.num_microbatches,
                num_slices=request.num_slices,
                first_backward_stage=0 if chosen.has_backward else placement.num_stages,
                max_stage_inputs=tuple(answer.max_stage_inputs),
            )
            if not chosen.splits_backward and schedule.facts.has(*ADDS_TO_GRADIENT - GOES_BACK):
                # What does not work with split backwards is refused by the declaration, before there are rows.
                where = f"the family '{self.family}' ({place_of(chosen.rule)})"
                raise FamilyError(f"{where} splits backwards; add splits_backward=True to its declaration")
        if chosen.has_backward:
            schedule = freeze(schedule, self.frozen_stages)
        # The family made whole micro-batches; any order of those can be sliced in place.
        if request.num_slices < self.num_slices:
            schedule = add_slices(schedule, self.num_slices)
        if self.keep is None:
            return schedule
        stages = schedule.num_stages
        # In whole micro-batches: of one that is recomputed the input is kept, which `keep` does not count.
        return recompute_beyond(schedule, self.keep, [1.0] * stages, [0.0] * stages)

    @property
    def _request(self) -> Request:
        num_slices = self.num_slices if self._slices_itself else 1
        return Request(self.placed(), self.num_microbatches, self.group_size or self.smallest_group, num_slices)

    @property
    def same_as(self) -> str:
        """Representative of all families that make the same schedule for this choice of whole sequences."""
        name = self.family
        while (same_as := FAMILIES[name].same_as) is not None:
            with naming_family(name, same_as):
                other = same_as(self._request)
            if other is None:
                break
            name = other
        return name

    @property
    def stage_inputs(self) -> HeldInputs | None:
        """Stage inputs at each rank's peak, by stage; ``None`` without a closed form."""
        # Closed forms count on a backward of each stage.
        closed_form = None if self.frozen_stages else FAMILIES[self.family].stage_inputs
        if closed_form is None:
            return None
        with naming_family(self.family, closed_form):
            return closed_form(self._request)


@checked
def make_schedule(
    family: str,
    *,
    pp: int,
    num_microbatches: int,
    loops: int | None = None,
    group_size: int | None = None,
    placement: str | None = None,
    num_slices: int = 1,
    keep: Sequence[int] | None = None,
) -> Schedule:
    """Make a family's schedule: the compute actions of each pipeline rank, verified.

    Examples:
        >>> from pipeloom import format_schedule, make_schedule
        >>> print(format_schedule(make_schedule("1f1b", pp=2, num_microbatches=3)))
        max_stage_inputs = 2 1
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
        <BLANKLINE>

    Args:
        family: such as ``"breadth-first"``; ``pipeloom families`` lists them.
        pp: pipeline ranks.
        num_microbatches: micro-batches of a step.
        loops: stages on each pipeline rank; ``None``: as many as the family takes, 2 if it takes any number.
        group_size: see ``Choice``.
        placement: stage -> rank: ``"looped"``, ``"v"`` or ``"linear"``; ``None``: the family's own, else looped.
        num_slices: token slices of a micro-batch.
        keep: for each rank the stage inputs that are kept whole; the others are recomputed. ``None``: all.

    Raises:
        ConfigError: with all problems of the sizes.
        FamilyError: the family raises, or returns something else than rows of actions.
    """
    return Choice(
        family=family,
        pp=pp,
        num_microbatches=num_microbatches,
        loops=default_loops(family) if loops is None else loops,
        group_size=group_size,
        placement=placement,
        num_slices=num_slices,
        keep=None if keep is None else tuple(keep),
    ).make()


def default_loops(family: str) -> int:
    """Stages on each rank if none are given: the only number that the family takes, else 2, as in a run file."""
    known = FAMILIES.get(family)
    return 1 if known is None else known.only_loops or 2


@cache
def ends_forwards_first(name: str) -> bool:
    """Whether in a family all forwards of a stage precede its first backward, by the rows of a small schedule."""
    choice = Choice(family=name, pp=2, num_microbatches=4, loops=FAMILIES[name].only_loops or 2)
    return interleaved_stage(choice.make()) is None


def installed(names: tuple[str, ...]) -> tuple[str, ...]:
    """The families of a training program that are installed; all with a backward if it names none."""
    # A plug-in may have been left out since the program was read.
    own = tuple(name for name in names if name in FAMILIES)
    return own or tuple(name for name, known in FAMILIES.items() if known.has_backward)


def forward(stage: int, microbatch: int) -> Action:
    """The forward of a micro-batch on a stage.

    Examples:
        >>> print(forward(2, 0))
        2F0
    """
    return Action(Kind.FORWARD, stage, microbatch)


def backward(stage: int, microbatch: int) -> Action:
    """The whole backward of a micro-batch on a stage.

    Examples:
        >>> print(backward(2, 0))
        2B0
    """
    return Action(Kind.BACKWARD, stage, microbatch)
