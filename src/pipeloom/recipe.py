"""Makes the schedule of a run: a family's rows, then passes in a fixed order.

Training, simulation, planning and ``pipeloom schedule`` choose ``Knobs``, convert them to a ``Recipe`` (``run_recipe``)
and build it here, so that they use the same schedule; ``tests/conformance`` compares their rows. Passes take bytes and
seconds as ``Sizes`` and ``Timing``.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from pipeloom.families import FAMILIES, Choice
from pipeloom.families.all_forward_all_backward import forwards_in_turn
from pipeloom.passes import (
    Moves,
    add_data_parallel,
    add_moves,
    add_stage_swaps,
    add_tied,
    add_updates,
    lower,
    place_of_updates,
)
from pipeloom.passes.budget import unmoved_problems
from pipeloom.passes.lower_sharding import ReduceGrad, SharedState, Unshard, exchanges, row_with_exchanges
from pipeloom.passes.lower_stage_swaps import UpdatePlace
from pipeloom.schedule import Schedule, ScheduleFile, format_schedule
from pipeloom.schedule.clock import SecondsOf, nominal_s
from pipeloom.schedule.facts import Graph, Promises
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts, refuse_large, stage_sizes


@dataclass(frozen=True)
class Residence:
    """The limit of stages on the device, for models that are larger than it.

    Attributes:
        room: bytes, or a number of stages.
        is_bytes: whether ``room`` is bytes.
        is_ring: whether the stages are used in turn, over and over, so that each comes as soon as there is room.
    """

    room: int
    is_bytes: bool = True
    is_ring: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A family and the passes behind it, in the order in which they run.

    Attributes:
        start: a family and its sizes, or a schedule, such as one from a file.
        receive_buffers: receives posted ahead for each directed edge; ``None``: no sends and receives, since ranks
            exchange tensors within their compute actions.
        lends_tied: whether the first stage sends the last one the matrix that embedding and head share.
        trains_tied: whether that matrix is trained, so that its gradient is sent back.
        unshard: gathers; ``None`` for none.
        reduce_grad: reductions; ``None`` for none.
        updates: where rows have the optimizer's step of each stage; ``None``: not in the schedule.
        residence: limit of stages on the device; ``None``: all stages stay there.
        moves: of activations, between forward and backward.
        given: a schedule from a file to use in place of the one that is made, if it fits; ``None`` for none.
    """

    start: Choice | Schedule
    receive_buffers: int | None = 2
    lends_tied: bool = False
    trains_tied: bool = True
    unshard: Unshard | None = None
    reduce_grad: ReduceGrad | None = None
    updates: UpdatePlace | None = None
    residence: Residence | None = None
    moves: Moves = field(default_factory=Moves)
    given: ScheduleFile | None = None


def shared_state(shard: SharedState, *, data_ranks: int, sequence_parallel: bool) -> SharedState | None:
    """The level of sharding among ranks with the same stages; ``None`` where they exchange nothing.

    With sequence parallelism tensor-parallel ranks reduce the gradients of parameters that each of them holds whole,
    for any ``data_ranks``, since each rank has the gradients of its own tokens.

    Args:
        shard: level of sharding if there are several data-parallel ranks.
        data_ranks: ranks that hold the same weights and compute other tokens.
        sequence_parallel: whether tensor-parallel ranks split the tokens.
    """
    # Without replicas there is nothing to shard.
    if data_ranks > 1:
        return shard
    return "none" if sequence_parallel else None


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """Choices of a run's schedule, by a configuration, the planner or a table of runs.

    Attributes:
        choice: family and sizes.
        receive_buffers: receives posted ahead, for each directed edge.
        residency: most stages gathered at the same time, for fully sharded weights (``exchanges``).
        prefetch: number of visits by which a gather starts early.
        gradient_buffers: most stages of a rank with unreduced gradients; ``None`` for all.
        device_budget: most bytes of stages, or of their experts, on the device of a rank at the same time; ``None``:
            all stay there.
        needs_norm: whether an update needs the norm of the whole gradient (``place_of_updates``).
        moves: of activations, between forward and backward.
        found: compute-only schedule that was searched for the seconds of a run; ``None``: the family's own.
        given: a schedule from a file; ``None`` for none.
        keeps_as: device type whose kernels keep the bytes that moves are placed by; ``None``: that of the cluster.
    """

    choice: Choice
    receive_buffers: int = 2
    residency: int = 2
    prefetch: int = 1
    gradient_buffers: int | None = None
    device_budget: int | None = None
    needs_norm: bool = False
    moves: Moves = field(default_factory=Moves)
    found: Schedule | None = None
    given: ScheduleFile | None = None
    keeps_as: Literal["cpu", "cuda"] | None = None


