"""Point-to-point messages between pipeline ranks: NCCL on CUDA devices; on CPUs shared memory within a host, and gloo.

A transport keeps the order of each directed edge: the n-th receive from a rank matches the n-th send of that rank. Both
calls return at once, with an operation in progress. Each directed edge has one communicator, made and used once in a
fixed order before the first step, so that none is made lazily in a different order on another rank.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import BoundaryError, PeerLostError
from pipeloom.execute.clock import Mark
from pipeloom.execute.communication.boundary import TensorSpec, TokenSlices, decode, encode
from pipeloom.execute.communication.coding import wire_spec
from pipeloom.execute.communication.shared_memory import Listener, SharedReceiver, SharedSender, connect
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.processes.world import network_reason, peer_errors
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import SEND_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.lanes import lane_of
from pipeloom.workload.boundary import Boundary

Edge = tuple[int, int]
"""(from rank, to rank)"""

_ROUNDS_S = (5e-4, 8e-3)
"""Shortest and longest delay before a lane's thread waits for a transfer, which is also the error of its end time. The
delay approaches the longer one while transfers follow each other faster than the shorter one, since waking threads
would then cost more than the transfers; receives wait until that is over."""


def edges_of(
    schedule: Schedule,
    outputs: Sequence[TensorSpec],
    tied: Mapping[Kind, TensorSpec] | None = None,
    slices: TokenSlices | None = None,
    boundary: Boundary | None = None,
) -> dict[Edge, list[TensorSpec]]:
    """The directed edges of a schedule, sorted, with the specs of their messages, sorted by stage and slice.

    Args:
        schedule: with its sends.
        outputs: for every stage the agreed spec of its output.
        tied: specs of a tied matrix by the kind that sends it, where the schedule has such kinds.
        slices: token slices of a micro-batch; ``None`` for whole sequences.
        boundary: the code of messages between stages; ``None``: they travel as they are.
    """
    found: dict[Edge, dict[tuple[int, Kind, int], TensorSpec]] = {}
    for rank, _, action in schedule.actions():
        if action.kind in SEND_KINDS | TIED_SEND_KINDS:
            peer = lane_of(action, schedule.placement).peer
            assert peer is not None
            if action.kind in SEND_KINDS:
                spec = outputs[action.stage if action.kind is Kind.SEND_F else action.stage - 1]
                spec = wire_spec(spec if slices is None else slices.spec(spec, action.slice), boundary)
            else:
                assert tied is not None, "the schedule sends a tied matrix of unknown shape"
                spec = tied[action.kind]
            found.setdefault((rank, peer), {})[action.stage, action.kind, action.slice] = spec
    return {edge: [specs[key] for key in sorted(specs)] for edge, specs in sorted(found.items())}


class Transport:
    """Sends and receives tensors between pipeline ranks.

    On CPUs an edge whose ranks are on one host is shared memory: a send is a copy, and nothing runs beside the rank's
    thread. All others use ``torch.distributed``. On gloo sends and receives start at once. The rank's thread waits for
    a tensor that it needs; a thread of each lane waits for all others, so that the end of a transfer is recorded and
    sent tensors are freed. On NCCL streams order transfers, and only the device waits.

    Args:
        rank: this process's pipeline rank.
        edges: from ``edges_of``, equal on every rank.
        device: of the tensors.
        timeout: of the communicators.
        pipelines: for each replica of the pipeline, its ranks in the default process group; ``None`` for one replica
            of all ranks.
        shares_memory: whether edges within a host on CPUs are shared memory.

    Raises:
        BoundaryError: the two ends of an edge expect different messages.
        PeerLostError: another rank ended.
    """

    def __init__(
        self,
        rank: int,
        edges: Mapping[Edge, Sequence[TensorSpec]],
        device: torch.device,
        timeout: timedelta,
        pipelines: Sequence[Sequence[int]] | None = None,
        *,
        shares_memory: bool = True,
    ) -> None:
        self._rank = rank
        self._device = device
        self._timeout = timeout
        self._pipelines = pipelines or [range(dist.get_world_size())]
        (self._process_of,) = [ranks for ranks in self._pipelines if dist.get_rank() in ranks]
        self._groups: dict[Edge, dist.ProcessGroup | None] = {}
        self._senders: dict[int, SharedSender | _Lane] = {}
        self._receivers: dict[int, SharedReceiver | _Lane] = {}
        self._rounds = _Rounds()
        for edge, specs in edges.items():
            self._open(edge)
            if rank in edge:
                self._exercise(edge, specs)
                if device.type == "cpu":
                    self._open_lane(edge, shares_memory=shares_memory)

    def _open(self, edge: Edge) -> None:
        """Make the edge's communicators for all replicas; every rank must take part in each, in the same order."""
        self._groups[edge] = None  # gloo connects every pair when the default group is made
        for ranks in self._pipelines if self._device.type == "cuda" else ():
            group = dist.new_group([ranks[end] for end in edge], timeout=self._timeout, backend="nccl")
            if isinstance(group, dist.ProcessGroup):
                self._groups[edge] = group

    def _exercise(self, edge: Edge, specs: Sequence[TensorSpec]) -> None:
        """Send the specs of the edge over it, and compare them."""
        source, destination = edge
        expected = encode(specs).to(self._device)
        with peer_errors(f"the connection between ranks {source} and {destination} failed"):
            if self._rank == source:
                dist.send(expected, self._process_of[destination], group=self._groups[edge])
                return
            found = torch.zeros_like(expected)
            dist.recv(found, self._process_of[source], group=self._groups[edge])
        if not torch.equal(found, expected):
            theirs, ours = ", ".join(map(str, decode(found))), ", ".join(map(str, specs))
            raise BoundaryError(f"rank {source} sends {theirs}, but rank {destination} expects {ours}")

    def _open_lane(self, edge: Edge, *, shares_memory: bool) -> None:
        """Share memory with the other end, if it is on this host; otherwise start a lane of gloo."""
        source, destination = edge
        with peer_errors(f"the connection between ranks {source} and {destination} failed"):
            if self._rank == source:
                self._senders[destination] = self._sender(destination, shares_memory=shares_memory)
            else:
                self._receivers[source] = self._receiver(source, shares_memory=shares_memory)

    def _sender(self, peer: int, *, shares_memory: bool) -> "SharedSender | _Lane":
        process = self._process_of[peer]
        name = torch.zeros(Listener.NAME_BYTES, dtype=torch.uint8)
        dist.recv(name, process)
        ends = connect(name) if shares_memory else None
        dist.send(torch.tensor([ends is not None]), process)
        return _Lane("send", peer, process, self._rounds) if ends is None else SharedSender(ends, f"rank {peer}")

    def _receiver(self, peer: int, *, shares_memory: bool) -> "SharedReceiver | _Lane":
        process, is_shared = self._process_of[peer], torch.tensor([False])
        with closing(Listener(is_open=shares_memory)) as listener:
            dist.send(listener.name, process)
            dist.recv(is_shared, process)
            if is_shared:
                return SharedReceiver(listener.accept(self._timeout.total_seconds())[1], f"rank {peer}")
        return _Lane("recv", peer, process, self._rounds)

    def send(self, tensor: Tensor, peer: int) -> UnderWay:
        """Start sending a tensor to a rank. It must not change until the send is finished."""
        if self._device.type == "cpu":
            return self._senders[peer].send(tensor)
        # NCCL sends contiguous memory and ignores strides.
        return self._on_stream(tensor.contiguous(), peer, is_receive=False)

    def receive(self, spec: TensorSpec, peer: int) -> UnderWay:
        """Start receiving the next tensor from a rank, into a fresh buffer."""
        if self._device.type == "cpu":
            return self._receivers[peer].receive(spec)
        return self._on_stream(spec.empty(self._device), peer, is_receive=True)

    def _on_stream(self, tensor: Tensor, peer: int, *, is_receive: bool) -> UnderWay:
        process = self._process_of[peer]
        post, edge = (dist.irecv, (peer, self._rank)) if is_receive else (dist.isend, (self._rank, peer))
        return _on_stream(tensor, peer, is_receive, lambda: post(tensor, process, group=self._groups[edge]))

    def close(self) -> None:
        """End the lanes' threads; unfinished transfers are abandoned."""
        self._rounds.end()
        for lane in (*self._senders.values(), *self._receivers.values()):
            lane.end()


