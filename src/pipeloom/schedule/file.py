"""A schedule from a file, and whether it is one of those that a run can execute."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from pipeloom.errors import ConfigError
from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Promises
from pipeloom.schedule.kinds import MOVE_KINDS, Kind, Scope
from pipeloom.schedule.row import Row
from pipeloom.schedule.schedule import Level, Schedule
from pipeloom.schedule.stage_swaps import defers_updates

PROMISES = tuple(field.name for field in fields(Promises))
"""Attributes of ``Schedule`` that are limits or partners, which a file contains in addition to the rows."""
_OWN = frozenset({"max_stage_inputs", "partners"})
"""Promises that depend on the order alone; no setting of a run decides them."""
MOVED_BY = {Kind.EVICT: "balance", Kind.OFFLOAD: "offload"}
"""Kind of an action that moves activations -> the setting of ``schedule`` that allows it."""


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule as a file has it.

    Attributes:
        schedule: verified.
        recipe: how it was made, by name (``pipeloom.recipe.recipe_lines``); empty if the file does not contain it.
        name: of the file, for messages.
    """

    schedule: Schedule
    recipe: Mapping[str, str]
    name: str = "the schedule file"

    def fitted(self, made: Schedule, recipe: Mapping[str, str]) -> Schedule:
        """The file's schedule, if it does the work of the run.

        A file with recipe lines must have the rows that the run would make; only moves of activations may have other
        places, since they depend on seconds. A file without them may have any order of the same work.

        Args:
            made: the run's own schedule, without moves of activations.
            recipe: its recipe, in the names of the file.

        Raises:
            ConfigError: it does not fit; with every setting and promise that differs, else with the first place.
        """
        problems = self._recipe_problems(recipe) if self.recipe else []
        problems += self._size_problems(made)
        problems = problems or self._promise_problems(made)
        if not problems:
            places = self._moves(recipe) if self.recipe else self._work(made, recipe)
            # The first place only: one moved action shifts all behind it.
            problems += [problem for problem, _ in zip(places, [None], strict=False)]
        if not problems and self.recipe:
            problems += self._row_problems(made)
        if problems:
            raise self.misfit(problems)
        # Rows of one rank have no messages at either level.
        return self.schedule if self.schedule.level is made.level else replace(self.schedule, level=made.level)

    def misfit(self, problems: Sequence[str]) -> ConfigError:
        """The error of a file that does not fit a run."""
        return ConfigError(problems, f"{self.name}, which does not fit the run,")

    def _recipe_problems(self, recipe: Mapping[str, str]) -> list[str]:
        return [
            _differs(name, self.recipe.get(name), recipe.get(name))
            for name in {**recipe, **self.recipe}
            if self.recipe.get(name) != recipe.get(name)
        ]

    def _size_problems(self, made: Schedule) -> list[str]:
        own = self.schedule
        pairs = {
            "pipeline ranks": (own.num_ranks, made.num_ranks),
            "stages": (own.num_stages, made.num_stages),
            "micro-batches": (own.num_microbatches, made.num_microbatches),
            "token slices": (own.num_slices, made.num_slices),
            "stages without backward": (own.first_backward_stage, made.first_backward_stage),
        }
        problems = [_differs(name, found, wanted) for name, (found, wanted) in pairs.items() if found != wanted]
        if not problems and own.placement != made.placement:
            found, wanted = own.placement.rank_by_stage, made.placement.rank_by_stage
            problems = [_differs("the rank of each stage", _text(found), _text(wanted))]
        lacks_messages = own.level is Level.COMPUTE and made.level is not Level.COMPUTE
        if lacks_messages and any(map(own.placement.crosses, range(own.num_stages))):
            problems.append(
                "its rows have no messages between ranks; `pipeloom schedule FILE --communication --format text` "
                "prints them with messages"
            )
        return problems

    def _promise_problems(self, made: Schedule) -> list[str]:
        pairs = {name: (getattr(self.schedule, name), getattr(made, name)) for name in PROMISES if name not in _OWN}
        return [_differs(name, _text(one), _text(other)) for name, (one, other) in pairs.items() if one != other]

    def _moves(self, recipe: Mapping[str, str]) -> Iterator[str]:
        """Moves that the run does not allow, or that have no partner."""
        for rank, slot, action in self.schedule.actions():
            setting = MOVED_BY.get(action.kind)
            if setting is not None and setting not in recipe:
                yield f"rank {rank}, slot {slot}: {action}, but the run has no schedule.{setting}"
            elif action.kind is Kind.EVICT and self.schedule.partners is None:
                yield f"rank {rank}, slot {slot}: {action}, but the file has no line `partners`"

    def _work(self, made: Schedule, recipe: Mapping[str, str]) -> Iterator[str]:
        """Places at which a file of any order differs from the run in actions on whole stages."""
        yield from self._moves(recipe)
        for rank, (own, other) in enumerate(zip(self.schedule.rows, made.rows, strict=True)):
            found, wanted = _stage_work(own), _stage_work(other)
            for action in [one for one in found if one not in wanted]:
                yield f"rank {rank}, slot {found[action]}: {action}, which the run does not have"
            for action in [one for one in wanted if one not in found]:
                yield f"rank {rank}: {action} is missing, which the run has"
            if defers_updates(own) != defers_updates(other):
                yield f"rank {rank}: updates belong to another step than those of the run"

    def _row_problems(self, made: Schedule) -> list[str]:
        """The first place at which the rows differ from those that the run makes."""
        for rank, (own, wanted) in enumerate(zip(self.schedule.rows, made.rows, strict=True)):
            slots = np.flatnonzero(~own.is_kind(*MOVE_KINDS))
            found = own.take(slots)
            if found == wanted:
                continue
            same = min(len(found), len(wanted))
            pairs = zip(found.arrays, wanted.arrays, strict=True)
            is_other = np.any([mine[:same] != theirs[:same] for mine, theirs in pairs], axis=0)
            first = int(is_other.argmax()) if is_other.any() else same
            slot = int(slots[first]) if first < len(slots) else len(own)
            return [f"rank {rank}, slot {slot}: {_at(found, first)}, where the run has {_at(wanted, first)}"]
        return []


def _stage_work(row: Row) -> dict[Action, int]:
    """Actions on whole stages, each with its first slot; the rules check all other actions."""
    found: dict[Action, int] = {}
    for slot, action in enumerate(row):
        if action.kind.scope is Scope.STAGE:
            found.setdefault(action, slot)
    return found


def _at(row: Row, slot: int) -> str:
    return str(row[slot]) if slot < len(row) else "the end of the row"


def _text(value: object) -> str | None:
    return " ".join(map(str, value)) if isinstance(value, tuple) else None if value is None else str(value)


def _differs(name: str, found: object, wanted: object) -> str:
    return f"{name}: {_or_nothing(found)} in the file, {_or_nothing(wanted)} in the run{_FOLLOWS.get(name, '')}"


_FOLLOWS = {
    "kept_bytes": "; they follow from training.dtype, layout.recompute, and the sizes of the model and the micro-batch"
}
"""What differs -> the settings that a user changes, where it has another name than these."""


def _or_nothing(value: object) -> str:
    return "nothing" if value is None else str(value)
