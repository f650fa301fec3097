"""Implements EVICT, LOAD, OFFLOAD and RELOAD, serves ranks that evict to this one, and counts activation memory.

The row of a partner has no actions for this service: separate jobs accept evicted activations and return them,
concurrently with its compute.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.execute.communication.group import Finish, Job, already_done
from pipeloom.execute.communication.under_way import UnderWay
from pipeloom.execute.communication.wires import Evictions, Wires, evictions
from pipeloom.execute.lanes import Lanes
from pipeloom.execute.parts.compute import Keeper
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.saved import Packing, Parcel
from pipeloom.execute.stages.stage import Stage
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.kinds import LOAD_OF, MOVE_KINDS, PARTNER_MOVES

Key = tuple[int, ...]
"""Stage, micro-batch and slice of a move; at the partner also the number of the packing."""
Ranges = tuple[tuple[int, int], ...]
"""Byte ranges of the messages of a packing."""


def _key_of(action: Action) -> Key:
    assert action.microbatch is not None
    return action.stage, action.microbatch, action.slice


class Live:
    """Counter of activation bytes, with their peak; thread-safe, since lanes count, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def begin(self) -> None:
        """Before a step."""
        self._now = self.most = 0

    def add(self, nbytes: int) -> None:
        """Add bytes, or subtract them where negative."""
        with self._lock:
            self._now += nbytes
            self.most = max(self.most, self._now)


