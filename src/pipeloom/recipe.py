"""How the schedule of a run is made: a family's rows, then passes in one fixed order.

Training, simulation, planning and ``pipeloom schedule`` choose ``Knobs``, make a ``Recipe`` of them (``run_recipe``)
and build it here, so that what is simulated is what is trained; ``tests/conformance`` compares their rows. Passes take
bytes and seconds as ``Sizes`` and ``Timing``.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from pipeloom.families import FAMILIES, Choice
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
from pipeloom.passes.lower_sharding import ReduceGrad, SharedState, Unshard, exchanges, row_with_exchanges
from pipeloom.passes.lower_stage_swaps import UpdatePlace
from pipeloom.schedule import Schedule, ScheduleFile, format_schedule
from pipeloom.schedule.clock import SecondsOf, nominal_s
from pipeloom.schedule.facts import Graph, Promises
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts, refuse_large, stage_sizes


@dataclass(frozen=True)
class Residence:
    """Stages that visit the device.

    Attributes:
        room: of the device for stages: bytes, or a number of stages.
        is_bytes: whether ``room`` is bytes.
    """

    room: int
    is_bytes: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A family and the passes behind it, in the order in which they run.

    Attributes:
        start: a family and its sizes, or a schedule, such as one from a file.
        receive_buffers: receives posted ahead for each directed edge; ``None``: no lane has messages, and ranks
            exchange tensors within their compute actions.
        lends_tied: whether the first stage lends the last one the matrix that embedding and head share.
        unshard: gathers; ``None`` without.
        reduce_grad: reductions; ``None`` without.
        updates: where rows have the optimizer's step of each stage; ``None``: it is not in the schedule.
        residence: stages that visit the device; ``None``: all are there.
        moves: what leaves ranks between forward and backward.
        given: the schedule itself, which only has to fit what all others make; ``None``: it is made.
    """

    start: Choice | Schedule
    receive_buffers: int | None = 2
    lends_tied: bool = False
    unshard: Unshard | None = None
    reduce_grad: ReduceGrad | None = None
    updates: UpdatePlace | None = None
    residence: Residence | None = None
    moves: Moves = field(default_factory=Moves)
    given: ScheduleFile | None = None


def shared_state(shard: SharedState, *, dp: int, sequence_parallel: bool) -> SharedState | None:
    """What ranks with the same stages share; ``None`` where they exchange nothing.

    With sequence parallelism tensor-parallel ranks add up the gradients of what each of them holds whole, whatever the
    data axis is, since each has those of its own tokens.

    Args:
        shard: what data-parallel ranks share, if there are several.
        dp: data-parallel ranks.
        sequence_parallel: whether tensor-parallel ranks split the tokens.
    """
    # Without replicas there is nothing to share out, whatever the setting.
    if dp > 1:
        return shard
    return "none" if sequence_parallel else None


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """What a configuration, the planner or a table chooses of a run's schedule.

    Attributes:
        choice: family and sizes.
        receive_buffers: receives posted ahead, for each directed edge.
        residency: stages gathered at once where weights are sharded at all times (``exchanges``).
        prefetch: visits of stages by which a gather starts early.
        gradient_buffers: stages whose unreduced gradients a rank has room for; ``None`` for all.
        device_budget: most bytes of stages on the device at once; ``None``: all are there. One rank only.
        needs_norm: whether an update needs the norm of the whole gradient (``place_of_updates``).
        moves: what leaves ranks between forward and backward.
        found: the family's schedule, where its order was searched for the seconds of a run; ``None`` as the family
            makes it.
        given: the schedule itself, if it is not made.
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


def run_recipe(knobs: Knobs, *, shard: SharedState | None, lends_tied: bool, sends: bool = True) -> Recipe:
    """The recipe of a training run.

    Args:
        knobs: what was chosen.
        shard: what ranks with the same stages share (``shared_state``); ``None``: they exchange nothing.
        lends_tied: see ``Recipe``.
        sends: whether messages between pipeline ranks have lanes.
    """
    choice, budget = knobs.choice, knobs.device_budget
    unshard, reduce_grad = None, None
    if shard is not None:
        unshard, reduce_grad = exchanges(
            shard, residency=knobs.residency, prefetch=knobs.prefetch, gradient_buffers=knobs.gradient_buffers
        )
    return Recipe(
        start=choice if knobs.found is None else knobs.found,
        receive_buffers=knobs.receive_buffers if sends else None,
        lends_tied=lends_tied,
        unshard=unshard,
        reduce_grad=reduce_grad,
        updates=None if budget is None else place_of_updates(choice.pp * choice.loops, needs_norm=knobs.needs_norm),
        residence=None if budget is None else Residence(budget),
        moves=knobs.moves,
        given=knobs.given,
    )


class Sizes(Protocol):
    """Bytes of a run's stages: closed forms, or counted on stages."""

    def kept(self, schedule: Schedule, /) -> KeptBytes:
        """What stages keep of micro-batches for their backwards."""
        ...

    def stages(self) -> Sequence[Amounts]:
        """For each stage the bytes of its weights, gradient and state."""
        ...


