"""Lanes of a rank: each runs jobs in the order of the row, one at a time, beside compute.

Three forms of one thing: a thread that waits (gloo), a stream (CUDA), and a lane that is pushed on by whoever looks
(all ranks in one process).
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeloom.execute.clock import Clock, Mark
from pipeloom.execute.communication.collectives import Finish, Job
from pipeloom.execute.communication.transport import Pending
from pipeloom.schedule import Kind


class JobUnderWay(Pending, Protocol):
    """A job under way. On CUDA, compute that is issued after ``is_done`` waits for it, not the host.

    Attributes:
        begin: when the lane began it, on the lane's clock; set when it is done.
        end: when it was done.
    """

    begin: Mark
    end: Mark

    def take(self) -> Tensor | None:
        """Nothing, if all went well; as often as somebody asks.

        Raises:
            PeerLostError: another rank went away.
        """
        ...


class Lane(Protocol):
    """Runs jobs one after the other."""

    def start(self, job: Job) -> JobUnderWay:
        """Run a job behind those that were started before."""
        ...

    def close(self) -> None:
        """Let go of threads; jobs under way are abandoned."""
        ...


class ThreadLane:
    """A thread that runs the jobs: on gloo, a collective is over when somebody has waited for it.

    Behind a job that failed all others fail as it did: the other ranks would not come to them. So an executor over
    processes ends with its first failure.

    Args:
        clock: what spans are measured with.
        name: of the thread.
        stream: a CUDA stream on which the jobs issue their work, where they have some.
    """

    def __init__(self, clock: Clock, name: str = "data-parallel", stream: Any = None) -> None:
        self._clock = clock
        self._name = name
        self._stream = stream
        self._queue: queue.SimpleQueue[tuple[Job, _ThreadJob] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, job: Job) -> JobUnderWay:
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


class _ThreadJob:
    """A job that the lane's thread runs."""

    def __init__(self) -> None:
        self.begin: Mark = None
        self.end: Mark = None
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

    def start(self, job: Job) -> JobUnderWay:
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


class StreamLane:
    """A CUDA stream: a job begins when the compute issued before it has ended, and the host never waits.

    Args:
        clock: what spans are measured with; marks the current stream.
        device: index of the CUDA device.
    """

    def __init__(self, clock: Clock, device: int) -> None:
        self._clock = clock
        self._stream = torch.cuda.Stream(device)

    def start(self, job: Job) -> JobUnderWay:
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

    def close(self) -> None:
        """Nothing to let go of."""


class _StreamJob:
    """A job that the device orders: compute works behind its event."""

    def __init__(self, event: Any, begin: Mark, end: Mark) -> None:
        self.begin, self.end = begin, end
        self._event = event

    def is_done(self) -> bool:
        self._event.wait()  # makes the current stream wait, not the host
        return True

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  the host never waits
        return self.is_done()

    def take(self) -> Tensor | None:
        return None


class Neighborhood:
    """The lanes of all ranks of one process: looking at one job pushes every lane as far as it gets."""

    def __init__(self) -> None:
        self._lanes: list[PolledLane] = []

    def lane(self, clock: Clock) -> "PolledLane":
        """A new lane of a rank."""
        self._lanes.append(PolledLane(clock, self.push))
        return self._lanes[-1]

    def push(self) -> None:
        """Let every lane go on until none can."""
        while any(lane.advance() for lane in self._lanes):
            pass


class PolledLane:
    """A lane that advances when a job is added or looked at on any lane; see ``Neighborhood``."""

    def __init__(self, clock: Clock, push: Callable[[], None]) -> None:
        self._clock = clock
        self._push = push
        self._jobs: deque[tuple[Job, _PolledJob]] = deque()
        self._finish: Finish | None = None

    def start(self, job: Job) -> JobUnderWay:
        """Queue a job."""
        under_way = _PolledJob(self._push)
        self._jobs.append((job, under_way))
        self._push()
        return under_way

    def close(self) -> None:
        """Drop what is queued."""
        self._jobs.clear()
        self._finish = None

    def advance(self) -> bool:
        """Go on with the first job, as far as it gets; whether anything was done."""
        if not self._jobs:
            return False
        job, under_way = self._jobs[0]
        if self._finish is None:
            under_way.begin = self._clock.mark()
        elif not self._finish():
            return False
        self._finish = next(job, None)
        if self._finish is None:
            self._jobs.popleft()
            under_way.end = self._clock.mark()
            under_way.has_ended = True
        return True


class _PolledJob:
    def __init__(self, push: Callable[[], None]) -> None:
        self.begin: Mark = None
        self.end: Mark = None
        self.has_ended = False
        self._push = push

    def is_done(self) -> bool:
        self._push()
        return self.has_ended

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  nobody else can run while this rank waits
        return self.is_done()

    def take(self) -> Tensor | None:
        return None


class MoveLanes(Protocol):
    """What a rank's swaps run on.

    Attributes:
        waits: whether lanes wait by themselves, each in a thread of its own, or are pushed on.
    """

    waits: bool

    @property
    def device(self) -> torch.device:
        """Where stages live."""
        ...

    def of_kind(self, kind: Kind) -> Lane:
        """The lane of a kind's actions."""
        ...

    def service(self, name: str) -> Lane:
        """A lane for what is done for another rank."""
        ...


class InProcessMoveLanes:
    """Of a rank that shares its process with all others.

    Args:
        lanes: of all ranks.
        clock: what spans are measured with.
    """

    waits = False

    def __init__(self, lanes: Neighborhood, clock: Clock) -> None:
        self.device = torch.device("cpu")
        self._lanes = lanes
        self._clock = clock

    def of_kind(self, kind: Kind) -> Lane:
        """The lane of a kind's actions."""
        return self.service(kind.value)

    def service(self, name: str) -> Lane:  # noqa: ARG002  nobody sees its name
        """A lane for what is done for another rank."""
        return self._lanes.lane(self._clock)


class ProcessMoveLanes:
    """Of a process: threads on a CPU; on CUDA streams, and threads with streams for what is done for others.

    Args:
        clock: what spans are measured with.
        device: where stages live.
    """

    waits = True

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.device = device
        self._clock = clock

    def of_kind(self, kind: Kind) -> Lane:
        """The lane of a kind's actions."""
        if self.device.type == "cuda":
            return StreamLane(self._clock, self.device.index)
        return ThreadLane(self._clock, kind.value)

    def service(self, name: str) -> Lane:
        """A lane for what is done for another rank."""
        # A thread even on CUDA: somebody has to wait for what the other rank
        # announces. Its copies need a stream beside that of compute.
        is_cuda = self.device.type == "cuda"
        return ThreadLane(self._clock, name, torch.cuda.Stream(self.device) if is_cuda else None)
