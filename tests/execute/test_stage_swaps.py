"""Stages between device and host, without a run: who waits for whom, and what an error leaves behind."""

import errno
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from in_process import Post

from pipeloom.errors import RunError, StallError
from pipeloom.execute.clock import Clock, CudaClock
from pipeloom.execute.lanes import Lanes, WaitingStreamLane
from pipeloom.execute.parts.part import RankRow
from pipeloom.execute.parts.stage_swaps import StageSwaps
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.families import make_schedule
from pipeloom.passes import add_stage_swaps, lower
from pipeloom.schedule import Kind
from pipeloom.schedule.stage_swaps import Content

SIZE = 1024


def swapped(num_stages, num_microbatches=2):
    plain = make_schedule("forward-only", pp=1, loops=num_stages, num_microbatches=num_microbatches)
    return add_stage_swaps(lower(plain), 2 * SIZE, sizes=[SIZE] * num_stages)


def store_of(num_stages, device="cpu", size=SIZE):
    store = StageStore(2 * size)
    for stage in range(num_stages):
        store.add(stage, Content.WEIGHTS, torch.full((size // 4,), float(stage), device=device))
    return store


def run(swaps, schedule):
    """The swaps of a row, without what is between them."""
    row = bound(swaps, schedule)
    for slot in row.slots_of(Kind.SWAP_IN, Kind.SWAP_OUT):
        swaps.start(row, slot)


def bound(swaps, schedule):
    row = RankRow(schedule, 0, Post().transport(0))
    swaps.bind(row)
    swaps.begin(row)
    return row


def lanes_of(to_host, from_host, clock=None):
    lanes = {"to host": to_host, "from host": from_host}
    return SimpleNamespace(lane=lambda name, **_: lanes[name], clock=clock or Clock())


class Ahead:
    """A lane of a host that is ahead of its device: jobs are issued, and end when the host waits for their marks."""

    def __init__(self, log):
        self.log, self.number = log, 0

    def start(self, job):
        for finish in job:
            assert finish()
        self.number += 1
        return SimpleNamespace(wait=lambda _: True, take=lambda: None, end=f"out {self.number}")


class Watched(Clock):
    def __init__(self, log):
        self.log = log

    def wait(self, mark):
        self.log.append(mark)


def test_room_is_taken_when_the_stage_that_had_it_has_left_the_device(monkeypatch):
    schedule, log, store = swapped(5), [], store_of(5)
    honest = store.bring
    monkeypatch.setattr(store, "bring", lambda stage, *parts: (log.append(f"in {stage}"), honest(stage, *parts)))
    swaps = StageSwaps(store, lanes_of(Ahead(log), Ahead(log), Watched(log)), 5.0)
    run(swaps, schedule)
    assert log == ["in 0", "in 1", "out 1", "in 2", "out 2", "in 3", "out 3", "in 4"]


def test_a_stage_that_does_not_leave_is_named_with_the_setting():
    schedule, store = swapped(3), store_of(3)
    lane = Ahead([])
    stuck = SimpleNamespace(start=lambda job: (list(job), SimpleNamespace(wait=lambda _: False))[1])
    swaps = StageSwaps(store, lanes_of(stuck, lane), 5.0)
    with pytest.raises(StallError, match=r"timed out after 5 s, while stage 0 left .*training.stall_timeout_s"):
        run(swaps, schedule)


class Stream:
    """A stream that lists its calls."""

    device = None

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"{self.name} marks")
        return SimpleNamespace(wait=lambda: self.log.append(f"compute waits for {self.name}"))

    def wait_event(self, event):
        self.log.append(f"{self.name} waits")


def test_a_lane_whose_jobs_wait_on_the_host_is_between_compute_and_compute(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("compute", log))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    lane = WaitingStreamLane(Clock(), "from host", Stream("lane", log))

    def job():
        yield lambda: log.append("the host waits")
        log.append("a copy")

    pending = lane.start(job())
    assert pending.wait(10)
    assert pending.is_done()
    pending.take()
    ends = ["compute waits for lane"] * 2
    assert log == ["compute marks", "lane waits", "the host waits", "a copy", "lane marks", *ends]

    def fails():
        yield from ()
        raise RunError("no room")

    pending = lane.start(fails())
    assert pending.wait(10)
    with pytest.raises(RunError, match="no room"):
        pending.take()
    lane.close()


def test_after_an_error_outside_a_step_nothing_of_a_stage_is_left_on_the_device():
    store = store_of(2)
    with pytest.raises(ZeroDivisionError), store.visit(1, Content.WEIGHTS, Content.WEIGHTS):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), store.room(SIZE):
        raise ZeroDivisionError
    assert all(home._storage.nbytes() == 0 for home in store._home_of.values())
    with store.visit(0, Content.WEIGHTS), store.visit(1, Content.WEIGHTS):
        store.begin()
    assert store.peak_bytes == 2 * SIZE


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_on_a_device_stages_take_no_more_memory_than_their_budget():
    num_stages, size, work = 6, 2**26, 2048
    device = torch.device("cuda", 0)
    weights = [torch.full((size // 4,), float(stage), device=device) for stage in range(num_stages)]
    plain = make_schedule("forward-only", pp=1, loops=num_stages, num_microbatches=4)
    schedule = add_stage_swaps(lower(plain), 2 * size, sizes=[size] * num_stages)
    store, clock = StageStore(2 * size), CudaClock(0)
    for stage, tensor in enumerate(weights):
        store.add(stage, Content.WEIGHTS, tensor)
    factor, result = torch.ones(work, work, device=device), torch.empty(work, work, device=device)
    torch.mm(factor, factor, out=result)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    lanes = Lanes(clock, device)
    swaps, brought, sums = StageSwaps(store, lanes, 60.0), {}, {}
    row = bound(swaps, schedule)
    for slot, action in enumerate(schedule.rows[0]):
        if action.kind in (Kind.SWAP_IN, Kind.SWAP_OUT):
            brought[action.kind, action.stage] = swaps.start(row, slot)
        elif action.kind is Kind.FORWARD:
            assert brought[Kind.SWAP_IN, action.stage].wait(60)
            for _ in range(20):
                torch.mm(factor, factor, out=result)
            sums[action.stage] = weights[action.stage][-1].clone()
    torch.cuda.synchronize(device)
    assert [float(sums[stage]) for stage in range(num_stages)] == list(range(num_stages))
    assert torch.cuda.max_memory_allocated(device) - before <= 2 * size + 2**20
    lanes.close()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no function checks whether a disk has room")
def test_a_full_disk_is_reported_and_a_file_system_without_a_size_is_used(tmp_path, monkeypatch):
    def refusing(code):
        def refuse(*_):
            raise OSError(code, os.strerror(code))

        return refuse

    store, weights = StageStore(2 * SIZE, tmp_path), torch.ones(SIZE // 4)
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
    with pytest.raises(RunError, match="has no room for 1.02 KB more: No space left on device; use a folder"):
        store.add(0, Content.WEIGHTS, weights.clone())
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.EOPNOTSUPP))
    store.add(1, Content.WEIGHTS, weights)
    assert list(tmp_path.iterdir()) == []