class PlacedBy(NamedTuple):
    """What moves are placed by.

    Attributes:
        seconds_of: seconds of every action.
        partners: for each rank the one that it evicts to; ``None``: those of the profile of what ranks hold.
    """

    seconds_of: SecondsOf
    partners: Sequence[int] | None = None


Timing = Callable[[Schedule, KeptBytes], PlacedBy]
"""Seconds by which moves are placed in a schedule, given what stages keep."""


def nominal(_schedule: Schedule, _kept: KeptBytes) -> PlacedBy:
    """A backward takes two forwards, and moving what a forward keeps takes one."""
    return PlacedBy(nominal_s)


def build(recipe: Recipe, sizes: Sizes | None = None, timing: Timing = nominal) -> Schedule:
    """The schedule that a recipe describes, verified.

    Args:
        recipe: what to build.
        sizes: bytes, for recipes with moves or with a residence in bytes; ``None``: each stage keeps 1 of each
            micro-batch.
        timing: seconds, for recipes with moves.

    Raises:
        UserError: the family cannot be made with these sizes, passes cannot be combined, a budget cannot be kept, or
            the schedule that is given does not fit.
    """
    schedule = _unmoved(recipe, sizes)
    if recipe.given is not None:
        # The run's own is made all the same: a file has to do the same work.
        return recipe.given.fitted(schedule, recipe_lines(recipe, schedule, sizes))
    if not recipe.moves.is_any:
        return schedule
    kept = KeptBytes() if sizes is None else sizes.kept(schedule)
    placed = timing(schedule, kept)
    return add_moves(schedule, recipe.moves, kept, seconds_of=placed.seconds_of, partners=placed.partners)


def schedule_text(recipe: Recipe, schedule: Schedule, sizes: Sizes | None = None) -> str:
    """A schedule that ``build`` returned as the text of a file, with what it promises and how it was made.

    Args:
        recipe: of which.
        schedule: that was built.
        sizes: with which.
    """
    if recipe.given is not None:
        return format_schedule(schedule, recipe.given.recipe)
    return format_schedule(schedule, recipe_lines(recipe, schedule, sizes))


