"""What failures of nodes leave of a training: its goodput, and how often to write checkpoints.

Time is divided between checkpoints, so a walk over failures takes a step for each event and none for each checkpoint.
"""

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from math import exp, inf
from typing import NamedTuple


class Event(NamedTuple):
    """A node fails or returns.

    Attributes:
        time_s: since the start.
        node: its number, from 0.
        is_up: whether it returns.
    """

    time_s: float
    node: int
    is_up: bool


@dataclass(frozen=True, kw_only=True)
class Stops:
    """Seconds without progress.

    Attributes:
        checkpoint_s: that steps wait for a checkpoint.
        restart_s: from a failure, or from the end of the last step before another layout, to the next step.
        interval_s: of progress between two checkpoints.
    """

    checkpoint_s: float
    restart_s: float
    interval_s: float


@dataclass
class Goodput:
    """Where the time of a training went, in seconds; all parts together are the time itself.

    Attributes:
        useful_s: the time in which the fastest layout on the whole cluster makes the same progress.
        slower_s: lost because steps took longer than with the fastest layout on the whole cluster.
        checkpoints_s: steps waited for a checkpoint.
        repeated_s: of steps after the last checkpoint before a failure, which were done again.
        restarts_s: between a failure and the next step.
        waiting_s: too few nodes for any layout.
        num_failures: of nodes in use.
    """

    useful_s: float = 0.0
    slower_s: float = 0.0
    checkpoints_s: float = 0.0
    repeated_s: float = 0.0
    restarts_s: float = 0.0
    waiting_s: float = 0.0
    num_failures: int = 0

    @property
    def total_s(self) -> float:
        """All of the time."""
        return sum(astuple(self)) - self.num_failures

    @property
    def shares(self) -> dict[str, float]:
        """Name of each part without its unit -> fraction of the time; ``useful`` is the goodput."""
        return {
            item.name.removesuffix("_s"): getattr(self, item.name) / self.total_s
            for item in fields(self)
            if item.name.endswith("_s")
        }


def best_interval_s(mtbf_s: float, checkpoint_s: float) -> float:
    """Seconds of progress between checkpoints with the highest goodput.

    With failures that are independent of the past, every m seconds in the mean, an interval t and its checkpoint c take
    m exp(r / m) (exp((t + c) / m) - 1) seconds in the mean, r of which is a restart (Daly 2006, doi
    10.1016/j.future.2004.11.016). This time for each second of progress is least where
    1 - t / m = exp(-(t + c) / m), whatever a restart takes.

    Args:
        mtbf_s: mean time between failures of the whole job.
        checkpoint_s: that steps wait for a checkpoint; with 0 there is no best interval, and 0 is returned.
    """
    if checkpoint_s <= 0:
        return 0.0
    low, high = 0.0, mtbf_s
    # The left side falls below the right one exactly once between 0 and the mean time; halving ends at equal floats.
    while (middle := (low + high) / 2) not in (low, high):
        is_short = 1 - middle / mtbf_s > exp(-(middle + checkpoint_s) / mtbf_s)
        low, high = (middle, high) if is_short else (low, middle)
    return middle


def random_events(num_nodes: int, mtbf_s: float, repair_s: float, span_s: float, seed: int = 0) -> list[Event]:
    """Failures and returns of nodes that fail independently, with exponential times until failure and repair.

    Args:
        num_nodes: all up at the start.
        mtbf_s: mean time until a node that is up fails.
        repair_s: mean time until it returns.
        span_s: events up to this time.
        seed: equal seeds have equal events.
    """
    draw, events = random.Random(seed), list[Event]()
    for node in range(num_nodes):
        time_s, is_up = 0.0, True
        while True:
            time_s += draw.expovariate(1 / (mtbf_s if is_up else repair_s)) if mtbf_s < inf else inf
            if time_s > span_s:
                break
            is_up = not is_up
            events.append(Event(time_s, node, is_up))
    return sorted(events)


def numbers_up(events: Iterable[Event], num_nodes: int) -> set[int]:
    """The numbers of nodes that are up at some time.

    Args:
        events: by time.
        num_nodes: up at the start.
    """
    return set(accumulate((1 if event.is_up else -1 for event in events), initial=num_nodes))


