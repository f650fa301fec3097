"""This process among those of a run: rank, device, store and the control group."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLostError
from pipeloom.runs.action_log import NOTHING, Activity


@dataclass(frozen=True)
class World:
    """One process among those of a run.

    Attributes:
        rank: global rank.
        size: number of processes.
        device: of this process.
        store: key-value store of all processes.
        control: gloo group of all processes, for numbers and objects.
        timeout: of communication.
        activity: what exchanges of all processes are noted as.
    """

    rank: int
    size: int
    device: torch.device
    store: dist.Store
    control: dist.ProcessGroup
    timeout: timedelta
    activity: Activity = NOTHING

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """The element-wise sum over all processes.

        Raises:
            PeerLostError: another process ended, or the timeout passed; the same holds for the methods below.
        """
        # In float64 integers are exact up to 2 ** 53: numbers of parameters and votes are summed here, too.
        tensor = torch.tensor(numbers, dtype=torch.float64)
        with self.activity, _while("numbers were added up"):
            return self._sum_by_doubling(tensor).tolist()

    def _sum_by_doubling(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, by recursive doubling; changes ``tensor``.

        Gloo's all-reduce is a ring: 2 (n - 1) messages one after the other for n processes, which is seconds for 10,000
        of them. Here they are log2(n), and two more if n is no power of two: a rank from the largest such power on
        gives its numbers to a rank below, and receives the sum from it.
        """
        power = 1 << (self.size.bit_length() - 1)
        other, is_behind = self.rank ^ power, self.rank >= power
        peers = [] if is_behind else [self.rank ^ 1 << bit for bit in range(power.bit_length() - 1)]
        if other < self.size:
            peers.insert(0, other)
        # All before the first send: gloo sends a tensor when a message says that its receive is posted.
        parts = [torch.empty_like(tensor) for _ in peers]
        receives = [
            cast("dist.Work", dist.irecv(part, peer, self.control)) for part, peer in zip(parts, peers, strict=True)
        ]
        if is_behind:
            dist.send(tensor, other, self.control)
            receives[0].wait()
            return parts[0]
        for peer, part, receive in zip(peers, parts, receives, strict=True):
            # Two peers add the same two tensors, so all ranks have the same bits.
            sent = None if peer == other else dist.isend(tensor, peer, self.control)
            receive.wait()
            if sent is not None:
                sent.wait()
            tensor += part
        if other < self.size:
            dist.send(tensor, other, self.control)
        return tensor

    def gather(self, value: Any) -> list[Any] | None:
        """Every process's value by rank, on rank 0; ``None`` elsewhere."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.activity, _while("values were gathered"):
            dist.gather_object(value, values, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every process."""
        values = [value]
        with self.activity, _while("a value was sent to all"):
            dist.broadcast_object_list(values, 0, group=self.control)
        return values[0]

    def broadcast(self, value: int, source: int) -> int:
        """An integer of one process, on every process."""
        return self.broadcast_all([value], source)[0]

    def broadcast_all(self, values: Sequence[int], source: int) -> list[int]:
        """Integers of one process, on every process; the others give as many."""
        tensor = torch.tensor(values, dtype=torch.int64)
        with self.activity, _while("numbers were sent to all"):
            dist.broadcast(tensor, source, group=self.control)
        return tensor.tolist()

    def wait_for_all(self) -> None:
        """Barrier of all processes."""
        with self.activity, _while("all were waited for"):
            dist.barrier(group=self.control)

    def leave(self) -> None:
        """Close all groups; every process must call it."""
        # Destroying a group while other processes use it would end their communication.
        self.wait_for_all()
        dist.destroy_process_group()


@contextmanager
def peer_errors(what: str) -> Iterator[None]:
    """Context that converts errors of ``torch.distributed``: gloo reports a broken connection as a RuntimeError.

    Raises:
        PeerLostError: with ``what``.
    """
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"{what}: {network_reason(error)}") from error


def network_reason(error: RuntimeError) -> str:
    """What happened, from an error of ``torch.distributed``: without the library's file and line, and without advice.

    Examples:
        >>> network_reason(RuntimeError("[/w/gloo/pair.cc:5] Connection closed by peer. This is typically a crash."))
        'Connection closed by peer.'
    """
    return re.sub(r"^\[\S+:\d+\] ", "", str(error)).split(" This is typically")[0]


def _while(what: str) -> AbstractContextManager[None]:
    return peer_errors(f"a process exited, or did not answer in time, while {what}")


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this is rank 0, or the process that starts the ranks."""
    return int(os.environ.get("RANK", "0")) == 0 or not is_launched()


def launched_size() -> int:
    """Number of processes that the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def num_processes_here(num_processes: int) -> int:
    """Processes of this host, of ``num_processes`` in all."""
    # LOCAL_WORLD_SIZE is torchrun's; launchers that set only RANK are assumed to use one host.
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes)) if is_launched() else num_processes


def join_launched(device_type: str, timeout_s: float) -> World:
    """Join the processes of a launcher through the environment that it sets (``env://``)."""
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    # Launchers other than torchrun may not set it; then all ranks are assumed to be on one host.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return _join(store, rank, size, device_type, local_rank=local_rank, timeout_s=timeout_s)


def join_forked(store_file: Path, rank: int, size: int, device_type: str, timeout_s: float) -> World:
    """Join processes of one host through a shared file, without a port."""
    # Otherwise gloo resolves the host's name, which may be another address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(str(store_file), size)
    return _join(store, rank, size, device_type, local_rank=rank, timeout_s=timeout_s)


def _join(store: dist.Store, rank: int, size: int, device_type: str, *, local_rank: int, timeout_s: float) -> World:
    if device_type == "cuda":
        # Before the group is made: NCCL takes the current device.
        torch.cuda.set_device(local_rank)
    else:
        # PyTorch records the last 2,000 collectives of gloo, too, so the memory of a rank would grow for many steps.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    device = torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    # On the CPU for any device: numbers and objects need no stream and stay separate from the pipeline's messages.
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    return World(rank, size, device, store, control, timeout)
