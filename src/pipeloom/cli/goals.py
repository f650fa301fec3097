"""Goals of a training as flags, and the choice that they make among several answers in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TypeVar

from pipeloom.cli.what_if import WhatIf
from pipeloom.cost.hardware import Cluster
from pipeloom.planner.error_bar import ErrorBar
from pipeloom.planner.goals import AMOUNTS, DAY_S, TIMES, Cost, Costed, Goal, Objective, Training, amount_or_note
from pipeloom.planner.plan import Plan
from pipeloom.terminal.words import in_days, in_dollars
from pipeloom.workload.limits import Common

_Costed = TypeVar("_Costed", bound=Costed)


@dataclass(frozen=True, kw_only=True)
class Goals(WhatIf):
    """Limits of a whole training, and what of it should be least."""

    deadline: Common[str | None] = None
    """Goal: longest training, such as 30d, 12h or 6w. None: no limit."""
    max_dollars: Common[str | None] = None
    """Goal: highest price of it, such as 200k or 1.5M. None: no limit."""
    objective: Common[Objective | None] = None
    """What is least within these limits. Without a price, cost is that of device-hours. None: time where only
    --max-dollars is given, else cost."""
    price: float | None = None
    """Dollars per device-hour. None: that of the cluster's file."""

    @property
    def has_goal(self) -> bool:
        """Whether one of the flags of a goal is given."""
        return not self.deadline is self.max_dollars is self.objective is None


def goal_of(flags: Goals, problems: list[str]) -> Goal | None:
    """The goal of the flags; ``None`` without one. Problems are added."""
    if not flags.has_goal:
        return None
    deadline = amount_or_note("--deadline", flags.deadline, TIMES, "30d, 12h or 6w", problems)
    dollars = amount_or_note("--max-dollars", flags.max_dollars, AMOUNTS, "200000, 200k or 1.5M", problems)
    is_for_time = flags.deadline is None and flags.max_dollars is not None
    objective = flags.objective or ("time" if is_for_time else "cost")
    return Goal(deadline_s=deadline or inf, max_dollars=dollars or inf, objective=objective)


def tokens_of(text: str | None, problems: list[str]) -> float | None:
    """The tokens of a training; ``None`` without the flag, or with a problem, which is added."""
    return amount_or_note("--tokens", text, AMOUNTS, "1T, 300B or 3e11", problems)


def priced(cluster: Cluster, num_devices: int, flags: Goals, goal: Goal | None, problems: list[str]) -> Cluster:
    """The cluster with the price of the flags. A price that is wrong or missing is added to the problems."""
    price = flags.price
    if price is None:
        if goal is not None and goal.needs_price and cluster.price_per_hour(num_devices) is None:
            problems.append(
                f"the cluster '{cluster.name}' has no price_per_device_hour, which the goal needs: set one in its "
                "file, or with --price"
            )
        return cluster
    if cluster.num_devices is not None:
        problems.append(
            f"--price {price:g} is that of one kind of node, and the cluster '{cluster.name}' has several; set "
            "price_per_device_hour of each in its file"
        )
    elif not (isfinite(price) and price > 0):
        problems.append(f"--price: the price of a device-hour must be above 0 and finite, found {price:g}")
    else:
        return replace(cluster, price_per_device_hour=price, price_source="--price")
    return cluster


def cost_words(cost: Costed) -> str:
    """Days and dollars, or device-hours without a price."""
    hours = f"{cost.device_hours:,.0f} device-hours"
    return f"{_days(cost.seconds)}, {hours if cost.dollars is None else in_dollars(cost.dollars)}"


def _days(seconds: float) -> str:
    days = in_days(seconds / DAY_S)
    return f"{days} {'day' if days == '1' else 'days'}"


def cost_cells(cost: Cost) -> dict[str, str]:
    """Title of a column -> days, and dollars or, without a price, device-hours; ``-`` for the other one."""
    return {
        "days": in_days(cost.days),
        "price": "-" if cost.dollars is None else in_dollars(cost.dollars),
        "device-hours": f"{cost.device_hours:,.0f}" if cost.dollars is None else "-",
    }