class Vault:
    """Memory that one lane stores and another one takes out.

    Args:
        waits: whether lanes are threads, so that ``until`` may block.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._changed = threading.Condition()
        self._kept: dict[Key, tuple[Tensor, Any]] = {}
        self._error: Exception | None = None
        self._num_begun = 0

    def begin(self) -> None:
        """Clear before a step, or after a failed one; jobs that still wait raise an error."""
        with self._changed:
            self._kept.clear()
            self._error = None
            self._num_begun += 1
            self._changed.notify_all()

    def put(self, key: Key, memory: Tensor, device: torch.device) -> None:
        """Store memory; on CUDA behind the work that the current stream has issued on it."""
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._changed:
            self._kept[key] = memory, event
            self._changed.notify_all()

    def watched(self, job: Job) -> Job:
        """Wrap a job that stores memory: if it fails, jobs that wait for its memory fail, too."""
        with self._noting():
            for finish in job:
                yield partial(self._watched, finish)

    def _watched(self, finish: Finish) -> bool:
        with self._noting():
            return finish()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise

    def until(self, key: Key) -> Finish:
        """Wait until memory is stored.

        Raises:
            RunError: in ``finish``, if the step has been aborted.
        """
        begun = self._num_begun

        def finish() -> bool:
            with self._changed:
                while self._waits and key not in self._kept and self._error is None and begun == self._num_begun:
                    self._changed.wait()
                if begun != self._num_begun:
                    raise RunError("the step was aborted")
                if self._error is not None:
                    raise self._error
                return key in self._kept

        return finish

    def fetch(self, key: Key, device: torch.device) -> Tensor:
        """Take memory out; on CUDA the current stream waits for the stream that stored it."""
        with self._changed:
            memory, event = self._kept.pop(key)
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
            if memory.is_cuda:
                # The allocator reuses memory in the order of the stream that made it; without this
                # it could hand it out while the current stream still reads.
                memory.record_stream(torch.cuda.current_stream(device))
        return memory


_ANNOUNCED = ("stage", "micro-batch", "slice", "packing", "messages of a packing that is new")
"""Contents of the announcement of a move by the evicting rank, ``int64[5]``."""


class Served:
    """Service of a rank for one that evicts to it.

    Args:
        wires: between the two.
        plan: evictions and loads of the other rank in a step.
        lanes: of this rank.
        evictor: the other rank.
        live: counter of this rank's activation bytes.
    """

    def __init__(self, wires: Wires, plan: Evictions, lanes: Lanes, evictor: int, live: Live) -> None:
        self._wires, self._plan, self._evictor, self._live = wires, plan, evictor, live
        self._device = lanes.device
        self._accepts, self._returns = (lanes.service(f"{name} {evictor}") for name in ("accept for", "return to"))
        self._vault = Vault(waits=lanes.waits)
        self._messages: dict[int, Ranges] = {}

    def begin(self) -> list[Service]:
        """Serve a step."""
        self._vault.begin()
        accepted = self._accepts.start(self._vault.watched(self._accept()))
        returned = self._returns.start(self._give_back())
        whose = f"serving rank {self._evictor}'s"
        return [Service(f"{whose} evictions", accepted), Service(f"{whose} loads", returned)]

    def forget(self) -> None:
        """Clear the state of a failed step."""
        self._vault.begin()
        self._messages.clear()

    def _accept(self) -> Job:
        wire = self._wires.evict
        for _ in range(self._plan.num_evictions):
            numbers = torch.empty(len(_ANNOUNCED), dtype=torch.int64)
            yield wire.expect(numbers)
            *key, packing, num_messages = numbers.tolist()
            if num_messages:
                ranges = torch.empty(num_messages, 2, dtype=torch.int64)
                yield wire.expect(ranges)
                # For later steps, too: the evicting rank announces the messages of a packing only once.
                self._messages[packing] = tuple((begin, end) for begin, end in ranges.tolist())
            messages = self._messages.get(packing, ())
            # Allocated after the announcement, so that only evicted activations take memory.
            memory = torch.empty(messages[-1][1] if messages else 0, dtype=torch.uint8, device=self._device)
            self._live.add(memory.numel())
            for begin, end in messages:
                yield wire.receive(memory[begin:end])
            self._vault.put((*key, packing), memory, self._device)
            # Otherwise the generator would hold it until the next eviction.
            del memory

    def _give_back(self) -> Job:
        wire = self._wires.load
        for _ in range(self._plan.num_loads):
            numbers = torch.empty(len(_ANNOUNCED), dtype=torch.int64)
            yield wire.expect(numbers)
            key = tuple(numbers.tolist()[:-1])
            yield self._vault.until(key)
            memory = self._vault.fetch(key, self._device)
            for begin, end in self._messages.get(key[-1], ()):
                yield wire.send(memory[begin:end])
            self._live.add(-memory.numel())
            del memory


class ActivationMoves(Part, Keeper):
    """Moves of activations of one rank.

    Args:
        schedule: contains the moves and the partners.
        rank: the pipeline rank.
        lanes: on which they run.
        wires: evicting rank -> this rank's ends of the wires.
        counts: whether to count activations that do not move, too; the first micro-batch of each stage is measured.

    Raises:
        UserError: the schedule evicts but has no partners.
    """

    kinds = MOVE_KINDS
    waits_by_itself = True

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        lanes: Lanes,
        wires: Mapping[int, Wires],
        *,
        counts: bool = True,
    ) -> None:
        row = schedule.rows[rank]
        self.partner = None if schedule.partners is None else schedule.partners[rank]
        self._moved = {_key_of(action) for action in row if action.kind in LOAD_OF}
        self._recomputed = {_key_of(action) for action in row if action.kind is Kind.RECOMPUTE}
        self._lanes = {kind: lanes.lane(kind.value) for kind in MOVE_KINDS if row.is_kind(kind).any()}
        self._device, self._counts = lanes.device, counts
        self._live = Live()
        plans = evictions(schedule)
        self._wires = wires[rank] if rank in plans else None
        self._served = [
            Served(wires[other], plan, lanes, other, self._live)
            for other, plan in plans.items()
            if plan.partner == rank
        ]
        self._away = Vault(waits=lanes.waits)
        self._parcels: dict[Key, Parcel] = {}
        # By portion, and by the number of the stage what its caches take.
        self._held: dict[Key | int, int] = {}
        self._saved_bytes: dict[tuple[int, int], int] = {}
        self._number_of: dict[Packing, int] = {}

    def held(self) -> Held:
        """Peak of activation bytes, own ones and accepted ones."""
        return Held(live_bytes=self._live.most)

    def other_end(self, row: RankRow, slot: int) -> str:
        """The partner or the host, as text."""
        return f"rank {self.partner}" if row.actions[slot].kind in PARTNER_MOVES else "the memory of the host"

    def begin(self, row: RankRow) -> list[Service]:  # noqa: ARG002
        """Before a step: start the services for the ranks that evict to this one."""
        self._parcels.clear()
        self._held.clear()
        self._away.begin()
        self._live.begin()
        return [service for served in self._served for service in served.begin()]

    def parcel(self, action: Action, *, owns_input: bool) -> Parcel | None:
        """Container for the tensors that a forward or recomputation saves, if they move or are counted."""
        key, place = _key_of(action), (action.stage, action.slice)
        # All micro-batches of a stage save tensors of the same sizes, so one is measured for all.
        is_known = place in self._saved_bytes and not self._keeps_input(action)
        if not self._moves(action) and (is_known or not self._counts):
            return None
        parcel = self._parcels[key] = Parcel(owns_input=owns_input)
        return parcel

    def _keeps_input(self, action: Action) -> bool:
        """Whether a forward keeps only its input, since it will be recomputed."""
        return action.kind is Kind.FORWARD and _key_of(action) in self._recomputed

    def _moves(self, action: Action) -> bool:
        """Whether activations of an action move; those of a recomputation do not."""
        return action.kind is Kind.FORWARD and _key_of(action) in self._moved

    def after_forward(self, action: Action, stage: Stage) -> None:
        """Count the activations of a forward or recomputation."""
        key, place = _key_of(action), (action.stage, action.slice)
        parcel = self._parcels.get(key) if self._moves(action) else self._parcels.pop(key, None)
        nbytes = self._saved_bytes.get(place, 0) if parcel is None else parcel.nbytes
        if parcel is not None and not self._keeps_input(action):
            self._saved_bytes[place] = nbytes
        self._hold(key, nbytes)
        self._hold(stage.index, stage.cached_bytes)

    def before_backward(self, action: Action) -> None:
        """Release the container, so that the backward frees one tensor after the other."""
        self._parcels.pop(_key_of(action), None)

    def after_backward(self, action: Action, stage: Stage) -> None:
        """Subtract activations that are freed."""
        self._hold(_key_of(action), 0)
        self._hold(stage.index, stage.cached_bytes)

    def after_input_gradient(self, action: Action, pending_bytes: int) -> None:
        """Count what an input gradient keeps for the weight gradient."""
        self._hold(_key_of(action), pending_bytes)

    def _hold(self, what: Key | int, nbytes: int) -> None:
        """Set the bytes that a micro-batch or slice holds, or the caches of a stage."""
        if self._counts:
            self._live.add(nbytes - self._held.pop(what, 0))
            self._held[what] = nbytes

    def start(self, row: RankRow, slot: int) -> UnderWay:
        """Start a move on its lane."""
        action = row.actions[slot]
        return self._lanes[action.kind].start(self._job(action, self._parcels[_key_of(action)]))

    def _job(self, action: Action, parcel: Parcel) -> Job:
        match action.kind:
            case Kind.EVICT:
                return self._away.watched(self._evict(action, parcel, *self._numbered(parcel.packing)))
            case Kind.LOAD:
                return self._load(action, parcel, self._number_of[parcel.packing])
            case Kind.OFFLOAD:
                return self._away.watched(self._offload(action, parcel))
            case _:
                return self._reload(action, parcel)

    def forget(self) -> None:
        """Clear the state of a failed step."""
        self._parcels.clear()
        self._number_of.clear()
        self._away.begin()
        for served in self._served:
            served.forget()

    def _numbered(self, packing: Packing) -> tuple[int, Ranges]:
        """The number of a packing, and the byte ranges to announce: all at its first use, none later.

        Stages and slices that save tensors of equal sizes share a packing.
        """
        is_new = packing not in self._number_of
        return self._number_of.setdefault(packing, len(self._number_of)), packing.messages if is_new else ()

    def _evict(self, action: Action, parcel: Parcel, number: int, new: Ranges) -> Job:
        assert self._wires is not None
        wire = self._wires.evict
        yield wire.announce(torch.tensor([*_key_of(action), number, len(new)], dtype=torch.int64))
        if new:
            yield wire.announce(torch.tensor(new, dtype=torch.int64))
        for message in parcel.messages(self._live.add):
            # A generator keeps its variables while it waits, so the sent tensor would stay in memory until the next
            # message.
            sending = wire.send(message)
            del message
            yield sending
            del sending
        # An empty entry: the load waits for it as the end of the eviction.
        self._away.put(_key_of(action), torch.empty(0), self._device)

    def _load(self, action: Action, parcel: Parcel, number: int) -> Job:
        assert self._wires is not None
        yield self._away.until(_key_of(action))
        self._away.fetch(_key_of(action), self._device)
        yield self._wires.load.announce(torch.tensor([*_key_of(action), number, 0], dtype=torch.int64))
        memory = self._room_for(parcel)
        for begin, end in parcel.packing.messages:
            yield self._wires.load.receive(memory[begin:end])
        parcel.restore(memory)

    def _offload(self, action: Action, parcel: Parcel) -> Job:
        is_cuda = self._device.type == "cuda"
        # CUDA copies concurrently with compute only to and from pinned host memory.
        memory = torch.empty(parcel.packing.total_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        for begin, piece in parcel.pieces():
            memory[begin : begin + piece.numel()].copy_(piece, non_blocking=is_cuda)
            self._live.add(-piece.numel())
            del piece
        self._away.put(_key_of(action), memory, self._device)
        yield already_done

    def _reload(self, action: Action, parcel: Parcel) -> Job:
        yield self._away.until(_key_of(action))
        away = self._away.fetch(_key_of(action), self._device)
        memory = self._room_for(parcel)
        memory.copy_(away, non_blocking=self._device.type == "cuda")
        parcel.restore(memory)

    def _room_for(self, parcel: Parcel) -> Tensor:
        self._live.add(parcel.nbytes)
        return torch.empty(parcel.packing.total_bytes, dtype=torch.uint8, device=self._device)