def recipe_lines(recipe: Recipe, schedule: Schedule, sizes: Sizes | None = None) -> dict[str, str]:
    """How a schedule is made, by the names of settings; empty for one that does not begin with a family.

    Two recipes that make the same rows for the same seconds have the same lines.

    Args:
        recipe: of a run.
        schedule: that it makes; before anything moves in it, or after.
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
        "tied": "true" if recipe.lends_tied else None,
    }
    if recipe.unshard is not None:
        lines |= {"residency": recipe.unshard.residency or "all", "prefetch": recipe.unshard.prefetch}
    if recipe.reduce_grad is not None:
        lines["gradient_buffers"] = recipe.reduce_grad.gradient_buffers or "all"
    if residence is not None:
        lines |= {"updates": recipe.updates, "device_budget": residence.room}
    if moves.is_any:
        kept = KeptBytes() if sizes is None else sizes.kept(schedule)
        lines |= {name: "true" for name in ("balance", "offload") if getattr(moves, name)}
        lines["activation_budget"] = None if moves.budget_bytes is None else f"{moves.budget_bytes:.15g}"
        # A float holds 15 digits whatever they are; more would show how a sum was rounded.
        lines["kept_bytes"] = " ".join(f"{each:.15g}" for each in kept.by_stage(schedule.num_stages))
    return {name: str(value) for name, value in lines.items() if value is not None}


def _unmoved(recipe: Recipe, sizes: Sizes | None) -> Schedule:
    """The schedule with everything but what leaves ranks between forward and backward."""
    schedule, residence = communicating(recipe), recipe.residence
    trains = schedule.first_backward_stage < schedule.num_stages
    # A step that only evaluates has no gradient to update with.
    if recipe.updates is not None and trains:
        schedule = add_updates(schedule, recipe.updates)
    if residence is None:
        return schedule
    if not residence.is_bytes:
        return add_stage_swaps(schedule, residence.room)
    assert sizes is not None, "a room in bytes takes the bytes of stages"
    each = stage_sizes(sizes.stages())
    refuse_large(each, residence.room)
    return add_stage_swaps(schedule, residence.room, sizes=each)


def communicating(recipe: Recipe) -> Schedule:
    """The part of a recipe that takes neither bytes nor seconds; the last few of families are remembered.

    Raises:
        UserError: as ``build``.
    """
    if isinstance(recipe.start, Schedule):
        return add_data_parallel(_sending(recipe.start, recipe), recipe.unshard, recipe.reduce_grad)
    # What is added by bytes or seconds differs between runs that are otherwise alike, so it is not remembered.
    return _SCHEDULES.get(_without_bytes(recipe))


def without_messages(recipe: Recipe) -> Graph:
    """What ``communicating`` makes, without its messages: it takes no longer, and is made in a fraction of the time.

    Outputs are where they are needed as soon as they are computed. Nothing can run that, and nobody proves it.

    Raises:
        UserError: as ``build``.
    """
    # Recipes that differ only in messages are one here.
    bare = replace(_without_bytes(recipe), receive_buffers=None, lends_tied=False)
    return _GRAPHS.get(bare) if _exchanges(bare) else communicating(bare).graph


def _without_bytes(recipe: Recipe) -> Recipe:
    return replace(recipe, updates=None, residence=None, moves=Moves(), given=None)


def _exchanges(recipe: Recipe) -> bool:
    """Whether data-parallel ranks gather or reduce anything."""
    return recipe.unshard is not None or recipe.reduce_grad is not None


def _make(recipe: Recipe) -> Schedule:
    """What comes before is remembered for itself: recipes that differ in exchanges share their messages."""
    if isinstance(recipe.start, Schedule):
        return recipe.start
    if _exchanges(recipe):
        bare = communicating(replace(recipe, unshard=None, reduce_grad=None))
        return add_data_parallel(bare, recipe.unshard, recipe.reduce_grad)
    if recipe.receive_buffers is not None:
        return _sending(communicating(Recipe(start=recipe.start, receive_buffers=None)), recipe)
    return recipe.start.make()


def _sending(schedule: Schedule, recipe: Recipe) -> Schedule:
    """With messages between pipeline ranks, where they have a lane."""
    if recipe.receive_buffers is not None:
        schedule = lower(schedule, recipe.receive_buffers)
    return add_tied(schedule) if recipe.lends_tied else schedule


def _make_without_messages(recipe: Recipe) -> Graph:
    schedule = communicating(replace(recipe, unshard=None, reduce_grad=None))
    add = partial(row_with_exchanges, unshard=recipe.unshard, reduce_grad=recipe.reduce_grad)
    buffers = None if recipe.reduce_grad is None else recipe.reduce_grad.gradient_buffers
    rows = [add(row) for row in schedule.rows]
    return replace(schedule.facts, rows=rows, promises=Promises(gradient_buffers=buffers)).graph


_Made = TypeVar("_Made", Schedule, Graph)


class _Remembered(Generic[_Made]):
    """What was made last, as much as has a given number of actions together: layouts of a search share schedules.

    Args:
        make: from a recipe.
        most_actions: of all that is remembered.
    """

    def __init__(self, make: Callable[[Recipe], _Made], most_actions: int) -> None:
        self._make, self._most, self._actions = make, most_actions, 0
        self._known: OrderedDict[Recipe, _Made] = OrderedDict()

    def get(self, recipe: Recipe) -> _Made:
        known = self._known.get(recipe)
        if known is not None:
            self._known.move_to_end(recipe)
            return known
        made = self._make(recipe)
        self._known[recipe] = made
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
