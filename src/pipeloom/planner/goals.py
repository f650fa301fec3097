"""What a training takes, what it must not exceed, and what of it should be least: a choice among several answers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, Protocol, TypeVar

from pipeloom.errors import ConfigError
from pipeloom.planner.question import Question
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.words import leading_number

Objective = Literal["time", "cost"]
DAY_S = 86_400.0
AMOUNTS: Mapping[str, float] = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Letters behind an amount -> factor."""
TIMES: Mapping[str, float] = {"h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}
"""Letters behind a time -> seconds."""
SPANS: Mapping[str, float] = {"s": 1.0, "min": 60.0, **TIMES, "y": 365 * DAY_S}
"""The same for shorter and longer times."""


class Costed(Protocol):
    """Something that has the seconds, the dollars and the device-hours of a whole training."""

    @property
    def seconds(self) -> float:
        """Of the whole training."""
        ...

    @property
    def dollars(self) -> float | None:
        """Of the whole training; ``None`` without a price."""
        ...

    @property
    def device_hours(self) -> float:
        """Of the whole training: its hours times its devices."""
        ...


_Costed = TypeVar("_Costed", bound=Costed)


@dataclass(frozen=True)
class Cost:
    """Seconds, dollars and device-hours of a whole training; no dollars if a device has no price."""

    seconds: float
    dollars: float | None
    device_hours: float

    @property
    def days(self) -> float:
        """Of the whole training."""
        return self.seconds / DAY_S


@dataclass(frozen=True, kw_only=True)
class Training:
    """How many tokens a training needs.

    Attributes:
        tokens: needed with small batches.
        critical_batch: in sequences; a batch of this size needs twice the tokens (arXiv 1812.06162, section 2.2).
            ``None``: every batch needs the same tokens, as in a comparison at one batch.
    """

    tokens: float
    critical_batch: float | None = None

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            ConfigError: everything that is wrong.
        """
        tokens, batch, found = self.tokens, self.critical_batch, list[str]()
        if not (isfinite(tokens) and tokens >= 1):
            found.append(f"the token budget must be at least 1 and finite, found {tokens:g}")
        if batch is not None and not (isfinite(batch) and batch >= 1):
            found.append(f"the critical batch must be at least 1 sequence and finite, found {batch:.3g}")
        if found:
            raise ConfigError(found, "the training")

    def needed_tokens(self, global_batch: int) -> float:
        """Tokens with a global batch of B sequences: (1 + B / B_crit) times those of small batches."""
        return self.tokens * (1 + global_batch / (self.critical_batch or inf))

    def seconds(self, global_batch: int, tokens_per_s: float) -> float:
        """Seconds of the whole training."""
        return self.needed_tokens(global_batch) / tokens_per_s

    def cost(self, step: SimulatedStep) -> Cost:
        """Of the whole training with the steps of a layout."""
        devices = step.run.num_devices
        price = step.cluster.price_per_hour(devices)
        return self._cost(step.run.global_batch, step.tokens_per_s, devices, price)

    def least_cost(self, question: Question, least_s: float) -> Cost:
        """Of the whole training with steps of a lower bound of seconds."""
        devices, batch = question.num_devices, question.global_batch
        return self._cost(batch, batch * question.seq / least_s, devices, question.cluster.price_per_hour(devices))

    def _cost(self, global_batch: int, tokens_per_s: float, num_devices: int, price_per_hour: float | None) -> Cost:
        seconds = self.seconds(global_batch, tokens_per_s)
        dollars = None if price_per_hour is None else price_per_hour * seconds / 3600
        return Cost(seconds, dollars, seconds * num_devices / 3600)


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a training.

    Attributes:
        deadline_s: most seconds of the training.
        max_dollars: most dollars of it.
        objective: what is least among the answers within both limits; the cost of those without a price is that of
            their device-hours.
    """

    deadline_s: float = inf
    max_dollars: float = inf
    objective: Objective = "cost"

    @property
    def needs_price(self) -> bool:
        """Whether an answer without a price cannot be within the limits."""
        return self.max_dollars < inf

    def is_met(self, cost: Costed) -> bool:
        """Whether a training is within both limits."""
        return cost.seconds <= self.deadline_s and (self.max_dollars == inf or _dollars(cost) <= self.max_dollars)

    def best(self, among: Iterable[_Costed]) -> _Costed | None:
        """The best answer within the limits; of equal ones the first. ``None`` without one."""
        return min(filter(self.is_met, among), key=self._costs, default=None)

    def better(self, chosen: Costed | None, least: Iterable[_Costed]) -> list[_Costed]:
        """Of the least costs of layouts that were not searched, those that would replace the choice.

        Args:
            chosen: the best answer; ``None`` if none is within the limits.
            least: a lower bound for each search that was cut short.
        """
        return [one for one in least if self.best([one] if chosen is None else [chosen, one]) is one]

    def _costs(self, one: Costed) -> tuple[float, ...]:
        cost = (_dollars(one), one.device_hours)
        return (*cost, one.seconds) if self.objective == "cost" else (one.seconds, *cost)


def _dollars(cost: Costed) -> float:
    return inf if cost.dollars is None else cost.dollars


def amount(text: str, units: Mapping[str, float]) -> float | None:
    """A number above 0 with a letter of ``units``, such as ``1.5T``; ``None`` for any other text."""
    number, letter = leading_number(text.strip()) or (0.0, "")
    value = number * units.get(letter, 0.0)
    return value if value > 0 and isfinite(value) else None


def amount_or_note(
    flag: str, text: str | None, units: Mapping[str, float], such: str, problems: list[str]
) -> float | None:
    """The amount of a flag; ``None`` without it, or with a problem."""
    found = None if text is None else amount(text, units)
    if text is not None and found is None:
        problems.append(f"{flag} must be an amount above 0 such as {such}, found '{text}'")
    return found
