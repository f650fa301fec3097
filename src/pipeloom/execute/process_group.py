"""The transport between processes: gloo on CPUs, NCCL on CUDA devices.

One channel for each directed edge, made and exercised in a fixed order before the first step, so that no
communicator is made lazily in another order on another rank.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import BoundaryError, PeerLostError
from pipeloom.execute.boundary import TensorSpec, decode, encode
from pipeloom.execute.transport import Transfer
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.action import SEND_KINDS, TIED_SEND_KINDS
from pipeloom.schedule.depend import lane_of

Edge = tuple[int, int]
"""(from rank, to rank)"""


def edges_of(
    schedule: Schedule, outputs: Sequence[TensorSpec], tied: Mapping[Kind, TensorSpec] | None = None
) -> dict[Edge, list[TensorSpec]]:
    """The directed edges that a schedule uses, sorted, with the specs that travel on each, sorted by stage.

    Args:
        schedule: with its sends.
        outputs: the agreed spec of every stage's output.
        tied: specs of a tied matrix by the kind that sends it, where the schedule has such kinds.
    """
    found: dict[Edge, dict[tuple[int, Kind], TensorSpec]] = {}
    for rank, _, action in schedule.actions():
        if action.kind in SEND_KINDS | TIED_SEND_KINDS:
            peer = lane_of(action, schedule.placement).peer
            assert peer is not None
            if action.kind in SEND_KINDS:
                spec = outputs[action.stage if action.kind is Kind.SEND_F else action.stage - 1]
            else:
                assert tied is not None, "the schedule sends a tied matrix of unknown shape"
                spec = tied[action.kind]
            found.setdefault((rank, peer), {})[action.stage, action.kind] = spec
    return {edge: [specs[key] for key in sorted(specs)] for edge, specs in sorted(found.items())}


class ProcessGroupTransport:
    """Sends and receives over ``torch.distributed``.

    On gloo a send and a receive are started at once and waited for by a thread for each lane, so that a
    transfer is known to be done when it is, not when somebody asks, and sent tensors are dropped at once.
    On NCCL the transfers are ordered by streams and waiting is left to the device.

    Args:
        rank: this process's pipeline rank.
        edges: from ``edges_of``, the same on every rank.
        device: where tensors live.
        timeout: of the communicators.
        pipelines: for each replica of the pipeline, its ranks in the default process group; ``None`` for one replica
            of all ranks.

    Raises:
        BoundaryError: the two ends of an edge disagree on what travels there.
        PeerLostError: another rank went away meanwhile.
    """

    def __init__(
        self,
        rank: int,
        edges: Mapping[Edge, Sequence[TensorSpec]],
        device: torch.device,
        timeout: timedelta,
        pipelines: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._rank = rank
        self._device = device
        self._pipelines = pipelines or [range(dist.get_world_size())]
        (self._process_of,) = [ranks for ranks in self._pipelines if dist.get_rank() in ranks]
        self._groups: dict[Edge, dist.ProcessGroup | None] = {}
        self._lanes: dict[tuple[str, int], _Lane] = {}
        for edge, specs in edges.items():
            self._open(edge, timeout)
            if rank in edge:
                self._exercise(edge, specs)

    def _open(self, edge: Edge, timeout: timedelta) -> None:
        """Make the edge's communicators, of all replicas. Every rank takes part in each, in the same order."""
        self._groups[edge] = None  # gloo connects every pair when the default group is made
        for ranks in self._pipelines if self._device.type == "cuda" else ():
            group = dist.new_group([ranks[end] for end in edge], timeout=timeout, backend="nccl")
            if isinstance(group, dist.ProcessGroup):
                self._groups[edge] = group

    def _exercise(self, edge: Edge, specs: Sequence[TensorSpec]) -> None:
        """Send what travels on the edge over the edge, and compare."""
        source, destination = edge
        expected = encode(specs).to(self._device)
        try:
            if self._rank == source:
                dist.send(expected, self._process_of[destination], group=self._groups[edge])
                return
            found = torch.zeros_like(expected)
            dist.recv(found, self._process_of[source], group=self._groups[edge])
        except RuntimeError as error:
            raise PeerLostError(f"the connection between ranks {source} and {destination} failed: {error}") from error
        if not torch.equal(found, expected):
            theirs, ours = ", ".join(map(str, decode(found))), ", ".join(map(str, specs))
            raise BoundaryError(f"rank {source} sends {theirs}, but rank {destination} expects {ours}")

    def send(self, tensor: Tensor, peer: int) -> Transfer:
        """Start sending a tensor."""
        tensor = tensor.contiguous()
        group, process = self._groups[self._rank, peer], self._process_of[peer]
        return self._start("send", peer, tensor, lambda: dist.isend(tensor, process, group=group))

    def receive(self, spec: TensorSpec, peer: int) -> Transfer:
        """Start receiving a tensor into a fresh buffer."""
        buffer = spec.empty(self._device)
        group, process = self._groups[peer, self._rank], self._process_of[peer]
        return self._start("recv", peer, buffer, lambda: dist.irecv(buffer, process, group=group))

    def _start(self, direction: str, peer: int, tensor: Tensor, post: Callable[[], dist.Work | None]) -> Transfer:
        asked_s = time.perf_counter()  # before posting: the other side may have the tensor when that returns
        try:
            work = post()
        except RuntimeError as error:
            raise PeerLostError(f"rank {peer} went away: {error}") from error
        assert work is not None, "a process never sends to itself"
        if self._device.type == "cuda":
            return _StreamTransfer(work, tensor, direction == "recv", asked_s)
        lane = self._lanes.get((direction, peer))
        if lane is None:
            lane = self._lanes[direction, peer] = _Lane(direction, peer)
        return lane.add(work, tensor, asked_s)

    def close(self) -> None:
        """Let the lanes' threads end."""
        for lane in self._lanes.values():
            lane.end()


