"""All ranks in one process, one at a time, deterministic: who drives them, their transport, groups and lanes."""

import threading
import time
from collections import defaultdict, deque
from functools import partial

import torch

from pipeloom.errors import StallError
from pipeloom.execute.clock import Clock
from pipeloom.execute.communication.collectives import BlockingGroup
from pipeloom.execute.communication.context_groups import RingGroup
from pipeloom.execute.communication.expert_groups import TravelGroup
from pipeloom.execute.communication.group import Alone, already_done
from pipeloom.execute.communication.wires import Wires, evictions
from pipeloom.execute.lanes import Lanes


def run_in_process(executors, inputs, objective):
    """Run all ranks of a pipeline, an executor for each, on transports of one ``Post``: each in turn."""
    return play_in_process([(executor, executor.steps(inputs, objective)) for executor in executors])


def play_in_process(ranks, *, in_turns=False):
    """Run ranks of pipelines that work together.

    Args:
        ranks: each rank's executor with its steps, which no one has begun.
        in_turns: whether ranks wait for each other in the middle of a stage, as tensor-parallel ones do. Each then
            runs in a thread of its own, one at a time.
    """
    running = [Turn(steps) if in_turns else steps for _, steps in ranks]
    try:
        return play(running, lambda rank: ranks[rank][0].position())
    except BaseException:
        for steps in running:
            steps.close()
        for executor, _ in ranks:
            executor.forget()
        raise


def play(steps, position=str):
    """Resume iterators over what they wait for until all have ended; their results in order."""
    waiting, results = {}, {}
    while len(results) < len(steps):
        # All that can go on, in their order, before any goes on: so every run has the same order of events.
        left = [rank for rank in range(len(steps)) if rank not in results]
        ready = [rank for rank in left if rank not in waiting or waiting[rank].is_done()]
        if not ready:
            raise StallError("\n".join(["no rank can go on:", *(f"  {position(rank)}" for rank in left)]))
        for rank in ready:
            try:
                waiting[rank] = next(steps[rank])
            except StopIteration as end:
                results[rank] = end.value
    return [results[rank] for rank in range(len(steps))]


def run_together(functions):
    """Call every function, each as a rank in a turn of its own; the results in order."""
    return play([Turn(_steps(function)) for function in functions])


def _steps(function):
    result = function()
    yield from ()
    return result


class Pending:
    """Something to look at; nobody else can run while this rank waits, but where ranks take turns."""

    def __init__(self, look):
        self.is_done = look

    def wait(self, timeout_s):
        turn = getattr(_here, "turn", None)
        if turn is not None and not self.is_done():
            turn.wait(self)
        return self.is_done()

    def take(self):
        return None


_here = threading.local()


def wait_for(is_done):
    """Let the other ranks go on until something is done."""
    if not is_done():
        turn = getattr(_here, "turn", None)
        assert turn is not None, "tensor-parallel ranks of one process take turns"
        turn.wait(Pending(is_done))
    return True


class Turn:
    """A rank's steps in a thread of their own, which runs while whoever takes the next step waits.

    To its caller it is what the steps are: an iterator over what the rank waits for, with a result.
    """

    def __init__(self, steps):
        self._steps = steps
        # Two, each released by one side alone, so that exactly one of both threads runs.
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._pending = self._end = None
        self._is_left = False
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)
        self._thread.start()

    def __iter__(self):
        return self

    def __next__(self):
        if self._end is None:
            self._go.release()
            self._back.acquire()
        if self._end is not None:
            raise self._end
        return self._pending

    def close(self):
        """End a rank that will not be resumed."""
        self._is_left = True
        self._go.release()
        self._thread.join()

    def wait(self, pending):
        """In the rank's thread: hand the turn back, and go on when it comes again."""
        self._pending = pending
        self._back.release()
        self._go.acquire()
        if self._is_left:
            # Not an Exception: no handler of a rank's errors may catch it.
            raise _LeftError

    def _run(self):
        _here.turn = self
        self._go.acquire()
        try:
            while not self._is_left:
                self.wait(next(self._steps))
        except BaseException as error:
            self._end = error
        self._steps.close()
        self._back.release()


class _LeftError(BaseException):
    """Nobody will resume this rank."""


class Post:
    """Where the ranks of a pipeline leave tensors for each other."""

    def __init__(self):
        self.edges = defaultdict(deque)

    def transport(self, rank):
        return _Transport(self.edges, rank)


class _Transport:
    def __init__(self, edges, rank):
        self._edges, self._rank = edges, rank
        self._waiting = defaultdict(deque)

    def send(self, tensor, peer):
        # A copy, as over a network: the sender may drop or change its tensor when the send is done.
        self._edges[self._rank, peer].append(tensor.clone())
        transfer = _Transfer(None, deque(), deque())
        transfer.finish(None)
        return transfer

    def receive(self, spec, peer):
        transfer = _Transfer(spec, self._edges[peer, self._rank], self._waiting[peer])
        self._waiting[peer].append(transfer)
        return transfer

    def close(self):
        pass


class _Transfer(Pending):
    def __init__(self, spec, arrived, queue):
        super().__init__(self._look)
        self._spec, self._arrived, self._queue = spec, arrived, queue
        self._tensor, self._has_ended = None, False
        self.begin = self.end = time.perf_counter()

    def _look(self):
        """Hand what has arrived to the receives in their order."""
        while self._arrived and self._queue:
            self._queue.popleft().finish(self._arrived.popleft())
        return self._has_ended

    def finish(self, tensor):
        self._tensor, self._has_ended = tensor, True
        self.end = time.perf_counter()

    def take(self):
        assert self._has_ended, "the tensor has not arrived"
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._spec.check(tensor, "a received tensor")
        return tensor


