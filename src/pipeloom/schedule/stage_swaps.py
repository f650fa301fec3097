"""Contents and sizes of stages that are swapped between host and device, and what each swap of a row moves.

Used by the pass (``lower_stage_swaps``), the rules (``rules.stages``), the dependency relation (``facts``), the
simulator, the report and the executor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, COMPUTE_KINDS, KINDS, USES_STAGE, Kind
from pipeloom.schedule.row import Ints, Row
from pipeloom.terminal.words import format_bytes


class Content(Flag):
    """Contents of a stage."""

    WEIGHTS = auto()
    """Weights for compute."""
    GRADIENT = auto()
    """The sum of its backwards since the last update."""
    STATE = auto()
    """Optimizer state: moments, and float32 weights where a stage computes in a narrower type."""
    BORROWED = auto()
    """A tied matrix that belongs to another stage."""
    LENT_GRADIENT = auto()
    """The gradient of that matrix."""


NOTHING = Content(0)
_PARTS = tuple((part.value, part.name.lower()) for part in Content if part.name is not None)


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """How much there is of each content of one stage: bytes, or the seconds that they take.

    Attributes:
        weights, gradient, state, borrowed, lent_gradient: of the content of that name.
    """

    weights: float = 0
    gradient: float = 0
    state: float = 0
    borrowed: float = 0
    lent_gradient: float = 0

    def of(self, content: Content) -> float:
        """Of some contents together."""
        wanted = content.value
        return sum(getattr(self, name) for bit, name in _PARTS if bit & wanted)

    @property
    def total(self) -> float:
        """Of everything."""
        return self.of(~NOTHING)

    def times(self, factor: float) -> "Amounts":
        """Each of them by a factor, such as seconds for each byte."""
        return Amounts(**{name: value * factor for name, value in vars(self).items()})


NONE = Amounts()
"""Of a stage that is nothing."""


def stage_sizes(amounts: Sequence[Amounts]) -> tuple[int, ...]:
    """For each stage the bytes that it takes on the device at most.

    The first stage takes in the gradient that a head collects for its matrix, which is on the device meanwhile.

    Args:
        amounts: of each stage, in bytes.
    """
    # Of a tied model the last stage's gradient for the matrix is added to the first stage's while both are there.
    first, *others = (int(one.total) for one in amounts)
    return first + int(amounts[-1].lent_gradient), *others


def refuse_large(sizes: Sequence[int], budget: int, *, trains: bool = True) -> None:
    """Refuse stages that do not fit the device, or of which nothing is swapped.

    Args:
        sizes: of each stage, in bytes.
        budget: of the device.
        trains: whether stages have more than weights.

    Raises:
        UserError: names all of them, and what to change.
    """
    nothing = [str(stage) for stage, size in enumerate(sizes) if size == 0]
    if nothing:
        raise UserError(
            f"the device budget swaps the experts of every stage, and these stages have none: {', '.join(nothing)}; "
            "use fewer loops, or a partition with experts in each stage"
        )
    large = [f"stage {stage} takes {format_bytes(size)}" for stage, size in enumerate(sizes) if size > budget]
    if large:
        least = max(map(sum, pairwise(sizes)), default=max(sizes))
        contents = " with weights, gradient and optimizer state" if trains else ""
        raise UserError(
            f"the device budget is {format_bytes(budget)}, but {', '.join(large)}{contents}; "
            "use more loops, a partition with smaller stages there, or a device budget of at "
            f"least {format_bytes(least, rounds_up=True)}, so that each stage is brought while the one before computes"
        )


def swaps_rest(row: Row) -> bool:
    """Whether a row gathers stages, so that it swaps the rest of them, such as experts that no other rank has."""
    return bool(row.is_kind(Kind.UNSHARD).any())


def swap_uses(row: Row) -> frozenset[Kind]:
    """Kinds of actions for which a row's swapped stages must be on the device.

    Where stages are gathered, a reduction is of what is gathered, and not of the rest.
    """
    return USES_STAGE - {Kind.REDUCE_GRAD} if swaps_rest(row) else USES_STAGE


class StageStay(NamedTuple):
    """A stage on the device, from a ``SWAP_IN`` to its ``SWAP_OUT``.

    What a stage holds there, and what moves, follows from what the row does with it in between: a forward needs the
    weights alone; the first backward begins the gradient, which need not be brought; an update uses the gradient up, of
    this step or of the one before, and changes weights and state. What has not changed is dropped instead of moved out.

    Attributes:
        stage: which.
        first: slot of the ``SWAP_IN``.
        last: slot of the ``SWAP_OUT``.
        held: what it holds in between.
        brought: what the ``SWAP_IN`` moves.
        taken: what the ``SWAP_OUT`` moves.
    """

    stage: int
    first: int
    last: int
    held: Content
    brought: Content
    taken: Content


def stage_stays(row: Row) -> list[StageStay]:
    """The stays of a rank's stages on the device, in the order in which they end."""
    since: dict[int, int] = {}
    done: dict[int, list[Kind]] = {}
    has_gradient: set[int] = set()
    stays: list[StageStay] = []
    kinds = (*swap_uses(row), Kind.SWAP_IN, Kind.SWAP_OUT)
    for slot in np.flatnonzero(row.is_kind(*kinds)).tolist():
        kind, stage = KINDS[row.kind[slot]], int(row.stage[slot])
        if kind is Kind.SWAP_IN:
            since[stage] = slot
            done[stage] = []
        elif kind is not Kind.SWAP_OUT:
            done.setdefault(stage, []).append(kind)
        elif stage in since:
            stays.append(_stay(stage, (since[stage], slot), done[stage], had_gradient=stage in has_gradient))
            if Content.LENT_GRADIENT in stays[-1].held:
                has_gradient.add(stage)
    return stays


