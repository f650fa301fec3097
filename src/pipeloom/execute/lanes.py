"""Lanes of a rank: each runs jobs in row order, one at a time, concurrently with compute.

A lane is a thread that blocks (gloo), a stream (CUDA), or a thread that issues work on a stream.
"""

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from pipeloom.execute.clock import Clock, Mark
from pipeloom.execute.communication.group import Job
from pipeloom.execute.communication.under_way import UnderWay


class Lane:
    """Runs jobs one at a time."""

    def start(self, job: Job) -> UnderWay:
        """Run a job after those that were started before."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread, if there is one; unfinished jobs are abandoned."""


class ThreadLane(Lane):
    """A thread that runs the jobs: a gloo collective completes only in a call that waits for it.

    After a failed job all later ones fail with its error, since the other ranks do not run them. So an executor over
    processes ends with its first failure.

    Args:
        clock: of the trace.
        name: of the thread.
        stream: CUDA stream on which the jobs issue work; ``None`` without one.
    """

    def __init__(self, clock: Clock, name: str = "data-parallel", stream: Any = None) -> None:
        self._clock, self._name, self._stream = clock, name, stream
        self._queue: queue.SimpleQueue[tuple[Job, _ThreadJob] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> UnderWay:
        """Queue a job."""
        return self._put(job, _ThreadJob())

    def _put(self, job: Job, under_way: "_ThreadJob") -> "_ThreadJob":
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((job, under_way))
        return under_way

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)

    def _run(self) -> None:
        if self._stream is None:
            self._serve()
            return
        with torch.cuda.stream(self._stream):
            self._serve()

    def _serve(self) -> None:
        failed: Exception | None = None
        while (entry := self._queue.get()) is not None:
            job, under_way = entry
            under_way.begin = self._clock.mark()
            try:
                if failed is not None:
                    raise failed  # noqa: TRY301  the other ranks do not run the jobs that follow
                for finish in job:
                    finish()
            except Exception as error:
                failed = under_way.error = error
            under_way.end = self._clock.mark()
            under_way.done.set()
            del entry, job, under_way  # the queue may stay empty for long


class _ThreadJob(UnderWay):
    """A job of the lane's thread."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: Exception | None = None

    def is_done(self) -> bool:
        return self.done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self.done.wait(timeout_s)

    def take(self) -> Tensor | None:
        if self.error is not None:
            raise self.error
        return None


class WaitingStreamLane(ThreadLane):
    """A CUDA stream whose jobs may block the host: a thread issues them while the rank's thread issues compute.

    A job begins after the compute that was issued before it; compute waits for it as for a job of a ``StreamLane``.

    Args:
        clock: of the trace; marks the current stream.
        name: of the thread.
        stream: on which the jobs issue work.
    """

    def start(self, job: Job) -> UnderWay:
        """Queue a job."""
        # Recorded here, on the rank's thread: the lane's thread runs later, when more compute may have been issued.
        behind, under_way = torch.cuda.current_stream(self._stream.device).record_event(), _IssuedJob()
        return self._put(self._ordered(job, behind, under_way), under_way)

    def _ordered(self, job: Job, behind: Any, under_way: "_IssuedJob") -> Job:
        self._stream.wait_event(behind)
        under_way.begin = self._clock.mark()
        yield from job
        under_way.event = self._stream.record_event()


class _IssuedJob(_ThreadJob):
    """A job that a thread issues and the device orders."""

    event: Any = None

    def is_done(self) -> bool:
        return self.wait(0.0)

    def has_passed(self) -> bool:
        return self.done.is_set() and (self.event is None or self.event.query())

    def wait(self, timeout_s: float) -> bool:
        """Block the host until the job is issued, and the current stream until it is finished."""
        if not self.done.wait(timeout_s):
            return False
        if self.event is not None:  # none where it failed
            self.event.wait()
        return True


class StreamLane(Lane):
    """A CUDA stream: a job begins after the compute that was issued before it; the host never blocks.

    Args:
        clock: of the trace; marks the current stream.
        device: index of the CUDA device.
    """

    def __init__(self, clock: Clock, device: int) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device)

    def start(self, job: Job) -> UnderWay:
        """Issue a job on the stream."""
        # The job reads results of compute that is issued, not finished.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            begin = self._clock.mark()
            for finish in job:
                finish()
            end = self._clock.mark()
            event = torch.cuda.Event()
            event.record(self._stream)
        return _StreamJob(event, begin, end)


class _StreamJob(UnderWay):
    """A job that the device orders by an event."""

    def __init__(self, event: Any, begin: Mark, end: Mark) -> None:
        self.begin, self.end = begin, end
        self._event = event

    def is_done(self) -> bool:
        self._event.wait()  # makes the current stream wait, not the host
        return True

    def has_passed(self) -> bool:
        return self._event.query()


class Lanes:
    """The lanes of a rank by name, made at first use: streams on CUDA, otherwise threads.

    Args:
        clock: of the trace.
        device: of the stages.

    Attributes:
        waits: whether lanes block by themselves; false only in tests, where all ranks share a thread.
    """

    waits = True

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str, *, waits_on_host: bool = False) -> Lane:
        """A lane of this rank's own actions; its jobs may block the host if ``waits_on_host``."""
        if name not in self._lanes:
            self._lanes[name] = self._new(name, waits_on_host=waits_on_host)
        return self._lanes[name]

    def _new(self, name: str, *, waits_on_host: bool) -> Lane:
        if self.device.type != "cuda":
            return ThreadLane(self.clock, name)
        if waits_on_host:
            return WaitingStreamLane(self.clock, name, torch.cuda.Stream(self.device))
        return StreamLane(self.clock, self.device.index)

    def service(self, name: str) -> Lane:
        """A lane for work that serves another rank."""
        # A thread even on CUDA: it blocks until the other rank announces work.
        # Its copies need a stream other than that of compute.
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        lane = self._lanes[name] = ThreadLane(self.clock, name, stream)
        return lane

    def close(self) -> None:
        """End all threads; unfinished jobs are abandoned."""
        for lane in self._lanes.values():
            lane.close()
