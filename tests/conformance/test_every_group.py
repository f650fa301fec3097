"""What every group of data-parallel ranks must do: the same jobs, on each of them.

A script returns a rank's jobs and the tensors that they fill.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
from in_process import Neighborhood, groups_in_process

from pipeloom.execute.clock import Clock
from pipeloom.execute.communication import collectives
from pipeloom.execute.communication.collectives import make_groups
from pipeloom.execute.communication.group import Groups
from pipeloom.execute.lanes import ThreadLane
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.workload.layout import Layout

HYBRID = Layout(pp=1, dp=4, replicate=2, shard="full")
PAIR = Layout(pp=1, dp=2, shard="full")


def numbers(rank, size):
    return torch.arange(size, dtype=torch.float64) + 100 * (rank + 1)


def gathered(rank, groups):
    """Shards come in the order of the ranks of the shard group."""
    whole = torch.empty(6, dtype=torch.float64)

    def job():
        yield groups.shard.gather(whole, numbers(rank, 3))

    return [job()], whole


def reduced(rank, groups):
    """A rank gets the sum of its own part, over its shard group and then over the copies; the input stays."""
    part, whole = torch.empty(3, dtype=torch.float64), numbers(rank, 6)

    def job():
        yield groups.shard.reduce_scatter(part, whole)
        yield groups.copies.all_reduce(part)
        torch.testing.assert_close(whole, numbers(rank, 6))

    return [job()], part


def largest(rank, groups):
    """Each element is the largest one of the ranks."""
    tensor = numbers(rank, 3) * torch.tensor([1.0, -1.0, 1.0])

    def job():
        yield groups.copies.all_reduce(tensor, "max")
        yield groups.shard.all_reduce(tensor, "max")

    return [job()], tensor


def one_after_the_other(rank, groups):
    """A job uses what the jobs before it have left, of tensors of any size and type."""
    small, large = torch.ones(2), torch.ones(4096, dtype=torch.float64)
    seen = torch.zeros(3, dtype=torch.float64)

    def add(tensor):
        yield groups.shard.all_reduce(tensor)

    def scatter():
        part = torch.empty(2048, dtype=torch.float64)
        yield groups.shard.reduce_scatter(part, large)
        seen[0], seen[1], seen[2] = small[0], large[0], part[0]

    return [add(small), add(large), add(small), scatter()], seen


def play_in_process(script, layout):
    lanes = Neighborhood()
    shards, copies = groups_in_process(layout.shard_groups()), groups_in_process(layout.copy_groups())
    found = []
    for rank in range(layout.dp):
        jobs, tensor = script(rank, Groups(shards[rank], copies[rank]))
        lane = lanes.lane(Clock())
        found.append(([lane.start(job) for job in jobs], tensor))
    for started, _ in found:
        assert all(collective.is_done() for collective in started)
        assert all(a.end <= b.begin for a, b in pairwise(started))
    return [tensor.tolist() for _, tensor in found]


def _rank_of_processes(script, layout, kind, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", 20)
    if kind == "gloo":
        collectives.links_of = lambda *_: {}
    lane = ThreadLane(Clock())
    jobs, tensor = script(rank, make_groups(layout, world))
    started = [lane.start(job) for job in jobs]
    for collective in started:
        assert collective.wait(15), "timed out"
        collective.take()
    assert all(a.end <= b.begin for a, b in pairwise(started))
    world.wait_for_all()
    lane.close()
    world.leave()
    return tensor.tolist()


def play_in_processes(script, layout, kind="shared memory"):
    return run_workers(partial(_rank_of_processes, script, layout, kind), layout.dp)


def play_over_gloo(script, layout):
    return play_in_processes(script, layout, "gloo")


PLAYERS = pytest.mark.parametrize("play", [play_in_process, play_in_processes, play_over_gloo])


@PLAYERS
def test_a_gather_puts_the_shards_of_one_copy_together(play):
    found = play(gathered, HYBRID)
    first, second = [100, 101, 102, 200, 201, 202], [300, 301, 302, 400, 401, 402]
    assert found == [first, first, second, second]


@PLAYERS
def test_a_reduction_adds_up_within_a_copy_and_then_between_them(play):
    left, right = [1000, 1004, 1008], [1012, 1016, 1020]
    assert play(reduced, HYBRID) == [left, right, left, right]


@PLAYERS
def test_a_reduction_over_two_ranks_without_copies(play):
    assert play(reduced, PAIR) == [[300, 302, 304], [306, 308, 310]]


@PLAYERS
def test_the_largest_of_every_element_is_found(play):
    assert play(largest, HYBRID) == [[400, -101, 402]] * 4


@PLAYERS
def test_a_lane_runs_its_jobs_in_their_order_one_at_a_time(play):
    assert play(one_after_the_other, PAIR) == [[4, 2, 4]] * 2