def groups_in_process(lists, *, waits=False):
    """By rank its group among lists of ranks; where ``waits``, in the middle of a stage, by taking turns."""
    return {
        rank: _Group(meetings, len(ranks), index, waits=waits) if len(ranks) > 1 else Alone()
        for ranks in lists
        for meetings in [{}]
        for index, rank in enumerate(ranks)
    }


def blocking_groups_in_process(lists):
    """By rank its group among lists of tensor-parallel ranks."""
    return {rank: BlockingGroup(group) for rank, group in groups_in_process(lists, waits=True).items()}


def context_groups_in_process(lists):
    """By rank its group among lists of context-parallel ranks."""
    return {rank: RingGroup(group) for rank, group in groups_in_process(lists, waits=True).items()}


def expert_groups_in_process(lists):
    """By rank its group among lists of ranks that share experts."""
    return {rank: TravelGroup(group) for rank, group in groups_in_process(lists, waits=True).items()}


class _Group:
    """One rank's view; a meeting is what each rank brought to a collective, by its place, until all have."""

    def __init__(self, meetings, size, index, *, waits):
        self.size, self.index = size, index
        self._meetings, self._waits = meetings, waits
        self._number = 0

    def gather(self, whole, shard):
        return self._join(whole, shard, torch.cat)

    def reduce_scatter(self, shard, whole):
        # One sum for all ranks, so that what they hold has the same bits.
        return self._join(shard, whole, lambda given: torch.stack(given).sum(0), scatters=True)

    def all_reduce(self, tensor, reduction="sum"):
        reduce = torch.sum if reduction == "sum" else torch.amax
        return self._join(tensor, tensor, lambda given: reduce(torch.stack(given), 0))

    def pass_on(self, received, sent):
        # Gathered, of which each rank takes what the one before has sent.
        (arrived,), (given,) = received, sent
        whole = given.new_empty(self.size, *given.shape)
        finish, before = self.gather(whole, given.unsqueeze(0)), (self.index - 1) % self.size

        def wait():
            found = finish()
            arrived.copy_(whole[before])
            return found

        return wait

    def exchange(self, received, sent):
        def complete(brought):
            for place, (into, _) in enumerate(brought):
                for one, (_, given) in zip(into, brought, strict=True):
                    one.copy_(given[place])

        return self._meet((received, sent), complete)

    def _join(self, result, given, work, *, scatters=False):
        def complete(brought):
            results, everyone = zip(*brought, strict=True)
            total = work(everyone)
            for tensor, part in zip(results, total.chunk(self.size) if scatters else [total] * self.size, strict=True):
                tensor.copy_(part)

        return self._meet((result, given), complete)

    def _meet(self, own, complete):
        # All ranks make the same calls in the same order, so its number names a collective.
        self._number += 1
        brought = self._meetings.setdefault(self._number, {})
        brought[self.index] = own
        if len(brought) == self.size:
            # It writes into tensors that may be parameters, which autograd forbids otherwise.
            with torch.no_grad():
                complete([brought[place] for place in range(self.size)])
            # Whoever waits has the meeting itself; kept here, they would add up over a run.
            del self._meetings[self._number]
            brought.clear()
        finish = lambda: not brought  # noqa: E731
        return partial(wait_for, finish) if self._waits else finish


class Neighborhood:
    """The lanes of all ranks: looking at one job pushes every lane as far as it gets."""

    def __init__(self):
        self._lanes = []

    def lane(self, clock):
        self._lanes.append(PolledLane(clock, self.push))
        return self._lanes[-1]

    def push(self):
        while any(lane.advance() for lane in self._lanes):
            pass


class PolledLane:
    """A lane that advances when a job is added or looked at on any lane; see ``Neighborhood``."""

    def __init__(self, clock, push):
        self._clock, self._push = clock, push
        self._jobs, self._finish = deque(), None

    def start(self, job):
        under_way = _Job(self._push)
        self._jobs.append((job, under_way))
        self._push()
        return under_way

    def close(self):
        self._jobs.clear()
        self._finish = None

    def advance(self):
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
        return True


class _Job(Pending):
    def __init__(self, push):
        super().__init__(self._look)
        self.begin = self.end = None
        self._push = push

    def _look(self):
        self._push()
        return self.end is not None


class InProcessLanes(Lanes):
    """Those of a rank, which are pushed on with the lanes of all ranks."""

    waits = False

    def __init__(self, neighborhood):
        super().__init__(Clock(), torch.device("cpu"))
        self._neighborhood = neighborhood

    def lane(self, name, *, waits_on_host=False):
        return self._neighborhood.lane(self.clock)

    service = lane


class MovePost:
    """Where ranks leave announcements and bytes for each other, by (evicting rank, direction, what)."""

    def __init__(self):
        self.left = defaultdict(deque)

    def wires(self, schedule):
        """All wires, by the rank that evicts; both ends of a wire are alike."""
        ends = lambda rank: (_Wire(self.left, rank, direction) for direction in Wires._fields)  # noqa: E731
        return {rank: Wires(*ends(rank)) for rank in evictions(schedule)}


class _Wire:
    def __init__(self, left, evictor, direction):
        put, fetch = (
            [partial(act, left[evictor, direction, what]) for what in ("numbers", "bytes")] for act in (_put, _fetch)
        )
        (self.announce, self.send), (self.expect, self.receive) = put, fetch


def _put(there, tensor):
    # The sender may change its tensor at once, as after a send that has ended.
    there.append(tensor.clone())
    return already_done


def _fetch(there, tensor):
    def look():
        if there:
            tensor.copy_(there.popleft())
            return True
        return False

    return look