def _on_stream(tensor: Tensor, peer: int, is_receive: bool, post: Callable[[], dist.Work | None]) -> UnderWay:
    asked_s = time.perf_counter()
    with peer_errors(f"rank {peer} closed the connection"):
        work = post()
    assert work is not None, "a process never sends to itself"
    return _StreamTransfer(work, tensor, asked_s) if is_receive else _StreamTransfer(None, None, asked_s)


@dataclass
class _StreamTransfer(UnderWay):
    """A transfer that the device orders: the stream that uses the tensor waits for it.

    A send needs no wait and holds nothing until the end of the step: NCCL's process group prevents reuse of a sent
    tensor's memory before the send is finished.
    """

    work: dist.Work | None
    tensor: Tensor | None
    begin: Mark

    def is_done(self) -> bool:
        if self.work is not None:
            self.work.wait()  # makes the current stream wait, not the host
        self.end = time.perf_counter()
        return True

    def has_passed(self) -> bool:
        return self.work is not None and self.work.is_completed()

    def take(self) -> Tensor | None:
        tensor, self.tensor = self.tensor, None
        return tensor


class _Lane:
    """One direction of one edge: transfers in order.

    Gloo reports the end of a transfer only to a thread that waits for it, so some thread must wait for each. A rank
    that needs a tensor waits for it on its own thread. For all other transfers a thread of the lane waits, so that
    their end is recorded, and sent tensors are freed, while the rank computes. The transport's ``_Rounds`` wakes that
    thread after a delay: waking it at every transfer would cost more than the transfer.
    """

    def __init__(self, direction: str, peer: int, process: int, rounds: "_Rounds") -> None:
        world = dist.group.WORLD
        assert world is not None, "the default process group is there before any transport"
        self.is_receive = direction == "recv"
        self._post = world.recv if self.is_receive else world.send  # what isend and irecv come to, without their checks
        self._peer = peer
        self._process = process
        self._rounds = rounds
        rounds.lanes.append(self)
        self._open: deque[_LaneTransfer] = deque()
        self._front = threading.Lock()  # held by the thread that waits for the first open transfer
        self._is_wanted = False  # the rank needs one of these transfers, and takes over from the thread
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"{direction} {peer}", daemon=True).start()

    def send(self, tensor: Tensor) -> "_LaneTransfer":
        """Post a send."""
        return self._start(tensor.contiguous())  # gloo sends contiguous memory and ignores strides

    def receive(self, spec: TensorSpec) -> "_LaneTransfer":
        """Post a receive into a fresh buffer."""
        return self._start(spec.empty("cpu"))

    def _start(self, tensor: Tensor) -> "_LaneTransfer":
        asked_s = time.perf_counter()  # before posting: the other side may have the tensor when that returns
        try:
            # Tag 0 for all: a lane's transfers are matched by their order.
            work = self._post([tensor], self._process, 0)
        except RuntimeError as error:
            raise PeerLostError(f"rank {self._peer} closed the connection: {network_reason(error)}") from error
        transfer = _LaneTransfer(self, work, tensor, asked_s)
        self._open.append(transfer)
        self._rounds.announce()
        return transfer

    def wait_for(self, transfer: "_LaneTransfer", timeout_s: float) -> bool:
        """Wait, on the rank's own thread, until a transfer is finished; ``False`` if that takes too long."""
        deadline_s = time.perf_counter() + timeout_s
        self._is_wanted = True
        try:
            while not transfer.has_ended:
                if not self._front.acquire(timeout=max(0.0, deadline_s - time.perf_counter())):
                    return False
                try:
                    if not transfer.has_ended and not self._end_front(deadline_s):
                        return False
                finally:
                    self._front.release()
        finally:
            self._is_wanted = False
        # The lane's thread left the lane to this one, and must be woken for transfers that are still open.
        if self._open:
            self._rounds.announce()
        return True

    @property
    def has_open(self) -> bool:
        """Whether a transfer is unfinished."""
        return bool(self._open)

    def call(self) -> None:
        """Wake the thread, if a transfer is open and no thread waits for it."""
        if self._open and not self._front.locked():
            self._calls.put(True)

    def end(self) -> None:
        self._calls.put(False)

    def _serve(self) -> None:
        while self._calls.get():
            while self._open and not self._is_wanted:
                with self._front:
                    if self._open:
                        self._end_front(None)

    def _end_front(self, deadline_s: float | None) -> bool:
        """Wait for the first open transfer; ``False`` if it is not done by the deadline."""
        transfer = self._open[0]
        assert transfer.work is not None
        error: PeerLostError | None = None
        try:
            if deadline_s is None:
                transfer.work.wait()
            else:
                left_s = max(0.0, deadline_s - time.perf_counter())
                transfer.work.wait(timedelta(seconds=left_s + 1e-3))  # it waits for whole milliseconds, rounded down
        except RuntimeError as found:
            if deadline_s is not None and time.perf_counter() >= deadline_s:
                return False
            error = PeerLostError(f"rank {self._peer} closed the connection: {network_reason(found)}")
        self._open.popleft()
        transfer.finish(error, keep=self.is_receive)
        return True


