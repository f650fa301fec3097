"""Lanes of a rank: each runs jobs in the order of the row, one at a time, beside compute.

A lane is a thread that waits (gloo), a stream (CUDA), or a thread that issues work on a stream.
"""

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from pipeloom.execute.clock import Clock, Mark
from pipeloom.execute.communication.collectives import Job
from pipeloom.execute.communication.transport import UnderWay


class Lane:
    """Runs jobs one after the other."""

    def start(self, job: Job) -> UnderWay:
        """Run a job behind those that were started before."""
        raise NotImplementedError

    def close(self) -> None:
        """Let the thread end, if there is one; jobs under way are abandoned."""


class ThreadLane(Lane):
    """A thread that runs the jobs: on gloo, a collective is over when somebody has waited for it.

    Behind a job that failed all others fail as it did: the other ranks would not come to them. So an executor over
    processes ends with its first failure.

    Args:
        clock: what spans are measured with.
        name: of the thread.
        stream: a CUDA stream on which the jobs issue their work, where they have some.
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
        """Let the thread end."""
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
                    raise failed  # noqa: TRY301  the other ranks would not come to what follows
                for finish in job:
                    finish()
            except Exception as error:
                failed = under_way.error = error
            under_way.end = self._clock.mark()
            under_way.done.set()
            del entry, job, under_way  # the queue may stay empty for long


class _ThreadJob(UnderWay):
    """A job that the lane's thread runs."""

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
    """A CUDA stream whose jobs may wait on the host: a thread issues them, and compute is issued meanwhile.

    A job begins when the compute issued before it has ended; compute waits for it as for that of a ``StreamLane``.

    Args:
        clock: what spans are measured with; marks the current stream.
        name: of the thread.
        stream: that the jobs issue their work on.
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
    """A job that a thread issues and the device then orders."""

    event: Any = None

    def is_done(self) -> bool:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> bool:
        """The host waits until it is issued, the current stream until it is done."""
        if not self.done.wait(timeout_s):
            return False
        if self.event is not None:  # none where it failed
            self.event.wait()
        return True


class StreamLane(Lane):
    """A CUDA stream: a job begins when the compute issued before it has ended, and the host never waits.

    Args:
        clock: what spans are measured with; marks the current stream.
        device: index of the CUDA device.
    """

    def __init__(self, clock: Clock, device: int) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device)

    def start(self, job: Job) -> UnderWay:
        """Issue a job on the stream."""
        # What the job reads was made by compute that is issued, not done.
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
    """A job that the device orders: compute works behind its event."""

    def __init__(self, event: Any, begin: Mark, end: Mark) -> None:
        self.begin, self.end = begin, end
        self._event = event

    def is_done(self) -> bool:
        self._event.wait()  # makes the current stream wait, not the host
        return True


class Lanes:
    """The lanes of a rank by name, made when they are first used: streams on CUDA, else threads.

    Args:
        clock: what spans are measured with.
        device: where stages live.

    Attributes:
        waits: whether lanes wait by themselves. Only those of tests, where all ranks share a thread, do not.
    """

    waits = True

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self._lanes: dict[str, Lane] = {}

    def lane(self, name: str, *, waits_on_host: bool = False) -> Lane:
        """A lane of this rank's own actions; its jobs may wait on the host if ``waits_on_host``."""
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
        """A lane for what is done for another rank."""
        # A thread even on CUDA: somebody has to wait for what the other rank
        # announces. Its copies need a stream beside that of compute.
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        lane = self._lanes[name] = ThreadLane(self.clock, name, stream)
        return lane

    def close(self) -> None:
        """Let threads end; jobs under way are abandoned."""
        for lane in self._lanes.values():
            lane.close()