def run_recipe(
    knobs: Knobs,
    *,
    shard: SharedState | None,
    lends_tied: bool,
    trains_tied: bool = True,
    sends: bool = True,
    swaps_part: bool = False,
    updates_stages: bool = False,
) -> Recipe:
    """The recipe of a training run.

    Args:
        knobs: the choices.
        shard: level of sharding (``shared_state``); ``None``: ranks with the same stages exchange nothing.
        lends_tied: see ``Recipe``.
        trains_tied: see ``Recipe``.
        sends: whether pipeline ranks exchange tensors by sends and receives.
        swaps_part: whether a device budget is of a part of each stage, beside which the rest is gathered.
        updates_stages: whether stages that stay on the device are updated within the step, too.
    """
    choice, budget = knobs.choice, knobs.device_budget
    unshard, reduce_grad = None, None
    if shard is not None:
        unshard, reduce_grad = exchanges(
            shard, residency=knobs.residency, prefetch=knobs.prefetch, gradient_buffers=knobs.gradient_buffers
        )
    updates: UpdatePlace | None = "at once" if updates_stages else None
    if budget is not None:
        updates = place_of_updates(choice.pp * choice.loops, needs_norm=knobs.needs_norm)
        if swaps_part:  # its gradient is not reduced, but an update in this row would wait for the rest, which is
            updates = "in the next step"
    return Recipe(
        start=choice if knobs.found is None else knobs.found,
        receive_buffers=knobs.receive_buffers if sends else None,
        lends_tied=lends_tied,
        trains_tied=trains_tied,
        unshard=unshard,
        reduce_grad=reduce_grad,
        updates=updates,
        residence=None if budget is None else Residence(budget),
        moves=knobs.moves,
        given=knobs.given,
    )


def ring_recipe(recipe: Recipe, num_stages: int, num_tokens: int) -> Recipe:
    """The recipe of forwards of tokens on one rank, each of which runs through all stages and decides the next one.

    Stages that are swapped come while the ones before them compute, also from one token to the next.

    Args:
        recipe: of a run of one rank; its residence is used.
        num_stages: of the run.
        num_tokens: of each sequence; they are the micro-batches of the schedule.
    """
    residence = None if recipe.residence is None else replace(recipe.residence, is_ring=True)
    start = forwards_in_turn(num_stages, num_tokens)
    return replace(recipe, start=start, residence=residence, moves=Moves(), given=None)


class Sizes(Protocol):
    """Bytes of a run's stages: closed forms, or measured on stages."""

    def kept(self, schedule: Schedule, /) -> KeptBytes:
        """Activation memory of stages."""
        ...

    def stages(self) -> Sequence[Amounts]:
        """For each stage the bytes of its weights, gradient and optimizer state."""
        ...


class PlacedBy(NamedTuple):
    """Seconds and partners by which moves are placed.

    Attributes:
        seconds_of: seconds of every action.
        partners: for each rank its partner; ``None``: by the peaks of ranks (``pair_ranks``).
    """

    seconds_of: SecondsOf
    partners: Sequence[int] | None = None


Timing = Callable[[Schedule, KeptBytes], PlacedBy]
"""(schedule, activation memory) -> seconds by which moves are placed in it."""


def nominal(_schedule: Schedule, _kept: KeptBytes) -> PlacedBy:
    """Nominal seconds: a forward and a move take 1, a backward 2."""
    return PlacedBy(nominal_s)