class _Rounds:
    """A thread that calls the threads of lanes with open transfers, some time after there are any."""

    def __init__(self) -> None:
        self.lanes: list[_Lane] = []
        self._num_announced = 0
        self._is_due = threading.Event()
        self._has_ended = False
        self._thread: threading.Thread | None = None

    def announce(self) -> None:
        """Come by soon: there is an open transfer."""
        self._num_announced += 1
        if not self._is_due.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=self._go, name="rounds", daemon=True)
                self._thread.start()
            self._is_due.set()

    def end(self) -> None:
        self._has_ended = True
        self._is_due.set()

    def _go(self) -> None:
        shortest_s, longest_s = _ROUNDS_S
        pause_s, before, before_s = shortest_s, 0, time.perf_counter()
        while self._is_due.wait() and not self._has_ended:
            time.sleep(pause_s)
            self._is_due.clear()
            now, now_s = self._num_announced, time.perf_counter()
            leaves_receives = pause_s > shortest_s and now > before  # to the rank, which soon waits for them itself
            for lane in self.lanes:
                if not (leaves_receives and lane.is_receive):
                    lane.call()
                elif lane.has_open:  # the next announcement may be far away
                    self._is_due.set()
            if (now - before) * shortest_s > now_s - before_s:
                pause_s = min(2 * pause_s, longest_s)
            elif (now - before) * shortest_s < pause_s:  # a break between steps is none between their transfers
                pause_s = max(pause_s / 2, shortest_s)
            before, before_s = now, now_s


class _LaneTransfer(UnderWay):
    """A transfer on a lane. It is finished when the rank or the lane's thread has waited for it."""

    def __init__(self, lane: _Lane, work: dist.Work, tensor: Tensor, asked_s: float) -> None:
        self._lane = lane
        self._tensor: Tensor | None = tensor
        self._error: PeerLostError | None = None
        self.work: dist.Work | None = work
        self.has_ended = False
        self.begin = self.end = asked_s

    def finish(self, error: PeerLostError | None, *, keep: bool) -> None:
        self.end = time.perf_counter()
        self._error = error
        self.work = None
        if not keep:
            self._tensor = None
        self.has_ended = True

    def is_done(self) -> bool:
        return self.has_ended

    def wait(self, timeout_s: float) -> bool:
        return self._lane.wait_for(self, timeout_s)

    def take(self) -> Tensor | None:
        if self._error is not None:
            raise self._error
        tensor, self._tensor = self._tensor, None
        return tensor