def _stay(stage: int, slots: tuple[int, int], kinds: Sequence[Kind], *, had_gradient: bool) -> StageStay:
    adds, updates = not ADDS_TO_GRADIENT.isdisjoint(kinds), Kind.UPDATE in kinds
    pays = updates and not had_gradient and ADDS_TO_GRADIENT.isdisjoint(kinds[: kinds.index(Kind.UPDATE)])
    held = brought = Content.WEIGHTS if updates and len(kinds) == 1 else Content.WEIGHTS | Content.BORROWED
    taken = NOTHING
    if adds or updates or Kind.REDUCE_GRAD in kinds:
        held |= Content.GRADIENT
        brought |= Content.GRADIENT if had_gradient or pays else NOTHING
        is_used_up = updates and not (pays and adds)
        taken |= NOTHING if is_used_up else Content.GRADIENT
    if adds:
        held |= Content.LENT_GRADIENT
        brought |= Content.LENT_GRADIENT if had_gradient else NOTHING
        taken |= Content.LENT_GRADIENT
    if updates:
        held |= Content.STATE
        brought |= Content.STATE
        taken |= Content.WEIGHTS | Content.STATE
    return StageStay(stage, *slots, held, brought, taken)


def defers_updates(row: Row) -> bool:
    """Whether the updates of a row are those that the step before owes: before the first use of their stages."""
    updates = np.flatnonzero(row.is_kind(Kind.UPDATE))
    if not updates.size:
        return False
    stage = row.stage[updates[0]]
    return not (row.is_kind(*COMPUTE_KINDS) & (row.stage == stage))[: updates[0]].any()


def gradient_rooms(row: Row) -> dict[int, int] | None:
    """The number of the buffer of each stage's gradient, where a row updates stages when their gradients are complete.

    A gradient takes a buffer from its first backward to its update. Of stages in one buffer no two have a gradient at
    the same time, and there are as few buffers as possible: so if each is as large as the largest of its stages, all
    ``n`` buffers together are at most as large as the ``n`` largest stages.

    Returns:
        Stage -> number; ``None`` for a row without updates, or with those of the step before.
    """
    updates, begins = (_first_slots(row, *kinds) for kinds in ((Kind.UPDATE,), ADDS_TO_GRADIENT))
    if not updates or defers_updates(row):
        return None
    free_at: list[int] = []  # slot of the update that frees a buffer
    rooms: dict[int, int] = {}
    for stage, begin in begins.items():
        number = next((number for number, slot in enumerate(free_at) if slot < begin), len(free_at))
        free_at[number : number + 1] = [updates[stage]]
        rooms[stage] = number
    return rooms