def training_words(training: Training, batch: int, cost: Cost, layout: str) -> str:
    """The days and the price of a training with a layout, whose name ``layout`` is."""
    price = "; the cluster's file has no price (--price)" if cost.dollars is None else ""
    tokens = f"{training.needed_tokens(batch):.4g} tokens"
    return f"{tokens} with {layout}: {cost_words(cost)}{price}; no margin for the expected error"


@dataclass(frozen=True)
class Least(Cost):
    """The least cost of layouts that were not searched.

    Attributes:
        among: whose layouts they are, behind the word "layouts"; empty where there is one plan.
    """

    among: str = ""


def least_costs(plan: Plan, training: Training, among: str = "") -> list[Least]:
    """The least cost of layouts that were not searched; empty if the search was complete."""
    if plan.open_bound_s is None:
        return []
    cost = training.least_cost(plan.question, plan.open_bound_s)
    return [Least(cost.seconds, cost.dollars, cost.device_hours, among)]


def choice_lines(
    goal: Goal,
    among: Sequence[_Costed],
    name: Callable[[_Costed], str],
    error_bar: Callable[[_Costed], ErrorBar],
    least: Sequence[Least] = (),
) -> list[str]:
    """The best answer within the limits of a goal, and what its error means; or what comes closest to each limit.

    Args:
        goal: that chooses.
        among: the answers, at least one.
        name: of an answer: devices, program, layout.
        error_bar: of an answer.
        least: of each search that was cut short.
    """
    limits = [f"within {_days(goal.deadline_s)}"] if goal.deadline_s < inf else []
    limits += [f"for at most {in_dollars(goal.max_dollars)}"] if goal.max_dollars < inf else []
    best = goal.best(among)
    better = _better_words(goal.better(best, least))
    if best is not None:
        has_hours = goal.objective == "cost" and best.dollars is None
        kind = "the training of the fewest device-hours" if has_hours else f"the {_LEAST[goal.objective]} training"
        what = " ".join([kind, *limits])
        return [f"{what}: {name(best)}: {cost_words(best)}", *better, _margin(goal, best, error_bar(best))]
    fast = min(among, key=lambda one: one.seconds)
    words = [f"nothing is {' and '.join(limits)}: the fastest training takes {cost_words(fast)} ({name(fast)})"]
    cheap = min(among, key=lambda one: inf if one.dollars is None else one.dollars)
    if goal.max_dollars < inf and cheap is not fast:
        words.append(f"the cheapest takes {cost_words(cheap)} ({name(cheap)})")
    return ["; ".join(words), *better, "Try other --devices, another batch, or wider limits."]


def _better_words(least: Sequence[Least]) -> list[str]:
    """That the choice may change with more time; nothing where none of these costs would be chosen."""
    each = [f"layouts{one.among} that take at least {cost_words(one)}" for one in least]
    return [f"the search was cut short; not searched, and perhaps a better choice: {'; '.join(each)}"] if each else []


_LEAST = {"time": "fastest", "cost": "cheapest"}


def _margin(goal: Goal, best: Costed, bar: ErrorBar) -> str:
    """What the mean error of step times does to days and dollars."""
    if bar.errors is None:
        return "its error is unknown: no prediction for these devices was compared with a measured step"
    error = bar.errors.mean_abs_error
    longer = 1 / (1 - error)  # errors are fractions of measured step times
    dollars = None if best.dollars is None else best.dollars * longer
    worse = Cost(best.seconds * longer, dollars, best.device_hours * longer)
    is_close = "" if goal.is_met(worse) else ", which is beyond the goal: leave a margin"
    measured = "their mean error, which may be larger for such layouts," if bar.unlike else "their mean error,"
    return f"predictions {error:.0%} too short, {measured} make it {cost_words(worse)}{is_close}"
