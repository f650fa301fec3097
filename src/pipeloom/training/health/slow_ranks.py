"""Names slow ranks during the run, from the seconds of compute that each step measures anyway."""

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from pipeloom.config import RunConfig
from pipeloom.execute.executor import StepResult
from pipeloom.execute.processes.world import World
from pipeloom.runs.run_folder import SLOW_RANKS, RunFolder
from pipeloom.runs.slow_ranks import SlowRank, find_slow, slow_text
from pipeloom.terminal.words import quoted
from pipeloom.trace import Trace
from pipeloom.training.session import shared_cores
from pipeloom.workload.layout import Layout

_STEPS = 10
"""Steps whose median is compared: one slow step is no slow rank."""


class SlowRanks:
    """Watches the seconds in which ranks compute. Construction is collective.

    Ranks of a host whose processes share cores are left out: who of them waits for a core changes from step to step.

    Args:
        config: resolved.
        world: all ranks.
        folder: of the run.
    """

    def __init__(self, config: RunConfig, world: World, folder: RunFolder) -> None:
        self._layout, self._world, self._folder = config.layout, world, folder
        self._own_pipeline = self._layout.coordinates(world.rank).pipeline
        found: list[tuple[str, bool]] | None = world.gather((socket.gethostname(), shared_cores(config) is not None))
        self._hosts = None if found is None else [host for host, _ in found]
        self._shares = [] if found is None else [shares for _, shares in found]
        self._seconds: deque[Sequence[float]] = deque(maxlen=_STEPS)
        self._named: set[int] = set()

    def own(self, result: StepResult, exchange_s: float) -> list[float]:
        """Seconds of compute by rank: those of this rank, and 0 for the others.

        Args:
            result: of a step.
            exchange_s: seconds within its compute in which it waited for the ranks of its tensor-parallel group.
        """
        found = [0.0] * self._world.size
        spans = result.trace.compute(self._own_pipeline)
        found[self._world.rank] = max(0.0, float(spans.duration_s.sum()) - exchange_s)
        return found

    def take(self, step: int, seconds: Sequence[float], predicted: Sequence[Trace]) -> None:
        """Take the sums of ``own`` of a step; on rank 0, name ranks that have become slow.

        Args:
            step: counted from 1.
            seconds: by rank.
            predicted: the step of the profile, of each replica, or one for all; empty without a profile: then the same
                stages of other replicas count, if these have as many micro-batches and updates.
        """
        self._seconds.append(seconds)
        if self._hosts is None or len(self._seconds) < _STEPS or step % _STEPS:
            return
        usual = [median(one) for one in zip(*self._seconds, strict=True)]
        expected = zip(self._expected(usual, predicted), self._shares, strict=True)
        found = find_slow(usual, [0.0 if shares else its for its, shares in expected])
        if found.keys() != self._named:
            self._name(step, found, self._hosts)

    def forget(self, layout: Layout) -> None:
        """Forget the steps so far, with which those of this layout cannot be compared."""
        self._layout = layout
        self._seconds.clear()

    def _expected(self, usual: Sequence[float], predicted: Sequence[Trace]) -> list[float]:
        layout = self._layout
        every = [layout.coordinates(rank) for rank in range(layout.num_ranks)]
        if predicted:
            traces = [predicted[layout.replica_of(place) % len(predicted)] for place in every]
            its = [trace.compute(place.pipeline) for trace, place in zip(traces, every, strict=True)]
            return [float(spans.duration_s.sum()) for spans in its]
        # A replica with fewer micro-batches or updates than another may have them because it is slower.
        numbers = list(zip(layout.microbatches_by_replica, layout.updates_by_replica, strict=True))
        works = [(place.pipeline, numbers[layout.replica_of(place)]) for place in every]
        alike = {work: [usual[rank] for rank, one in enumerate(works) if one == work] for work in works}
        # Of two replicas that differ, none is known to be the slow one; the faster one is what the other could be.
        return [min(alike[work]) if len(alike[work]) > 1 else 0.0 for work in works]

    def _name(self, step: int, found: Mapping[int, float], hosts: Sequence[str]) -> None:
        slow = [SlowRank(rank, hosts[rank], times) for rank, times in found.items()]
        again = sorted(self._named - found.keys())
        texts = [*map(str, slow), *(f"rank {rank} on {hosts[rank]} is as fast as the others again" for rank in again)]
        without = "it" if len(slow) == 1 else "them"
        run = quoted(self._folder.path)
        more = f"; `pipeloom inspect {run}` prints the step time of a layout without {without}" if slow else ""
        self._folder.add_warning(f"step {step}: {', '.join(texts)}{more}")
        self._named = set(found)
        self._folder.write(SLOW_RANKS, slow_text(step, slow), is_needed=False)