def gradient_room(rooms: Mapping[int, int], sizes: Sequence[float]) -> float:
    """Size of all buffers of ``gradient_rooms``, from the size of each stage's gradient; 0 without any."""
    return sum(max(sizes[stage] for stage, own in rooms.items() if own == number) for number in set(rooms.values()))


def _first_slots(row: Row, *kinds: Kind) -> dict[int, int]:
    """Stage -> slot of its first action of some kinds, in the order of the row."""
    slots = np.flatnonzero(row.is_kind(*kinds))
    stages, firsts = np.unique(row.stage[slots], return_index=True)
    by_slot = np.argsort(firsts)
    return dict(zip(stages[by_slot].tolist(), slots[firsts[by_slot]].tolist(), strict=True))


def stage_moves(row: Row) -> dict[int, Content]:
    """Slot of each ``SWAP_IN`` and ``SWAP_OUT`` -> what it moves."""
    stays = stage_stays(row)
    return {stay.first: stay.brought for stay in stays} | {stay.last: stay.taken for stay in stays}


def swap_waits(row: Row, max_resident: int | None, sizes: Sequence[int] | None) -> Ints:
    """For each slot of a row those that it waits for on account of stages that are swapped or updated; -1 for none.

    - What uses a stage waits for the ``SWAP_IN`` before it.
    - A ``SWAP_IN`` waits for the stage's ``SWAP_OUT`` before it, and for that which frees its room. Swaps out end in
      the order of the row, so the later of the two is enough.
    - An update, and the ``SWAP_OUT`` of a whole stage, wait for what communicated about its gradient before them.

    Returns:
        [slots, 2].
    """
    waits = np.full((len(row), 2), -1, np.int32)
    for slot, needed in _room_waits(row, max_resident, sizes):
        waits[slot, 0] = needed
    uses_of = swap_uses(row)
    for slot, needed in _gradient_waits(row):
        waits[slot, 1] = needed
    for stage in np.unique(row.stage[row.is_kind(Kind.SWAP_IN)]).tolist():
        mine = row.stage == stage
        brought = np.flatnonzero(mine & row.is_kind(Kind.SWAP_IN))
        uses = np.flatnonzero(mine & row.is_kind(*uses_of))
        number = np.searchsorted(brought, uses) - 1
        waits[uses[number >= 0], 0] = brought[number[number >= 0]]
    return waits


def _room_waits(row: Row, max_resident: int | None, sizes: Sequence[int] | None) -> list[tuple[int, int]]:
    """(slot of a ``SWAP_IN``, slot of the ``SWAP_OUT`` that has to end first)."""
    found: list[tuple[int, int]] = []
    outs: list[int] = []
    last_out: dict[int, int] = {}  # stage -> number of its last swap out
    taken = num_ended = 0
    for slot in np.flatnonzero(row.is_kind(Kind.SWAP_IN, Kind.SWAP_OUT)).tolist():
        stage = int(row.stage[slot])
        if row.kind[slot] == Kind.SWAP_OUT.code:
            last_out[stage] = len(outs)
            outs.append(slot)
            continue
        size = 1 if sizes is None else sizes[stage]
        while max_resident is not None and taken + size > max_resident and num_ended < len(outs):
            gone = int(row.stage[outs[num_ended]])
            taken -= 1 if sizes is None else sizes[gone]
            num_ended += 1
        taken += size
        # Swaps out end in the order of the row, so waiting for the later of the two is waiting for both.
        number = max(num_ended - 1, last_out.get(stage, -1))
        if number >= 0:
            found.append((slot, outs[number]))
    return found


def _gradient_waits(row: Row) -> list[tuple[int, int]]:
    """(slot of an update or a swap out, slot of the last communication about the stage's gradient before it)."""
    found: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    waiting = (Kind.UPDATE,) if swaps_rest(row) else (Kind.UPDATE, Kind.SWAP_OUT)
    kinds = (Kind.REDUCE_GRAD, Kind.RECV_TIED_GRAD, *waiting)
    for slot in np.flatnonzero(row.is_kind(*kinds)).tolist():
        stage = int(row.stage[slot])
        if KINDS[row.kind[slot]] in (Kind.REDUCE_GRAD, Kind.RECV_TIED_GRAD):
            last[stage] = slot
        elif stage in last:
            found.append((slot, last[stage]))
    return found
