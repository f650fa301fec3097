"""Wires between an evicting rank and its partner, one for evictions and one for loads.

The evicting rank announces each move, then bytes are sent: to the partner on the wire of evictions, back on that of
loads. So the partner allocates memory only when a move begins.
"""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import BoundaryError, UserError
from pipeloom.execute.communication.group import Finish, already_done
from pipeloom.execute.processes.world import World, peer_errors
from pipeloom.schedule import Schedule
from pipeloom.schedule.kinds import PARTNER_MOVES

_UNTIL_IT_COMES = timedelta(days=30)
"""Limit of the wait for an announcement, which may take long and blocks no compute. Other waits of the rank have their
own limit, and a broken connection ends this one at once."""
_SAID = 32
"""Most announcements in progress that a host on CUDA does not wait for."""


class Wire:
    """One end of a wire: ``int64`` numbers on the CPU, ``uint8`` bytes on the device, which must not change until sent.

    Args:
        numbers: gloo group of the two, for announcements.
        tensors: group of the two for bytes; on gloo the same.
        peer: index of the other rank in both.
        device: of the bytes.
    """

    def __init__(self, numbers: dist.ProcessGroup, tensors: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.device = device
        self._numbers, self._tensors, self._peer = numbers, tensors, peer
        self._said: deque[tuple[dist.Work, Tensor]] = deque()

    def announce(self, numbers: Tensor) -> Finish:
        """Send numbers; on CUDA the host does not wait, and the tensor is kept until it has been received."""
        work = _posted(lambda: dist.isend(numbers, group=self._numbers, group_dst=self._peer))
        if self.device.type != "cuda":
            return _end_of(work)
        self._said.append((work, numbers))
        if len(self._said) > _SAID:
            self._said.popleft()[0].wait()  # received long ago
        return already_done

    def expect(self, numbers: Tensor) -> Finish:
        """Receive an announcement."""
        work = _posted(lambda: dist.irecv(numbers, group=self._numbers, group_src=self._peer))
        return _end_of(work, _UNTIL_IT_COMES)

    def send(self, tensor: Tensor) -> Finish:
        """Start sending."""
        return _end_of(_posted(lambda: dist.isend(tensor, group=self._tensors, group_dst=self._peer)))

    def receive(self, tensor: Tensor) -> Finish:
        """Start receiving."""
        return _end_of(_posted(lambda: dist.irecv(tensor, group=self._tensors, group_src=self._peer)))


class Wires(NamedTuple):
    """A rank's ends of the wires between one evicting rank and its partner."""

    evict: Wire
    load: Wire


class Evictions(NamedTuple):
    """Partner and number of moves of an evicting rank in a step."""

    partner: int
    num_evictions: int
    num_loads: int


def evictions(schedule: Schedule) -> dict[int, Evictions]:
    """Evictions of each rank that evicts.

    Raises:
        UserError: a rank that evicts has no partner other than itself.
    """
    found: dict[int, Evictions] = {}
    for rank, row in enumerate(schedule.rows):
        num_evictions, num_loads = (int(row.is_kind(kind).sum()) for kind in PARTNER_MOVES)
        if num_evictions:
            if schedule.partners is None or schedule.partners[rank] == rank:
                raise UserError(
                    f"rank {rank} evicts, but the schedule has no rank to evict to: partners has to name another"
                )
            found[rank] = Evictions(schedule.partners[rank], num_evictions, num_loads)
    return found


def make_wires(schedule: Schedule, rank: int, world: World, pipelines: Sequence[Sequence[int]]) -> dict[int, Wires]:
    """A rank's ends of all wires, by evicting rank.

    Every process makes the groups of all replicas in the same order, then uses its own once, so that no connection is
    made lazily. A wire has its own group, on CUDA a second one for announcements, which are host tensors.

    Args:
        schedule: contains the evictions.
        rank: of this process in its pipeline.
        world: this process among the others.
        pipelines: for each replica of the pipeline its processes.

    Raises:
        PeerLostError: another process ended.
        BoundaryError: the two ends of a wire run different schedules.
    """
    found: dict[int, Wires] = {}
    for evictor, plan in evictions(schedule).items():
        # A group for each direction: NCCL runs the operations of a group in
        # order, so a load would wait for evictions.
        ends = [_open(evictor, plan.partner, world, pipelines) for _ in Wires._fields]
        own = [wire for wire in ends if wire is not None]
        if own:  # this rank is one of the two
            found[evictor] = Wires(*own)
            for wire in own:
                _exercise(wire, plan, is_evictor=rank == evictor)
    return found


def _open(evictor: int, partner: int, world: World, pipelines: Sequence[Sequence[int]]) -> Wire | None:
    own: Wire | None = None
    # Every process must call ``new_group``, member or not, and all in the same order (its documentation).
    for ranks in pipelines:
        pair = sorted([ranks[evictor], ranks[partner]])  # as their places in the group are
        numbers = dist.new_group(pair, timeout=world.timeout, backend="gloo")
        # gloo matches sends and receives of two processes in their order, so one group is enough.
        tensors = numbers
        if world.device.type == "cuda":
            tensors = dist.new_group(pair, timeout=world.timeout, backend="nccl")
        if world.rank in pair:
            assert isinstance(numbers, dist.ProcessGroup)
            assert isinstance(tensors, dist.ProcessGroup)
            # ``group_dst`` and ``group_src`` count inside the group, which has two.
            own = Wire(numbers, tensors, 1 - pair.index(world.rank), world.device)
    return own


def _exercise(wire: Wire, plan: Evictions, *, is_evictor: bool) -> None:
    """Announce the number of moves, and compare; then send a byte."""
    # A partner with another schedule would wait forever; this finds it before the first step.
    expected = torch.tensor(plan, dtype=torch.int64)
    byte = torch.zeros(1, dtype=torch.uint8, device=wire.device)
    if is_evictor:
        wire.announce(expected)()
        wire.send(byte)()
        return
    found = torch.zeros_like(expected)
    wire.expect(found)()
    wire.receive(byte)()
    if not torch.equal(found, expected):
        plans = (Evictions(*numbers.tolist()) for numbers in (found, expected))
        announced, own = (f"{one.num_evictions} evictions and {one.num_loads} loads" for one in plans)
        raise BoundaryError(f"a rank announces {announced} a step, but its partner expects {own}")


def _posted(post: Callable[[], dist.Work | None]) -> dist.Work:
    with peer_errors("the partner of evictions closed the connection"):
        work = post()
    assert work is not None, "a process never sends to itself"
    return work


def _end_of(work: dist.Work, timeout: timedelta | None = None) -> Finish:
    # A list, so that the closure can drop the message.
    under_way = [work]  # with the message, which is dropped at its end

    def finish() -> bool:
        with peer_errors("the partner of evictions closed the connection, or did not answer in time"):
            if under_way:
                under_way.pop().wait(*(() if timeout is None else (timeout,)))
        return True

    return finish
