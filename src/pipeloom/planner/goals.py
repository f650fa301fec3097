"""What a training must not exceed, and what of it should be least: the choice among the points of a tradeoff."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal

from pipeloom.planner.tradeoff import DAY_S, Point
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.words import leading_number

Objective = Literal["time", "cost"]
AMOUNTS: Mapping[str, float] = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Letters behind an amount -> factor."""
TIMES: Mapping[str, float] = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
"""Letters behind a time -> seconds."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a training.

    Attributes:
        deadline_s: most seconds of the training.
        max_dollars: most dollars of it.
        objective: what is least among the points within both limits.
    """

    deadline_s: float = inf
    max_dollars: float = inf
    objective: Objective = "cost"

    def best(self, points: Iterable[Point]) -> Point | None:
        """The best point within the limits; of equal ones the first. ``None`` without one."""
        within = [one for one in points if one.seconds <= self.deadline_s and one.dollars <= self.max_dollars]
        return min(within, key=self._costs, default=None)

    def _costs(self, point: Point) -> tuple[float, float]:
        both = (point.dollars, point.seconds)
        return both if self.objective == "cost" else both[::-1]


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """A number above 0 with a letter of ``units``, such as ``1.5T``; ``None`` for any other text."""
    number, letter = leading_number(text.strip()) or (0.0, "")
    value = number * units.get(letter, 0.0)
    return value if value > 0 and isfinite(value) else None


def training_of(step: SimulatedStep, tokens: float) -> tuple[float, float | None]:
    """Days of a training of so many tokens with the steps of a layout, and its dollars; ``None`` without a price."""
    each = step.dollars_per_billion_tokens
    return tokens / step.tokens_per_s / DAY_S, None if each is None else each * tokens / 1e9


def amount_or_note(
    flag: str, text: str | None, units: Mapping[str, float], such: str, problems: list[str]
) -> float | None:
    """The amount of a flag; ``None`` without it, or with a problem."""
    found = None if text is None else amount(text, units)
    if text is not None and found is None:
        problems.append(f"{flag} must be an amount above 0 such as {such}, found '{text}'")
    return found
