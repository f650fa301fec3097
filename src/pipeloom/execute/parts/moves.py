"""What EVICT, LOAD, OFFLOAD and RELOAD do on a rank, and what it holds for backwards."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeloom.execute.communication.collectives import Job, already_done
from pipeloom.execute.communication.wires import Wires, evictions
from pipeloom.execute.lanes import JobUnderWay, MoveLanes
from pipeloom.execute.parts.compute import Keeper
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.parts.partner import Served, announcement, key_of
from pipeloom.execute.parts.vault import Live, Vault
from pipeloom.execute.stages.saved import Packing, Parcel
from pipeloom.execute.stages.stage import Stage
from pipeloom.schedule import Action, Kind, Schedule
from pipeloom.schedule.kinds import LOAD_OF, MOVE_KINDS


class ActivationMoves(Part, Keeper):
    """The moves of one rank.

    Args:
        schedule: contains the moves, and who evicts to whom.
        rank: the pipeline rank.
        lanes: what they run on.
        wires: this rank's ends of wires, by the rank that evicts.
        counts: whether parts that do not move are counted as well: the first one of each stage is then looked at.

    Raises:
        UserError: the schedule evicts, but does not say to whom.
    """

    kinds = MOVE_KINDS
    waits_by_itself = True

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        lanes: MoveLanes,
        wires: Mapping[int, Wires],
        *,
        counts: bool = True,
    ) -> None:
        row = schedule.rows[rank]
        kinds = [kind for kind in MOVE_KINDS if row.is_kind(kind).any()]
        self.partner = None if schedule.partners is None else schedule.partners[rank]
        self._moved = {key_of(action) for action in row if action.kind in LOAD_OF}
        self._recomputed = {key_of(action) for action in row if action.kind is Kind.RECOMPUTE}
        self._lanes = {kind: lanes.of_kind(kind) for kind in kinds}
        self._device, self._counts = lanes.device, counts
        plans = evictions(schedule)
        self._wires = wires[rank] if rank in plans else None
        others = {other: plan for other, plan in plans.items() if plan.partner == rank}
        self._served = [Served(wires[other], plan, lanes, other) for other, plan in others.items()]
        self._away = Vault(waits=lanes.waits)
        self._parcels: dict[tuple[int, int, int], Parcel] = {}
        self._held: dict[tuple[int, int, int] | int, int] = {}
        self._saved_bytes: dict[tuple[int, int], int] = {}
        self._told: dict[Packing, int] = {}
        self._live = Live()

    def held(self) -> Held:
        """Bytes held for backwards, own ones and those of ranks that evict to this one."""
        return Held(live_bytes=self._live.most)

    def other_end(self, row: RankRow, slot: int) -> str:
        """With whom a move works, for people."""
        return f"rank {self.partner}" if row.actions[slot].kind in (Kind.EVICT, Kind.LOAD) else "the memory of the host"

    def begin(self, row: RankRow) -> list[Service]:  # noqa: ARG002
        """Before a step: serve the ranks that evict to this one; what is to end with the step."""
        self._parcels.clear()
        self._held.clear()
        self._away.begin()
        self._live.begin()
        return [service for served in self._served for service in served.begin(self._live)]

    def parcel(self, action: Action, *, owns_input: bool) -> Parcel | None:
        """What takes the tensors that a forward, the first or a second one, saves, if somebody has to know them."""
        key, place = key_of(action), (action.stage, action.slice)
        # Every micro-batch of a stage saves tensors of the same sizes, so one of them is counted for all.
        is_known = place in self._saved_bytes and not self._keeps_input(action)
        if not self._moves(action) and (is_known or not self._counts):
            return None
        parcel = self._parcels[key] = Parcel(owns_input=owns_input)
        return parcel

    def _keeps_input(self, action: Action) -> bool:
        """Whether a forward keeps its input only, for a second one."""
        return action.kind is Kind.FORWARD and key_of(action) in self._recomputed

    def _moves(self, action: Action) -> bool:
        """Whether what a forward keeps is moved; what a second one makes is not."""
        return action.kind is Kind.FORWARD and key_of(action) in self._moved

    def after_forward(self, action: Action, stage: Stage) -> None:
        """Count what a portion keeps that has gone forward, or forward again."""
        key, place = key_of(action), (action.stage, action.slice)
        parcel = self._parcels.get(key) if self._moves(action) else self._parcels.pop(key, None)
        nbytes = self._saved_bytes.get(place, 0) if parcel is None else parcel.nbytes
        if parcel is not None and not self._keeps_input(action):
            self._saved_bytes[place] = nbytes
        self._hold(key, nbytes)
        self._hold(stage.index, stage.cached_bytes)

    def before_backward(self, action: Action) -> None:
        """Let go of a portion's parcel, so that its backward frees one tensor after the other."""
        self._parcels.pop(key_of(action), None)

    def after_backward(self, action: Action, stage: Stage) -> None:
        """Count what a portion does not keep any more."""
        self._hold(key_of(action), 0)
        self._hold(stage.index, stage.cached_bytes)

    def after_input_gradient(self, action: Action, pending_bytes: int) -> None:
        """Count what the first half of a portion's backward left for the second one."""
        self._hold(key_of(action), pending_bytes)

    def _hold(self, what: tuple[int, int, int] | int, nbytes: int) -> None:
        """Count what is held of a portion now, or of the caches of a stage."""
        if self._counts:
            self._live.add(nbytes - self._held.pop(what, 0))
            self._held[what] = nbytes

    def start(self, row: RankRow, slot: int) -> JobUnderWay:
        """Start a move on its lane."""
        action = row.actions[slot]
        return self._lanes[action.kind].start(self._job(action, self._parcels[key_of(action)]))

    def _job(self, action: Action, parcel: Parcel) -> Job:
        match action.kind:
            case Kind.EVICT:
                # Stages and slices that save alike share a packing: it is announced once, then named by a number.
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
        yield wire.announce(announcement(action, self._told[packing], len(packing.messages) if is_new else 0))
        if is_new and packing.messages:
            yield wire.announce(torch.tensor(packing.messages, dtype=torch.int64))
        for message in parcel.messages(self._live.add):
            # A generator keeps its variables while it waits: what was sent would stay in memory until the next message.
            sending = wire.send(message)
            del message
            yield sending
            del sending
        # Nothing is kept here: the load waits for this mark of the eviction's end.
        self._away.put(key_of(action), torch.empty(0), self._device)

    def _load(self, action: Action, parcel: Parcel) -> Job:
        assert self._wires is not None
        yield self._away.until(key_of(action))
        self._away.fetch(key_of(action), self._device)
        yield self._wires.load.announce(announcement(action, self._told[parcel.packing], 0))
        memory = self._room_for(parcel)
        for begin, end in parcel.packing.messages:
            yield self._wires.load.receive(memory[begin:end])
        parcel.restore(memory)

    def _offload(self, action: Action, parcel: Parcel) -> Job:
        is_cuda = self._device.type == "cuda"
        # CUDA copies beside compute only to and from memory of the host that is pinned.
        memory = torch.empty(parcel.packing.total_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        for begin, piece in parcel.pieces():
            memory[begin : begin + piece.numel()].copy_(piece, non_blocking=is_cuda)
            self._live.add(-piece.numel())
            del piece
        self._away.put(key_of(action), memory, self._device)
        yield already_done

    def _reload(self, action: Action, parcel: Parcel) -> Job:
        yield self._away.until(key_of(action))
        away = self._away.fetch(key_of(action), self._device)
        memory = self._room_for(parcel)
        memory.copy_(away, non_blocking=self._device.type == "cuda")
        parcel.restore(memory)

    def _room_for(self, parcel: Parcel) -> Tensor:
        self._live.add(parcel.nbytes)
        return torch.empty(parcel.packing.total_bytes, dtype=torch.uint8, device=self._device)