@dataclass
class _StreamTransfer:
    """A transfer that the device orders: whoever uses the tensor works behind it on the stream."""

    work: dist.Work
    tensor: Tensor | None
    is_receive: bool
    start_s: float
    end_s: float = 0.0

    def is_done(self) -> bool:
        if self.is_receive:
            self.work.wait()  # makes the current stream wait, not the host
        self.end_s = time.perf_counter()
        return True

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  the host never waits
        return self.is_done()

    def take(self) -> Tensor | None:
        tensor, self.tensor = self.tensor, None
        return tensor if self.is_receive else None


class _Lane:
    """One direction of one edge: a thread that waits for its transfers in their order."""

    def __init__(self, direction: str, peer: int) -> None:
        self._is_receive = direction == "recv"
        self._peer = peer
        self._queue: queue.SimpleQueue[tuple[dist.Work, Tensor, _ThreadTransfer] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"{direction} {peer}", daemon=True).start()

    def add(self, work: dist.Work, tensor: Tensor, asked_s: float) -> "_ThreadTransfer":
        transfer = _ThreadTransfer(asked_s)
        self._queue.put((work, tensor, transfer))
        return transfer

    def end(self) -> None:
        self._queue.put(None)

    def _serve(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, tensor, transfer = entry
            try:
                work.wait()
            except RuntimeError as error:
                transfer.fail(PeerLostError(f"rank {self._peer} went away: {error}"))
            else:
                transfer.finish(tensor if self._is_receive else None)
            del entry, work, tensor, transfer  # the queue may stay empty for long


class _ThreadTransfer:
    """A transfer that a lane's thread waits for."""

    def __init__(self, asked_s: float) -> None:
        self._done = threading.Event()
        self._tensor: Tensor | None = None
        self._error: PeerLostError | None = None
        self.start_s = self.end_s = asked_s

    def finish(self, tensor: Tensor | None) -> None:
        self._tensor = tensor
        self.end_s = time.perf_counter()
        self._done.set()

    def fail(self, error: PeerLostError) -> None:
        self._error = error
        self.finish(None)

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def take(self) -> Tensor | None:
        if self._error is not None:
            raise self._error
        tensor, self._tensor = self._tensor, None
        return tensor
