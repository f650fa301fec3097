"""What a rank does for one that evicts to it, and what the two tell each other."""

import torch
from torch import Tensor

from pipeloom.execute.communication.collectives import Job
from pipeloom.execute.communication.wires import Evictions, Wires
from pipeloom.execute.lanes import MoveLanes
from pipeloom.execute.parts.part import Service
from pipeloom.execute.parts.vault import Live, Vault
from pipeloom.schedule import Action

_NUM_NUMBERS = 5


def announcement(action: Action, packing: int, num_messages: int) -> Tensor:
    """What is announced of an action: what it is about, how it is packed, and how many messages that is, if new."""
    return torch.tensor([*key_of(action), packing, num_messages], dtype=torch.int64)


def key_of(action: Action) -> tuple[int, int, int]:
    """What an action is about: stage, micro-batch, slice."""
    assert action.microbatch is not None
    return action.stage, action.microbatch, action.slice


def _behind(messages: tuple[tuple[int, int], ...]) -> int:
    return messages[-1][1] if messages else 0


class Served:
    """What a rank does for one that evicts to it: no action of its own row, beside its compute.

    Args:
        wires: between the two.
        plan: what the other one does in a step.
        lanes: what this runs on.
        evictor: the other rank.
    """

    def __init__(self, wires: Wires, plan: Evictions, lanes: MoveLanes, evictor: int) -> None:
        self._wires = wires
        self._plan = plan
        self._evictor = evictor
        self._device = lanes.device
        self._accepts, self._returns = (lanes.service(f"{name} {evictor}") for name in ("accept for", "return to"))
        self._vault = Vault(waits=lanes.waits)
        self._messages: dict[int, tuple[tuple[int, int], ...]] = {}

    def begin(self, live: Live) -> list[Service]:
        """Serve a step."""
        self._vault.begin()
        accepted = self._accepts.start(self._vault.watched(self._accept(live)))
        returned = self._returns.start(self._give_back(live))
        whose = f"serving rank {self._evictor}'s"
        return [Service(f"{whose} evictions", accepted), Service(f"{whose} loads", returned)]

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
        for _ in range(self._plan.num_evictions):
            numbers = torch.empty(_NUM_NUMBERS, dtype=torch.int64)
            yield wire.expect(numbers)
            *key, packing, num_messages = numbers.tolist()
            if num_messages:
                ranges = torch.empty(num_messages, 2, dtype=torch.int64)
                yield wire.expect(ranges)
                # Kept for later steps: the evicting rank announces the messages of a packing only once.
                self._messages[packing] = tuple((begin, end) for begin, end in ranges.tolist())
            messages = self._messages.get(packing, ())
            # When the eviction is announced, not before, so that room is taken only for what has been evicted.
            memory = torch.empty(_behind(messages), dtype=torch.uint8, device=self._device)
            live.add(memory.numel())
            for begin, end in messages:
                yield wire.receive(memory[begin:end])
            self._vault.put((*key, packing), memory, self._device)
            # Else the generator would hold it while it waits for the next eviction.
            del memory

    def _give_back(self, live: Live) -> Job:
        wire = self._wires.load
        for _ in range(self._plan.num_loads):
            numbers = torch.empty(_NUM_NUMBERS, dtype=torch.int64)
            yield wire.expect(numbers)
            key = tuple(numbers.tolist()[:-1])
            yield self._vault.until(key)
            memory = self._vault.fetch(key, self._device)
            for begin, end in self._messages.get(key[-1], ()):
                yield wire.send(memory[begin:end])
            live.add(-memory.numel())
            del memory
