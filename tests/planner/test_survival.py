"""Goodput over failures of nodes: every second is counted once, and the best interval is the best one."""

from math import exp, inf

import pytest

from pipeloom.planner.survival import Event, Stops, best_interval_s, random_events, walk

_STOPS = Stops(checkpoint_s=10.0, restart_s=100.0, interval_s=90.0)


def _all_or_nothing(num_nodes):
    return lambda num_up: (num_nodes, 1.0) if num_up >= num_nodes else (0, 0.0)


def _in_proportion(num_nodes):
    return lambda num_up: (min(num_up, num_nodes), min(num_up, num_nodes) / num_nodes)


def test_without_failures_only_checkpoints_cost_time():
    found = walk([], 4, _all_or_nothing(4), _STOPS, 1000.0)
    assert (found.useful_s, found.checkpoints_s, found.total_s) == (900.0, 100.0, 1000.0)


def test_a_failure_repeats_the_steps_since_the_last_checkpoint_and_waits_for_the_node():
    events = [Event(250.0, 2, is_up=False), Event(300.0, 2, is_up=True)]
    found = walk(events, 4, _all_or_nothing(4), _STOPS, 1000.0)
    # two intervals, 50 s lost, 50 s without the node, 100 s to restart, and six intervals from 400 s on
    assert found.repeated_s == 50.0
    assert found.waiting_s == 50.0
    assert found.restarts_s == 100.0
    assert found.useful_s == 8 * 90.0
    assert found.total_s == pytest.approx(1000.0)


def test_with_fewer_nodes_the_training_goes_on_slower_and_takes_the_node_back_after_a_whole_interval():
    events = [Event(250.0, 3, is_up=False), Event(420.0, 3, is_up=True)]
    found = walk(events, 4, _in_proportion(4), _STOPS, 1000.0, mtbf_s=1e6)
    assert (found.waiting_s, found.repeated_s, found.num_failures) == (0.0, 50.0, 1)
    # restarts at 250 and, after the interval from 350 to 450, at 450: steps at three quarters of the speed for 90 s
    assert found.restarts_s == 200.0
    assert found.slower_s == pytest.approx(90.0 / 4)
    assert found.total_s == pytest.approx(1000.0)


def test_a_node_that_returns_is_not_used_where_the_next_failure_would_come_before_it_pays():
    events = [Event(250.0, 3, is_up=False), Event(420.0, 3, is_up=True)]
    found = walk(events, 4, _in_proportion(4), _STOPS, 1000.0, mtbf_s=1.0)
    assert found.restarts_s == 100.0


def test_the_failure_of_a_spare_stops_nothing():
    found = walk([Event(250.0, 4, is_up=False)], 5, _all_or_nothing(4), _STOPS, 1000.0)
    assert (found.num_failures, found.useful_s) == (0, 900.0)


def test_a_failure_during_a_restart_starts_it_again():
    events = [Event(200.0, 0, is_up=False), Event(250.0, 1, is_up=False)]
    found = walk(events, 6, _all_or_nothing(4), _STOPS, 1000.0)
    assert (found.repeated_s, found.restarts_s, found.num_failures) == (0.0, 150.0, 2)


@pytest.mark.parametrize("seed", range(20))
def test_every_second_of_a_random_walk_is_counted_once(seed):
    events = random_events(6, 5000.0, 800.0, 50_000.0, seed)
    for ways in (_all_or_nothing(5), _in_proportion(6)):
        found = walk(events, 6, ways, _STOPS, 50_000.0, mtbf_s=5000.0)
        assert found.total_s == pytest.approx(50_000.0)
        assert min(found.shares.values()) >= 0
        assert sum(found.shares.values()) == pytest.approx(1.0)


def _mean_goodput(interval_s, mtbf_s, checkpoint_s, restart_s):
    """By renewal: an attempt of an interval succeeds with exp(-t/m); a failed one takes its time and a restart."""
    attempt_s = interval_s + checkpoint_s
    succeeds = exp(-attempt_s / mtbf_s)
    # mean time of an attempt that fails: the exponential distribution cut off at the attempt's length
    lost_s = mtbf_s - attempt_s * succeeds / (1 - succeeds)
    # a restart itself may fail, and is then done again
    restart_mean_s = mtbf_s * (exp(restart_s / mtbf_s) - 1)
    return interval_s / (attempt_s + (1 / succeeds - 1) * (lost_s + restart_mean_s))


@pytest.mark.parametrize(("mtbf_s", "checkpoint_s"), [(3600.0, 5.0), (3600.0, 60.0), (3600.0, 1200.0), (1e6, 20.0)])
def test_the_best_interval_is_that_of_a_search_over_all(mtbf_s, checkpoint_s):
    among = [mtbf_s * 10 ** (number / 1000) for number in range(-5000, 1000)]
    best = max(among, key=lambda interval_s: _mean_goodput(interval_s, mtbf_s, checkpoint_s, 300.0))
    assert best_interval_s(mtbf_s, checkpoint_s) == pytest.approx(best, rel=0.01)


def test_checkpoints_that_cost_nothing_have_no_best_interval():
    assert best_interval_s(3600.0, 0.0) == 0.0


def test_a_walk_over_random_failures_has_the_goodput_of_the_formula():
    # Nodes that are replaced at once: failures of the job are independent of the past, as in the formula.
    num_nodes, mtbf_s, span_s = 10, 36_000.0, 3.6e7
    stops = Stops(checkpoint_s=30.0, restart_s=120.0, interval_s=400.0)
    events = random_events(num_nodes, mtbf_s, 1e-3, span_s)
    found = walk(events, num_nodes, _all_or_nothing(num_nodes), stops, span_s)
    expected = _mean_goodput(400.0, mtbf_s / num_nodes, 30.0, 120.0)
    assert found.num_failures > 9000
    assert found.shares["useful"] == pytest.approx(expected, abs=0.002)


def test_more_nodes_or_rarer_failures_never_lower_the_goodput():
    def goodput(mtbf_s):
        events = random_events(8, mtbf_s, 1000.0, 1e6, seed=3)
        return walk(events, 8, _in_proportion(8), _STOPS, 1e6, mtbf_s=mtbf_s).shares["useful"]

    shares = [goodput(mtbf_s) for mtbf_s in (2e4, 1e5, 1e6, inf)]
    assert shares == sorted(shares)
