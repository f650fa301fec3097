"""Peers that come and go, each of which serves one stage of a pipeline, as in SWARM (arXiv 2301.11913): a simulation.

A peer that returns serves any of the stages, so these have more and fewer peers after a while, and the stage with the
least decides. Rebalancing moves a peer from the richest stage to the poorest one.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import floor, inf

from pipeloom.planner.survival import Event


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """Stages, and how peers change between them.

    Attributes:
        work: of each stage, seconds of a peer for a batch; in any unit.
        move_s: until a peer has the state of a stage, and serves it.
        every_s: between two moves of peers; infinite for none.
        seed: of the stages that peers serve when they return.
    """

    work: tuple[float, ...]
    move_s: float
    every_s: float = inf
    seed: int = 0


@dataclass
class Served:
    """What stages were served over a time. Progress is that of one peer for a second, if it could serve all stages.

    Attributes:
        done: progress of the pipeline: that of the stage with the least.
        of_whole: the same with the best division of the peers that were up, at each moment.
        of_up: with the sum of the speeds of the peers that were up, which no division of whole peers exceeds.
        of_all: with the sum of the speeds of all peers, as if they had always been up.
        num_moves: of peers from a stage to another one.
        empty_s: seconds in which a stage had no peer.
    """

    done: float = 0.0
    of_whole: float = 0.0
    of_up: float = 0.0
    of_all: float = 0.0
    num_moves: int = 0
    empty_s: float = 0.0

    @property
    def share(self) -> float:
        """Progress relative to the sum of the speeds of the peers that were up; 0 if none was."""
        return self.done / self.of_up if self.of_up else 0.0


def serve(events: Iterable[Event], num_peers: int, swarm: Swarm, span_s: float) -> Served:
    """The progress of a pipeline whose peers come and go.

    All peers are up at the start, divided as well as possible. A peer that returns serves a stage that is drawn, once
    it has its state. Every ``every_s`` a peer of the stage that is richest without it moves to the poorest one, if that
    is poorer; the last peer of a stage never does.

    Args:
        events: by time; nodes are peers.
        num_peers: at least as many as stages.
        swarm: its stages.
        span_s: length of the time.
    """
    state = _Swarm(swarm, num_peers)
    for event in events:
        if event.time_s >= span_s:
            break
        state.go_to(event.time_s)
        state.happen(event)
    state.go_to(span_s)
    return state.found


def division(work: Sequence[float], num_peers: int) -> list[int]:
    """Numbers of peers of each stage with which the poorest stage has as much as possible; ``work`` as of ``Swarm``."""
    found = [0] * len(work)
    for _ in range(num_peers):
        found[_poorest(found, work)] += 1
    return found


def _poorest(numbers: Sequence[int], work: Sequence[float]) -> int:
    return min(range(len(work)), key=lambda stage: numbers[stage] / work[stage])


class _Swarm:
    """The peers between two events.

    Attributes:
        found: until now.
    """

    def __init__(self, swarm: Swarm, num_peers: int) -> None:
        self.found = Served()
        self._swarm, self._num_peers = swarm, num_peers
        total = sum(swarm.work)
        self._work = work = [one / total for one in swarm.work]
        self._draw, self._now_s = random.Random(swarm.seed), 0.0
        self._tick_s = inf
        """Time of the next move, if one may help."""
        self._tick = 0
        self._numbers = division(work, num_peers)
        """Peers that serve a stage or are on the way to it."""
        self._serving = [*self._numbers]
        stages = [stage for stage, number in enumerate(self._numbers) for _ in range(number)]
        self._stage_of = dict(enumerate(stages))
        self._arrival_s = dict[int, float]()
        self._arrivals: list[tuple[float, int]] = []
        self._best = cache(partial(_best_speed, tuple(work)))

    def go_to(self, time_s: float) -> None:
        """Let the time pass; there is no event before."""
        while True:
            arrival_s = self._arrivals[0][0] if self._arrivals else inf
            next_s = min(arrival_s, self._tick_s)
            if next_s > time_s:
                break
            self._pass(next_s)
            if arrival_s == next_s:
                self._arrive(*heapq.heappop(self._arrivals))
            else:
                self._tick_s = self._next_tick_s() if self._move() else inf
        self._pass(time_s)

    def _pass(self, time_s: float) -> None:
        span_s, found, number = time_s - self._now_s, self.found, len(self._stage_of)
        found.done += _speed(self._serving, self._work) * span_s
        found.of_whole += self._best(number) * span_s
        found.of_up += number * span_s
        found.of_all += self._num_peers * span_s
        found.empty_s += span_s if min(self._serving) == 0 else 0.0
        self._now_s = time_s

    def happen(self, event: Event) -> None:
        """A peer leaves or returns at the time that was gone to."""
        peer = event.node
        if event.is_up:
            self._send(peer, self._draw.randrange(len(self._work)))
        else:
            stage = self._stage_of.pop(peer)
            self._numbers[stage] -= 1
            # On the way it does not serve yet.
            if self._arrival_s.pop(peer, None) is None:
                self._serving[stage] -= 1
        if self._tick_s == inf:
            self._tick_s = self._next_tick_s()

    def _next_tick_s(self) -> float:
        every_s = self._swarm.every_s
        if every_s == inf:
            return inf
        # Counted, so that rounding never returns the same time twice.
        self._tick = max(self._tick, floor(self._now_s / every_s)) + 1
        return self._tick * every_s

    def _send(self, peer: int, stage: int) -> None:
        self._stage_of[peer] = stage
        self._numbers[stage] += 1
        self._arrival_s[peer] = self._now_s + self._swarm.move_s
        heapq.heappush(self._arrivals, (self._arrival_s[peer], peer))

    def _arrive(self, time_s: float, peer: int) -> None:
        if self._arrival_s.get(peer) == time_s:  # it did not leave, nor move on, since
            del self._arrival_s[peer]
            self._serving[self._stage_of[peer]] += 1

    def _move(self) -> bool:
        """Move a peer if that helps; returns whether another move may, too."""
        numbers, work = self._numbers, self._work
        poorest = _poorest(numbers, work)
        least = numbers[poorest] / work[poorest]
        donors = [stage for stage, number in enumerate(numbers) if (number - 1) / work[stage] > least]
        if not donors:
            return False
        donors = [stage for stage in donors if self._serving[stage] > 1]
        if donors:
            richest = max(donors, key=lambda stage: (numbers[stage] - 1) / work[stage])
            peer = min(one for one, stage in self._stage_of.items() if stage == richest and one not in self._arrival_s)
            numbers[richest] -= 1
            self._serving[richest] -= 1
            self._send(peer, poorest)
            self.found.num_moves += 1
        return True


def _best_speed(work: Sequence[float], num_peers: int) -> float:
    return _speed(division(work, num_peers), work)


def _speed(numbers: Sequence[int], work: Sequence[float]) -> float:
    return min(number / its for number, its in zip(numbers, work, strict=True))
