"""Passes of data parallelism: gathers and releases of sharded weights, reductions of gradients. Each row by itself."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, USES_WEIGHTS, Kind
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.sharding import Stay, arrivals, fewest_stays

SharedState = Literal["none", "optimizer", "gradients", "full"]
"""What data-parallel ranks shard: nothing, optimizer state (ZeRO-1), also gradients (ZeRO-2), also weights (ZeRO-3)."""


@dataclass(frozen=True)
class Unshard:
    """Gathers of sharded weights; see ``add_unshard``.

    Attributes:
        residency: most stages of a rank that are gathered at the same time; ``None``: each is gathered once a step.
        prefetch: number of visits by which a gather starts early.
    """

    residency: int | None
    prefetch: int


@dataclass(frozen=True)
class ReduceGrad:
    """Reductions of gradients; see ``add_reduce_grad``.

    Attributes:
        gradient_buffers: stages whose unreduced gradients a rank has room for; ``None`` for all.
    """

    gradient_buffers: int | None


@checked
def exchanges(
    shard: SharedState, *, residency: int, prefetch: int, gradient_buffers: int | None
) -> tuple[Unshard | None, ReduceGrad]:
    """Gathers and reductions of a level of sharding.

    Args:
        shard: the level.
        residency: most stages gathered at the same time; only for ``"full"``.
        prefetch: see ``Unshard``.
        gradient_buffers: see ``ReduceGrad``; only where gradients are sharded.
    """
    unshard = None if shard == "none" else Unshard(residency if shard == "full" else None, prefetch)
    return unshard, ReduceGrad(gradient_buffers if shard in ("gradients", "full") else None)


@checked
def add_data_parallel(schedule: Schedule, unshard: Unshard | None, reduce_grad: ReduceGrad | None) -> Schedule:
    """Add gathers, and then reductions, which follow the gathers at the same place; ``None`` for neither.

    Raises:
        UserError: as ``add_unshard`` and ``add_reduce_grad``.
    """
    promises: dict[str, int | None] = {}
    if unshard is not None:
        _refuse_gathers(schedule, unshard)
        promises["max_gathered"] = unshard.residency
    if reduce_grad is not None and _has_reductions(schedule, reduce_grad):
        reduce_grad = None
    if reduce_grad is not None:
        promises["gradient_buffers"] = reduce_grad.gradient_buffers
    if not promises:
        return schedule
    # Together: each new schedule is verified, which takes longer than making its rows.
    rows = [row_with_exchanges(row, unshard, reduce_grad) for row in schedule.rows]
    return schedule.with_rows(rows, Level.COMMUNICATION, **promises)


def _refuse_gathers(schedule: Schedule, unshard: Unshard) -> None:
    """Check that gathers can be added."""
    if unshard.residency is not None and unshard.residency < 1:
        raise UserError(f"residency must be at least 1, found {unshard.residency}")
    if unshard.prefetch < 0:
        raise UserError(f"prefetch must be at least 0, found {unshard.prefetch}")
    if schedule.facts.has(Kind.UNSHARD, Kind.RESHARD):
        raise UserError("the schedule gathers weights already; start from one without UNSHARD and RESHARD")


def _has_reductions(schedule: Schedule, reduce_grad: ReduceGrad) -> bool:
    """Whether a schedule has reductions, which it keeps; an error if they are to be limited."""
    buffers = reduce_grad.gradient_buffers
    if buffers is not None and buffers < 1:
        raise UserError(f"gradient_buffers must be at least 1, found {buffers}")
    if schedule.facts.has(Kind.REDUCE_GRAD):
        if buffers is not None:
            raise UserError("the schedule reduces gradients already; start from one without REDUCE_GRAD")
        return True
    return False


def row_with_exchanges(row: Row, unshard: Unshard | None, reduce_grad: ReduceGrad | None) -> Row:
    """A rank's row with gathers and reductions, whether it has its other communication or not."""
    if unshard is not None:
        row = _with_gathers(row, unshard.residency, unshard.prefetch)
    return row if reduce_grad is None else _with_reductions(row, reduce_grad.gradient_buffers)


@checked
def add_unshard(schedule: Schedule, residency: int | None, prefetch: int) -> Schedule:
    """Gather each stage's weights for its visits and release them in between, with the fewest gathers.

    A *visit* is a run of consecutive actions of a rank that use one stage's weights. The weight gradient of a split
    backward does not use them, so it neither makes nor ends a visit. A gather starts as soon as ``residency`` allows,
    at most ``prefetch`` visits early. When a place is needed, the stage whose next visit is furthest ahead is released
    after its latest visit (Belady), every stage after its last visit of the step. Gathers have the order of their
    visits.

    Run it before ``add_reduce_grad``, which places each reduction with regard to the gathers; a reduction that exists
    already follows the gathers at the same place.

    Args:
        schedule: with all communication but gathers.
        residency: most stages of a rank that are gathered at the same time, those in transfer included; at least 1.
            ``None``: every stage is gathered once, for its first visit, and kept, as for a sharded optimizer state.
        prefetch: number of visits by which a gather may start early; 0: at the end of the visit before its own.

    Raises:
        UserError: ``residency`` or ``prefetch`` is too small, or stages are gathered already.
    """
    return add_data_parallel(schedule, Unshard(residency, prefetch), None)