def build(recipe: Recipe, sizes: Sizes | None = None, timing: Timing = nominal) -> Schedule:
    """The schedule that a recipe describes, verified.

    Args:
        recipe: what to build.
        sizes: bytes, for recipes with moves or with a residence in bytes; ``None``: a micro-batch takes 1 on each
            stage.
        timing: seconds, for recipes with moves.

    Raises:
        UserError: the family does not take these sizes, passes cannot be combined, a budget cannot be kept, or the
            given schedule does not fit.
    """
    schedule, given, moves = _unmoved(recipe, sizes), recipe.given, recipe.moves
    if given is not None:
        # The run's own schedule is made, too: the file must do the same work.
        fitted = given.fitted(schedule, recipe_lines(recipe, schedule, sizes))
        if moves.budget_bytes is not None and (
            problems := unmoved_problems(fitted, _kept(fitted, sizes), moves.budget_bytes)
        ):
            raise given.misfit(problems)
        return fitted
    if not moves.is_any:
        return schedule
    kept = _kept(schedule, sizes)
    placed = timing(schedule, kept)
    return add_moves(schedule, moves, kept, seconds_of=placed.seconds_of, partners=placed.partners)


def schedule_text(recipe: Recipe, schedule: Schedule, sizes: Sizes | None = None) -> str:
    """The text of a schedule file, with promises and recipe.

    Args:
        recipe: of the schedule.
        schedule: as ``build`` returned it.
        sizes: as for ``build``.
    """
    if recipe.given is not None:
        return format_schedule(schedule, recipe.given.recipe)
    return format_schedule(schedule, recipe_lines(recipe, schedule, sizes))


def recipe_lines(recipe: Recipe, schedule: Schedule, sizes: Sizes | None = None) -> dict[str, str]:
    """A recipe as setting -> value; empty for one that does not begin with a family.

    Recipes that make the same rows for the same seconds have equal lines.

    Args:
        recipe: of a run.
        schedule: its schedule, with or without moves.
        sizes: as for ``build``.
    """
    choice, moves, residence = recipe.start, recipe.moves, recipe.residence
    if isinstance(choice, Schedule):
        return {}
    lines: dict[str, object] = {
        "family": choice.family,
        "placement": choice.placement_name,
        "group_size": (choice.group_size or choice.known_group_size) if FAMILIES[choice.family].is_grouped else None,
        "keep": None if choice.keep is None else " ".join(map(str, choice.keep)),
        "receive_buffers": recipe.receive_buffers,
        "tied": ("true" if recipe.trains_tied else "frozen") if recipe.lends_tied else None,
    }
    if recipe.unshard is not None:
        lines |= {"residency": recipe.unshard.residency or "all", "prefetch": recipe.unshard.prefetch}
    if recipe.reduce_grad is not None:
        lines["gradient_buffers"] = recipe.reduce_grad.gradient_buffers or "all"
    lines["updates"] = recipe.updates
    if residence is not None:
        lines["device_budget"] = residence.room
    if moves.is_any:
        kept = _kept(schedule, sizes)
        lines |= {name: "true" for name in ("balance", "offload") if getattr(moves, name)}
        lines["activation_budget"] = None if moves.budget_bytes is None else f"{moves.budget_bytes:.15g}"
        # 15 digits survive any conversion; more would show how a sum was rounded.
        lines["kept_bytes"] = " ".join(f"{each:.15g}" for each in kept.by_stage(schedule.num_stages))
    return {name: str(value) for name, value in lines.items() if value is not None}


def _kept(schedule: Schedule, sizes: Sizes | None) -> KeptBytes:
    return KeptBytes() if sizes is None else sizes.kept(schedule)


def _unmoved(recipe: Recipe, sizes: Sizes | None) -> Schedule:
    """The schedule with everything but moves of activations."""
    schedule, residence = communicating(recipe), recipe.residence
    if residence is None:
        return schedule
    each, ahead = None, schedule.num_stages if residence.is_ring else 1
    if residence.is_bytes:
        assert sizes is not None, "a room in bytes takes the bytes of stages"
        each = stage_sizes(sizes.stages())
        refuse_large(each, residence.room, trains=_trains(schedule))
    return add_stage_swaps(schedule, residence.room, sizes=each, ahead=ahead, hides=residence.is_ring)


def communicating(recipe: Recipe) -> Schedule:
    """The schedule of the part of a recipe that needs neither bytes nor seconds; recent ones are cached.

    Raises:
        UserError: as ``build``.
    """
    if isinstance(recipe.start, Schedule):
        sending = add_data_parallel(_sending(recipe.start, recipe), recipe.unshard, recipe.reduce_grad)
        return _updating(sending, recipe)
    # What needs bytes or seconds differs between runs that are otherwise equal, so it is not cached.
    return _SCHEDULES.get(_without_bytes(recipe))