def walk(
    events: Iterable[Event],
    num_nodes: int,
    nodes_used: Callable[[int], tuple[int, float]],
    stops: Stops,
    span_s: float,
    *,
    mtbf_s: float = inf,
) -> Goodput:
    """The goodput of a training over failures of nodes.

    A failure of a node in use ends the steps since the last checkpoint, and the next layout starts after a restart. A
    node that returns is used where its speed is worth a restart before the next failure is expected: the running
    interval is completed first, so no step is repeated.

    Args:
        events: by time.
        num_nodes: up at the start.
        nodes_used: number of nodes that are up -> of these, the number that the best layout uses, and its speed
            relative to that of the fastest layout on the whole cluster; (0, 0.0) if no layout fits.
        stops: seconds of checkpoints and restarts.
        span_s: length of the training.
        mtbf_s: mean time between failures of a node, which decides whether more nodes are worth a restart.
    """
    state = _Walk(set(range(num_nodes)), nodes_used, stops, mtbf_s)
    for event in events:
        if event.time_s >= span_s:
            break
        state.go_to(event.time_s)
        state.happen(event)
    state.go_to(span_s)
    state.finish(span_s)
    return state.found


class _Walk:
    """A training between two events."""

    def __init__(
        self, up: set[int], nodes_used: Callable[[int], tuple[int, float]], stops: Stops, mtbf_s: float
    ) -> None:
        self.found = Goodput()
        self._up, self._nodes_used, self._stops, self._mtbf_s = up, nodes_used, stops, mtbf_s
        self._now_s = 0.0
        self._begin_s = 0.0
        """Time of the first step since the last restart; until then the training restarts."""
        self._switch_s = inf
        """Time at which the running interval is complete, and more nodes are used."""
        self._used, self._speed = self._layout()

    def _layout(self) -> tuple[set[int], float]:
        number, speed = self._nodes_used(len(self._up))
        return set(heapq.nsmallest(number, self._up)), speed

    def go_to(self, time_s: float) -> None:
        """Let the time pass; there is no event before."""
        if self._switch_s <= time_s:
            switch_s, self._switch_s = self._switch_s, inf
            self._pass(switch_s, is_complete=True)
            self._restart()
        self._pass(time_s, is_complete=False)

    def _pass(self, time_s: float, *, is_complete: bool) -> None:
        """Count the time up to a point where nothing fails; what is after the last checkpoint is counted later."""
        found, stops = self.found, self._stops
        if not self._used:
            found.waiting_s += time_s - self._now_s
            self._now_s = self._begin_s = time_s
            return
        if self._now_s < self._begin_s:
            restart_end_s = min(time_s, self._begin_s)
            found.restarts_s += restart_end_s - self._now_s
            self._now_s = restart_end_s
        each_s = stops.interval_s + stops.checkpoint_s
        number = round((time_s - self._now_s) / each_s) if is_complete else int((time_s - self._now_s) / each_s)
        self._count(number * stops.interval_s)
        found.checkpoints_s += number * stops.checkpoint_s
        self._now_s = time_s if is_complete else self._now_s + number * each_s

    def _count(self, progress_s: float) -> None:
        self.found.useful_s += progress_s * self._speed
        self.found.slower_s += progress_s * (1 - self._speed)

    def finish(self, time_s: float) -> None:
        """Count what is after the last checkpoint, since no failure follows."""
        rest_s = time_s - self._now_s
        progress_s = min(rest_s, self._stops.interval_s)
        self._count(progress_s)
        self.found.checkpoints_s += rest_s - progress_s
        self._now_s = time_s

    def happen(self, event: Event) -> None:
        """A node fails or returns at the time that was gone to."""
        if event.is_up:
            self._up.add(event.node)
            self._use_more(event.time_s)
            return
        self._up.discard(event.node)
        if event.node in self._used:
            self.found.num_failures += 1
            self.found.repeated_s += event.time_s - self._now_s
            self._now_s, self._switch_s = event.time_s, inf
            self._restart()
        elif self._switch_s < inf and not self._is_worth_it():
            self._switch_s = inf

    def _restart(self) -> None:
        self._used, self._speed = self._layout()
        self._begin_s = self._now_s + (self._stops.restart_s if self._used else 0.0)

    def _is_worth_it(self) -> bool:
        number, speed = self._nodes_used(len(self._up))
        gained = (speed - self._speed) * self._mtbf_s / max(1, number)
        return gained > speed * self._stops.restart_s

    def _use_more(self, time_s: float) -> None:
        if not self._used:
            self._now_s = time_s
            self._restart()
        elif self._switch_s == inf and self._is_worth_it():
            each_s = self._stops.interval_s + self._stops.checkpoint_s
            # ``_now_s`` is the end of the last checkpoint; a restart that is under way is completed first.
            self._switch_s = max(self._now_s, self._begin_s) + each_s
