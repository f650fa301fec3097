"""What EVICT, LOAD, OFFLOAD and RELOAD do on a rank, what it does for ranks that evict to it, and what is held."""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeloom.execute.clock import Clock
from pipeloom.execute.collectives import Finish, Job
from pipeloom.execute.lanes import Collective, Lane, Neighborhood, StreamLane, ThreadLane
from pipeloom.execute.saved import Packing, Parcel
from pipeloom.execute.wires import Wires, evictions
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.action import LOAD_OF, SWAP_KINDS


class SwapLanes(Protocol):
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


class InProcessSwapLanes:
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
        return self._lanes.lane(self._clock, is_eager=True)


class ProcessSwapLanes:
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
        is_cuda = self.device.type == "cuda"
        return ThreadLane(self._clock, name, torch.cuda.Stream(self.device) if is_cuda else None)


class Live:
    """Bytes that are held for backwards, both halves of them, now and at most; lanes' threads count, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0

    def begin(self) -> None:
        """Before a step."""
        self._now = self.most = 0

    def add(self, nbytes: int) -> None:
        """More are held, or, where negative, fewer."""
        with self._lock:
            self._now += nbytes
            self.most = max(self.most, self._now)


class Vault:
    """Memory that one lane puts aside and another fetches.

    Args:
        waits: whether lanes run in threads of their own.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, ...], tuple[Tensor, Any]] = {}
        self._error: Exception | None = None

    def begin(self) -> None:
        """Before a step, or after one that failed."""
        with self._changed:
            self._kept.clear()
            self._error = None

    def put(self, key: tuple[int, ...], memory: Tensor, device: torch.device) -> None:
        """Put memory aside; on CUDA, what the current stream does to it until now counts."""
        event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._changed:
            self._kept[key] = memory, event
            self._changed.notify_all()

    def watched(self, job: Job) -> Job:
        """A job that puts things here: if it fails, nobody waits for what it would have brought."""
        try:
            for finish in job:
                yield self._watched(finish)
        except Exception as error:
            self._fail(error)
            raise

    def _watched(self, finish: Finish) -> Finish:
        def watched() -> bool:
            try:
                return finish()
            except Exception as error:
                self._fail(error)
                raise

        return watched

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def until(self, key: tuple[int, ...]) -> Finish:
        """Wait until something is there."""

        def finish() -> bool:
            with self._changed:
                while self._waits and key not in self._kept and self._error is None:
                    self._changed.wait()
                if self._error is not None:
                    raise self._error
                return key in self._kept

        return finish

    def fetch(self, key: tuple[int, ...], device: torch.device) -> Tensor:
        """Take it out; on CUDA the current stream works behind who put it there."""
        with self._changed:
            memory, event = self._kept.pop(key)
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
            if memory.is_cuda:
                memory.record_stream(torch.cuda.current_stream(device))
        return memory


