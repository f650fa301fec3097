"""Peers that come and go: every second is counted, moves help, and an independent walk by seconds agrees."""

import random
from math import inf
from statistics import mean

import pytest

from pipeloom.planner.peers import Swarm, division, serve
from pipeloom.planner.survival import Event, random_events

HOUR_S = 3600.0


def test_stages_with_more_work_get_more_peers():
    assert division((1.0, 2.0, 1.0), 8) == [2, 4, 2]
    assert division((1.0, 1.0), 5) == [3, 2]


def test_the_stage_with_the_least_peers_decides():
    # Two stages of two peers: 4 until one of them leaves, then 2 of which the sum of speeds has 3.
    found = serve([Event(100.0, 0, is_up=False)], 4, Swarm(work=(1.0, 1.0), move_s=10.0), 200.0)
    assert (found.done, found.of_up, found.of_all) == (600.0, 700.0, 800.0)
    assert found.of_whole == 600.0
    assert found.share == 600 / 700


def test_a_peer_moves_from_the_richest_stage_to_the_poorest_and_serves_behind_its_download():
    # Stages of 3 peers; two of the first leave at 100. At 150 a peer of the second moves, and serves from 160 on.
    events = [Event(100.0, 0, is_up=False), Event(100.0, 1, is_up=False)]
    found = serve(events, 6, Swarm(work=(1.0, 1.0), move_s=10.0, every_s=150.0), 460.0)
    assert found.num_moves == 1
    assert found.done == 100 * 6 + 60 * 2 + 300 * 4
    assert found.of_whole == 100 * 6 + 360 * 4


def test_nothing_moves_where_that_helps_no_stage():
    found = serve([Event(1.0, 0, is_up=False)], 4, Swarm(work=(1.0, 1.0), move_s=10.0, every_s=1.0), 100.0)
    assert found.num_moves == 0


def test_the_last_peer_of_a_stage_stays_and_an_empty_stage_stops_all():
    events = [Event(100.0, 1, is_up=False)]
    found = serve(events, 2, Swarm(work=(1.0, 1.0), move_s=10.0, every_s=5.0), 300.0)
    assert (found.num_moves, found.empty_s, found.done) == (0, 200.0, 200.0)


def by_seconds(events, num_peers, swarm, span_s):
    """The same in steps of a second, for events at whole seconds: counts peers again in each of them."""
    work = [one / sum(swarm.work) for one in swarm.work]
    stages = range(len(work))
    draw = random.Random(swarm.seed)
    serves, ready = {}, {}
    for stage, number in enumerate(division(work, num_peers)):
        for _ in range(number):
            serves[len(serves)], ready[len(ready)] = stage, 0
    by_time = {}
    for event in events:
        by_time.setdefault(event.time_s, []).append(event)
    done = empty = moves = 0
    for now in range(int(span_s)):
        numbers = [sum(own == stage for own in serves.values()) for stage in stages]
        if now and now % swarm.every_s == 0:
            poorest = min(stages, key=lambda stage: numbers[stage] / work[stage])
            able = [
                stage
                for stage in stages
                if (numbers[stage] - 1) / work[stage] > numbers[poorest] / work[poorest]
                and sum(own == stage and ready[peer] <= now for peer, own in serves.items()) > 1
            ]
            if able:
                richest = max(able, key=lambda stage: (numbers[stage] - 1) / work[stage])
                peer = min(peer for peer, own in serves.items() if own == richest and ready[peer] <= now)
                serves[peer], ready[peer] = poorest, now + swarm.move_s
                moves += 1
        for event in by_time.get(now, []):
            if event.is_up:
                serves[event.node], ready[event.node] = draw.randrange(len(work)), now + swarm.move_s
            else:
                del serves[event.node]
        here = [sum(own == stage and ready[peer] <= now for peer, own in serves.items()) for stage in stages]
        done += min(number / its for number, its in zip(here, work, strict=True))
        empty += min(here) == 0
    return done, moves, empty


@pytest.mark.parametrize("seed", range(6))
def test_an_independent_walk_by_seconds_agrees(seed):
    drawn = random_events(9, 400.0, 150.0, 1490.0, seed)
    events = [Event(float(round(one.time_s)), one.node, one.is_up) for one in drawn]
    swarm = Swarm(work=(1.0, 1.5, 1.0), move_s=17.0, every_s=(20.0, 60.0, inf)[seed % 3], seed=seed)
    found = serve(events, 9, swarm, 1490.0)
    done, moves, empty = by_seconds(events, 9, swarm, 1490.0)
    assert found.done == pytest.approx(done, rel=1e-9)
    assert (found.num_moves, found.empty_s) == (moves, empty)
    assert found.done <= found.of_whole <= found.of_up <= found.of_all


@pytest.mark.parametrize(("num_stages", "most"), [(4, 0.80), (8, 0.60)])
def test_rebalancing_reaches_what_chance_does_not(num_stages, most):
    """64 peers that leave every 8 hours and are away for one, 32 hours: 20 traces."""
    every = []
    for seed in range(20):
        events = random_events(64, 8 * HOUR_S, HOUR_S, 32 * HOUR_S, seed)
        swarms = [Swarm(work=(1.0,) * num_stages, move_s=60.0, every_s=every_s, seed=seed) for every_s in (inf, 300.0)]
        every.append([serve(events, 64, one, 32 * HOUR_S).share for one in swarms])
    never, moved = zip(*every, strict=True)
    print(f"{num_stages}: {mean(never):.3f} ({min(never):.3f} to {max(never):.3f}), {mean(moved):.3f}")  # noqa: T201
    assert min(moved) >= 0.90
    assert mean(never) <= most
    assert sum(one <= 0.75 for one in never) >= 5