def _with_gathers(row: Row, residency: int | None, prefetch: int) -> Row:
    firsts, lasts = visits(row, USES_WEIGHTS)
    stages = row.stage[firsts].tolist()
    places, stays = len(stages) if residency is None else residency, _stays(stages, residency)
    before = [-1, *lasts.tolist()]  # for each visit the slot before it
    added: list[tuple[int, int, Action]] = []  # (slot that it follows, order among equal slots: drops first, action)
    for stay, visit in zip(stays, arrivals(stays, stages, places, prefetch), strict=True):
        added.append((before[visit], 1, Action(Kind.UNSHARD, stages[stay.first])))
        if residency is not None:
            added.append((before[stay.last + 1], 0, Action(Kind.RESHARD, stages[stay.last])))
    return row.with_actions(added)


def _stays(stages: Sequence[int], places: int | None) -> list[Stay]:
    """``fewest_stays``; ``None`` for places for all."""
    return fewest_stays(stages, max(1, len(stages)) if places is None else places)


def num_exchanges(row: Row, residency: int | None, gradient_buffers: int | None) -> tuple[Counter[int], Counter[int]]:
    """By stage how often ``row_with_exchanges`` gathers its weights, and how often it reduces its gradient."""
    # Further actions of a visit need no other place.
    uses = [row.stage[visits(row, kinds)[0]].tolist() for kinds in (USES_WEIGHTS, ADDS_TO_GRADIENT)]
    gathers, reductions = (
        Counter(stages[stay.first] for stay in _stays(stages, places))
        for stages, places in zip(uses, (residency, gradient_buffers), strict=True)
    )
    return gathers, reductions


def visits(row: Row, kinds: Collection[Kind]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First and last slots of the runs of actions of some kinds on one stage."""
    uses = np.flatnonzero(row.is_kind(*kinds))
    is_first = np.diff(row.stage[uses], prepend=-1) != 0
    return uses[is_first], uses[np.append(is_first[1:], True)[: len(uses)]]


@checked
def add_reduce_grad(schedule: Schedule, gradient_buffers: int | None = None) -> Schedule:
    """Add gradient reductions, the fewest that ``gradient_buffers`` allows; a schedule with reductions keeps them.

    With a buffer for every stage there is one reduction for each stage that trains, right after the last action that
    adds to its gradient. With fewer, the stage whose next backward is furthest ahead is reduced when its buffer is
    needed, right after its latest backward; its later backwards are reduced again. The first backward that needs a
    buffer waits for the reduction that frees it (``facts.Graph``).

    A reduction follows gathers at the same place of the row that are needed before its buffer is.

    Args:
        schedule: with its other communication.
        gradient_buffers: most stages of a rank with unreduced gradients, those in reduction included; at least 1.
            ``None``: all.

    Raises:
        UserError: ``gradient_buffers`` is below 1, or the schedule has reductions already and they are to be limited.
    """
    return add_data_parallel(schedule, None, ReduceGrad(gradient_buffers))


def _with_reductions(row: Row, gradient_buffers: int | None) -> Row:
    slots = np.flatnonzero(row.is_kind(*ADDS_TO_GRADIENT)).tolist()
    stages = row.stage[slots].tolist()
    stays = _stays(stages, gradient_buffers)
    begins = [slots[stay.first] for stay in stays]
    buffers = len(stays) if gradient_buffers is None else gradient_buffers
    added: list[tuple[int, int, Action]] = []
    for number, last in enumerate(sorted(stay.last for stay in stays)):
        needed_at = begins[number + buffers] if number + buffers < len(begins) else len(row)
        added.append((_behind_gathers(row, slots[last], needed_at), 0, Action(Kind.REDUCE_GRAD, stages[last])))
    return row.with_actions(added)


_GATHERS = Kind.UNSHARD.code, Kind.RESHARD.code


def _behind_gathers(row: Row, slot: int, needed_at: int) -> int:
    """The last slot of the releases and gathers right behind ``slot`` that are needed before ``needed_at``."""
    while slot + 1 < len(row) and row.kind[slot + 1] in _GATHERS:
        if row.kind[slot + 1] == _GATHERS[0] and _next_compute(row, slot + 1) > needed_at:
            break
        slot += 1
    return slot


def _next_compute(row: Row, slot: int) -> int:
    """The slot of the next action that computes on the same stage's weights."""
    rest = row[slot:]
    return slot + int((rest.is_kind(*USES_WEIGHTS) & (rest.stage == rest.stage[0])).argmax())