def without_messages(recipe: Recipe, rank: int | None = None) -> Graph:
    """The graph of ``communicating`` without messages, whose step takes no longer and which is faster to make.

    Outputs reach other ranks at once. It is a lower bound for the planner, not executable and not verified.

    Args:
        recipe: of the schedule.
        rank: the only one with actions, for which nothing of another rank has to end; ``None``: all have theirs.

    Raises:
        UserError: as ``build``.
    """
    # Recipes that differ only in messages are one here.
    bare = replace(_without_bytes(recipe), receive_buffers=None, lends_tied=False, updates=None)
    return _GRAPHS.get((bare, rank)) if rank is not None or _exchanges(bare) else communicating(bare).graph


def _without_bytes(recipe: Recipe) -> Recipe:
    return replace(recipe, residence=None, moves=Moves(), given=None)


def _exchanges(recipe: Recipe) -> bool:
    """Whether data-parallel ranks gather or reduce anything."""
    return recipe.unshard is not None or recipe.reduce_grad is not None


def _make(recipe: Recipe) -> Schedule:
    """Each prefix of a recipe is cached, too: recipes that differ in exchanges share the schedule with messages."""
    if isinstance(recipe.start, Schedule):
        return recipe.start
    if recipe.updates is not None:
        return _updating(communicating(replace(recipe, updates=None)), recipe)
    if _exchanges(recipe):
        bare = communicating(replace(recipe, unshard=None, reduce_grad=None))
        return add_data_parallel(bare, recipe.unshard, recipe.reduce_grad)
    if recipe.receive_buffers is not None:
        return _sending(communicating(Recipe(start=recipe.start, receive_buffers=None)), recipe)
    return recipe.start.make()


def _sending(schedule: Schedule, recipe: Recipe) -> Schedule:
    """The schedule with sends and receives, if the recipe has them."""
    if recipe.receive_buffers is not None:
        schedule = lower(schedule, recipe.receive_buffers)
    return add_tied(schedule, returns_gradient=recipe.trains_tied) if recipe.lends_tied else schedule


def _updating(schedule: Schedule, recipe: Recipe) -> Schedule:
    """The schedule with the updates of stages, if the recipe has them."""
    # A step that only evaluates has no gradient to update with.
    return add_updates(schedule, recipe.updates) if recipe.updates is not None and _trains(schedule) else schedule


def _trains(schedule: Schedule) -> bool:
    return schedule.first_backward_stage < schedule.num_stages


def _make_without_messages(key: tuple[Recipe, int | None]) -> Graph:
    recipe, rank = key
    schedule = communicating(replace(recipe, unshard=None, reduce_grad=None))
    add = partial(row_with_exchanges, unshard=recipe.unshard, reduce_grad=recipe.reduce_grad)
    buffers = None if recipe.reduce_grad is None else recipe.reduce_grad.gradient_buffers
    rows = [add(row) if rank in (None, number) else row[:0] for number, row in enumerate(schedule.rows)]
    return replace(schedule.facts, rows=rows, promises=Promises(gradient_buffers=buffers)).graph


_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made", Schedule, Graph)


class _Remembered(Generic[_Key, _Made]):
    """Least-recently-used cache with a limit on the sum of actions: layouts of a search share schedules.

    Args:
        make: key -> value.
        most_actions: limit.
    """

    def __init__(self, make: Callable[[_Key], _Made], most_actions: int) -> None:
        self._make, self._most, self._actions = make, most_actions, 0
        self._known: OrderedDict[_Key, _Made] = OrderedDict()

    def get(self, key: _Key) -> _Made:
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        made = self._make(key)
        self._known[key] = made
        self._actions += _num_actions(made)
        # By the number of actions, not of schedules: one large schedule takes as much memory as a thousand small ones.
        while self._actions > self._most:
            _, oldest = self._known.popitem(last=False)
            self._actions -= _num_actions(oldest)
        return made


_SCHEDULES = _Remembered(_make, 2_000_000)
_GRAPHS = _Remembered(_make_without_messages, 1_000_000)


def _num_actions(made: Schedule | Graph) -> int:
    return made.num_nodes if isinstance(made, Graph) else made.num_actions
