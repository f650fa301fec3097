"""Divides the micro-batches of a step among replicas that are not equally fast (``layout.microbatches auto``)."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from statistics import median

from pipeloom.config import RunConfig
from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.execute.processes.world import World
from pipeloom.measure.stages import Profile
from pipeloom.schedule import Schedule
from pipeloom.simulation import simulate
from pipeloom.training.automatic.interleaving import fits
from pipeloom.training.automatic.profiled_step import simulate_profile
from pipeloom.training.schedules import check_replicas, training_schedule

_STEPS = 10
"""Steps whose median is compared: one slow step is no slow replica."""
_GAIN = 0.05
"""Least share of the step that another division has to save in a running training. Chosen: predictions of short runs on
two cores are off by as much (``automatic.ERROR``)."""

Finish = Callable[[int, int], float]
"""(replica, number of micro-batches) -> seconds until its step ends; infinite for a number that it cannot take."""


def divide(numbers: Sequence[int], finish_s: Finish, most: float = inf) -> tuple[int, ...]:
    """Numbers with the same sum, at least 1 each, with which the last replica ends as early as possible.

    Micro-batches move one by one from the replica that ends last to one that still ends before it with one more. Where
    seconds grow with the number, no division is better than the last one: it would give less to the replica that ends
    last, and so more to some other, which then ends no earlier.

    Args:
        numbers: of each replica, to begin with.
        finish_s: seconds of a replica.
        most: no replica gets more than so many.
    """
    found = list(numbers)
    while True:
        ends = [finish_s(*one) for one in enumerate(found)]
        last = ends.index(max(ends))
        takers = [one for one, number in enumerate(found) if one != last and number < most]
        if not takers or found[last] == 1:
            return tuple(found)
        end_s, taker = min((finish_s(one, found[one] + 1), one) for one in takers)
        if max(end_s, finish_s(last, found[last] - 1)) >= ends[last]:
            return tuple(found)
        found[last] -= 1
        found[taker] += 1


class Division:
    """Which replica takes how many micro-batches. Rank 0 chooses, and all ranks use its numbers.

    The batch of a step stays as it is, and so does its order: a replica takes the micro-batches behind those of the
    replicas before it.

    Args:
        config: resolved.
        world: all ranks.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        self._world, self._every = world, config.training.divide_every
        self._steps: deque[Sequence[float]] = deque(maxlen=_STEPS)
        self._schedule = _schedules(config)

    def measured(self, config: RunConfig, profile: Profile | None, print_line: Callable[[str], None]) -> RunConfig:
        """The run with numbers in place of ``auto``. Collective.

        Args:
            config: of the run.
            profile: of all replicas, on rank 0.
            print_line: called with a line about the choice, on rank 0.
        """
        if not config.layout.divides_batch:
            return config
        profiles = () if profile is None else (profile, *profile.others)

        @cache
        def finish_s(replica: int, number: int) -> float:
            schedule = self._schedule(number)
            return inf if schedule is None else simulate_profile(schedule, profiles[replica]).end_s

        found = self._chosen(config, finish_s)
        # Also where all have as many: the run's folder then has numbers.
        found = config.divided(found.layout.microbatches_by_replica)
        if profiles:
            print_line(f"replicas   {found.layout.microbatch_words}; {_compared(config, found, finish_s)}")
        return found

    def note(self, seconds: Sequence[float]) -> None:
        """Take the seconds of compute of a step, by rank; the same numbers on all ranks."""
        if self._every is not None:
            self._steps.append(seconds)

    def again(self, config: RunConfig, step: int, print_line: Callable[[str], None]) -> RunConfig:
        """The run with another division, if one is due after a step and saves time. Collective.

        Args:
            config: of the run.
            step: counted from 1.
            print_line: called with a line about another division, on rank 0.
        """
        if self._every is None or step % self._every or not self._steps:
            return config
        finish_s = _scaled(config, [median(one) for one in zip(*self._steps, strict=True)], self._schedule)
        self._steps.clear()
        found = self._chosen(config, finish_s)
        before_s, after_s = (_end_s(one, finish_s) for one in (config, found))
        is_better = self._world.from_first(after_s < before_s * (1 - _GAIN))
        if not is_better:
            return config
        if self._world.rank == 0:
            words = f"from here on {found.layout.microbatch_words}"
            print_line(f"step {step}: replicas take {words}; {_compared(config, found, finish_s)}")
        return found

    def _chosen(self, config: RunConfig, finish_s: Finish) -> RunConfig:
        """The best division that fits the memory of every host. Collective."""
        world, numbers, most = self._world, config.layout.microbatches_by_replica, inf
        while True:
            found = world.from_first(divide(numbers, finish_s, most) if world.rank == 0 else None)
            if max(found) <= max(numbers):
                return config if found == numbers else config.divided(found)
            if fits(config.divided(found), world):
                return config.divided(found)
            most = max(found) - 1


def _schedules(config: RunConfig) -> Callable[[int], Schedule | None]:
    """Number -> schedule of a replica; ``None`` where it has none, or reduces in another order than the run."""

    @cache
    def first() -> Schedule:
        return training_schedule(config.of_replica(0))

    @cache
    def schedule_of(number: int) -> Schedule | None:
        try:
            found = training_schedule(config.divided((number,)).of_replica(0))
            check_replicas([first(), found])
        except UserError:
            return None
        return found

    return schedule_of


def _scaled(config: RunConfig, seconds: Sequence[float], schedule_of: Callable[[int], Schedule | None]) -> Finish:
    """Seconds of a replica by what its ranks computed for in a step, as if its stages were equally slow.

    Args:
        config: with the numbers of that step.
        seconds: of compute, by rank.
        schedule_of: number -> schedule of a replica.
    """
    numbers = config.layout.microbatches_by_replica
    each_s = [max(seconds[rank] for rank in ranks) for ranks in config.layout.replica_ranks()]

    @cache
    def steps_of(number: int) -> tuple[float, float]:
        """Of a replica in units: the whole step, and compute of its busiest rank."""
        schedule = schedule_of(number)
        if schedule is None:
            return inf, 1.0
        trace = simulate(schedule, Costs())
        busy = max(float(trace.compute(rank).duration_s.sum()) for rank in range(trace.num_ranks))
        return trace.end_s, busy

    def finish_s(replica: int, number: int) -> float:
        return steps_of(number)[0] * each_s[replica] / steps_of(numbers[replica])[1]

    return finish_s


def _end_s(config: RunConfig, finish_s: Finish) -> float:
    return max(finish_s(*one) for one in enumerate(config.layout.microbatches_by_replica))


def _compared(before: RunConfig, after: RunConfig, finish_s: Finish) -> str:
    """Predicted step of two divisions, in words."""
    numbers = " ".join(map(str, before.layout.microbatches_by_replica))
    return f"predicted ms: {_end_s(after, finish_s) * 1e3:.0f}, with {numbers} {_end_s(before, finish_s) * 1e3:.0f}"