class Swaps:
    """The swaps of one rank.

    Args:
        schedule: tells what is swapped, and who evicts to whom.
        rank: the pipeline rank.
        lanes: what swaps run on.
        wires: this rank's ends of wires, by the rank that evicts.
        counts: whether parts that are not swapped are counted as well: the first one of each stage is then looked at.

    Raises:
        UserError: the schedule evicts, but does not say to whom.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        lanes: SwapLanes,
        wires: Mapping[int, Wires],
        *,
        counts: bool = True,
    ) -> None:
        row = schedule.rows[rank]
        kinds = [kind for kind in SWAP_KINDS if row.is_kind(kind).any()]
        self.partner = None if schedule.partners is None else schedule.partners[rank]
        self._swapped = {_key(action) for action in row if action.kind in LOAD_OF}
        self._recomputed = {_key(action) for action in row if action.kind is Kind.RECOMPUTE}
        self._lanes = {kind: lanes.of_kind(kind) for kind in kinds}
        self._device, self._counts = lanes.device, counts
        plans = evictions(schedule)
        self._wires = wires[rank] if rank in plans else None
        self._served = [Served(wires[other], plan, lanes, other) for other, plan in plans.items() if plan[0] == rank]
        self._away = Vault(waits=lanes.waits)
        self._parcels: dict[tuple[int, int, int], Parcel] = {}
        self._held: dict[tuple[int, int, int], int] = {}
        self._saved_bytes: dict[tuple[int, int], int] = {}
        self._told: dict[Packing, int] = {}
        self._live = Live()

    @property
    def most_bytes(self) -> int:
        """The most bytes held for backwards in the last step, own ones and those of ranks that evict to this one."""
        return self._live.most

    def other_end(self, kind: Kind) -> str:
        """With whom an action of some kind works, for people."""
        return "the memory of the host" if kind in (Kind.OFFLOAD, Kind.RELOAD) else f"rank {self.partner}"

    def begin(self) -> list[Collective]:
        """Before a step: serve the ranks that evict to this one; what is to end with the step."""
        self._parcels.clear()
        self._held.clear()
        self._away.begin()
        self._live.begin()
        return [service for served in self._served for service in served.begin(self._live)]

    def parcel(self, action: Action, *, owns_input: bool) -> Parcel | None:
        """What takes the tensors that a forward, the first or a second one, saves, if somebody has to know them."""
        key, place = _key(action), (action.stage, action.slice)
        is_known = place in self._saved_bytes and not self._keeps_input(action)
        if not self._moves(action) and (is_known or not self._counts):
            return None
        parcel = self._parcels[key] = Parcel(owns_input=owns_input)
        return parcel

    def _keeps_input(self, action: Action) -> bool:
        """Whether a forward keeps its input only, for a second one."""
        return action.kind is Kind.FORWARD and _key(action) in self._recomputed

    def _moves(self, action: Action) -> bool:
        """Whether what a forward keeps is moved; what a second one makes is not."""
        return action.kind is Kind.FORWARD and _key(action) in self._swapped

    def after_forward(self, action: Action) -> None:
        """A part has gone forward, or forward again."""
        key, place = _key(action), (action.stage, action.slice)
        parcel = self._parcels.get(key) if self._moves(action) else self._parcels.pop(key, None)
        nbytes = self._saved_bytes.get(place, 0) if parcel is None else parcel.nbytes
        if parcel is not None and not self._keeps_input(action):
            self._saved_bytes[place] = nbytes
        self._live.add(nbytes - self._held.get(key, 0))
        self._held[key] = nbytes

    def before_backward(self, action: Action) -> None:
        """A part's backward begins, which lets go of one tensor after the other."""
        self._parcels.pop(_key(action), None)

    def after_backward(self, action: Action) -> None:
        """A part is done, or what its forward kept is not needed any more."""
        self._live.add(-self._held.pop(_key(action), 0))

    def after_input_gradient(self, action: Action, pending_bytes: int) -> None:
        """The first half of a part's backward left so much for the second one, after which ``after_backward`` comes."""
        if self._counts:
            self._live.add(pending_bytes)
            self._held[_key(action)] = pending_bytes

    def start(self, action: Action) -> Collective:
        """Start what an action does, on its lane."""
        return self._lanes[action.kind].start(self._job(action, self._parcels[_key(action)]))

    def _job(self, action: Action, parcel: Parcel) -> Job:
        match action.kind:
            case Kind.EVICT:
                is_new = parcel.packing not in self._told
                self._told.setdefault(parcel.packing, len(self._told))
                return self._away.watched(self._evict(action, parcel, is_new=is_new))
            case Kind.LOAD:
                return self._load(action, parcel)
            case Kind.OFFLOAD:
                return self._away.watched(self._offload(action, parcel))
            case _:
                return self._reload(action, parcel)

    def forget(self) -> None:
        """Drop what a failed step left behind."""
        self._parcels.clear()
        self._told.clear()
        self._away.begin()
        for served in self._served:
            served.forget()

    def close(self) -> None:
        """Let go of the lanes."""
        for lane in self._lanes.values():
            lane.close()
        for served in self._served:
            served.close()

    def _evict(self, action: Action, parcel: Parcel, *, is_new: bool) -> Job:
        assert self._wires is not None
        wire, packing = self._wires.evict, parcel.packing
        yield wire.announce(_numbers(action, self._told[packing], len(packing.messages) if is_new else 0))
        if is_new and packing.messages:
            yield wire.announce(torch.tensor(packing.messages, dtype=torch.int64))
        for message in parcel.messages(self._live.add):
            sending = wire.send(message)
            del message
            yield sending
            del sending
        self._away.put(_key(action), torch.empty(0), self._device)

    def _load(self, action: Action, parcel: Parcel) -> Job:
        assert self._wires is not None
        yield self._away.until(_key(action))
        self._away.fetch(_key(action), self._device)
        yield self._wires.load.announce(_numbers(action, self._told[parcel.packing], 0))
        memory = self._room_for(parcel)
        for begin, end in parcel.packing.messages:
            yield self._wires.load.receive(memory[begin:end])
        parcel.restore(memory)

    def _offload(self, action: Action, parcel: Parcel) -> Job:
        is_cuda = self._device.type == "cuda"
        memory = torch.empty(parcel.packing.total_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        for begin, piece in parcel.pieces():
            memory[begin : begin + piece.numel()].copy_(piece, non_blocking=is_cuda)
            self._live.add(-piece.numel())
            del piece
        self._away.put(_key(action), memory, self._device)
        yield _done

    def _reload(self, action: Action, parcel: Parcel) -> Job:
        yield self._away.until(_key(action))
        away = self._away.fetch(_key(action), self._device)
        memory = self._room_for(parcel)
        memory.copy_(away, non_blocking=self._device.type == "cuda")
        parcel.restore(memory)

    def _room_for(self, parcel: Parcel) -> Tensor:
        self._live.add(parcel.nbytes)
        return torch.empty(parcel.packing.total_bytes, dtype=torch.uint8, device=self._device)


class Served:
    """What a rank does for one that evicts to it: no action of its own row, beside its compute.

    Args:
        wires: between the two.
        plan: this rank, and how often the other one evicts and loads in a step.
        lanes: what this runs on.
        evictor: the other rank.
    """

    def __init__(self, wires: Wires, plan: tuple[int, int, int], lanes: SwapLanes, evictor: int) -> None:
        self._wires = wires
        _, self._num_evictions, self._num_loads = plan
        self._device = lanes.device
        self._accepts, self._returns = (lanes.service(f"{name} {evictor}") for name in ("accept for", "return to"))
        self._vault = Vault(waits=lanes.waits)
        self._messages: dict[int, tuple[tuple[int, int], ...]] = {}

    def begin(self, live: Live) -> list[Collective]:
        """Serve a step."""
        self._vault.begin()
        return [
            self._accepts.start(self._vault.watched(self._accept(live))),
            self._returns.start(self._give_back(live)),
        ]

    def forget(self) -> None:
        """Drop what a failed step left behind."""
        self._vault.begin()
        self._messages.clear()

    def close(self) -> None:
        """Let go of the lanes."""
        self._accepts.close()
        self._returns.close()

    def _accept(self, live: Live) -> Job:
        wire = self._wires.evict
        for _ in range(self._num_evictions):
            numbers = torch.empty(_NUM_NUMBERS, dtype=torch.int64)
            yield wire.expect(numbers)
            *key, packing, num_messages = numbers.tolist()
            if num_messages:
                ranges = torch.empty(num_messages, 2, dtype=torch.int64)
                yield wire.expect(ranges)
                self._messages[packing] = tuple((begin, end) for begin, end in ranges.tolist())
            messages = self._messages.get(packing, ())
            memory = torch.empty(_behind(messages), dtype=torch.uint8, device=self._device)
            live.add(memory.numel())
            for begin, end in messages:
                yield wire.receive(memory[begin:end])
            self._vault.put((*key, packing), memory, self._device)
            del memory

    def _give_back(self, live: Live) -> Job:
        wire = self._wires.load
        for _ in range(self._num_loads):
            numbers = torch.empty(_NUM_NUMBERS, dtype=torch.int64)
            yield wire.expect(numbers)
            key = tuple(numbers.tolist()[:-1])
            yield self._vault.until(key)
            memory = self._vault.fetch(key, self._device)
            for begin, end in self._messages.get(key[-1], ()):
                yield wire.send(memory[begin:end])
            live.add(-memory.numel())
            del memory


_NUM_NUMBERS = 5


def _numbers(action: Action, packing: int, num_messages: int) -> Tensor:
    """What is announced of an action: what it is about, how it is packed, and how many messages that is, if new."""
    return torch.tensor([*_key(action), packing, num_messages], dtype=torch.int64)


def _key(action: Action) -> tuple[int, int, int]:
    assert action.microbatch is not None
    return action.stage, action.microbatch, action.slice


def _behind(messages: tuple[tuple[int, int], ...]) -> int:
    return messages[-1][1] if messages else 0


def _done() -> bool:
    return True
