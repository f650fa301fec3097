"""How long it takes to move what stages keep, before the first step."""

from collections.abc import Mapping, Sequence

import torch

from pipeloom.execute.saved import Packing
from pipeloom.execute.timing import median_seconds
from pipeloom.execute.wires import Wire, Wires, evictions
from pipeloom.execute.world import World
from pipeloom.schedule import Kind, Schedule

_REPEATS = 3
_PIECES = 16


def time_moves(
    schedule: Schedule, rank: int, wires: Mapping[int, Wires], world: World, saved_bytes: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of moving what each of this rank's stages keeps of a micro-batch, to the partner and to the host.

    One way, as the mean of there and back, while no rank computes. Every process calls it.

    Args:
        schedule: tells what is moved.
        rank: of this process in its pipeline.
        wires: this rank's ends of wires.
        world: this process among the others.
        saved_bytes: for each stage of the pipeline.

    Returns:
        By stage; without those that move nothing.
    """
    evicted: dict[int, float] = {}
    for evictor, plan in evictions(schedule).items():
        for stage in _moving(schedule, evictor, Kind.EVICT):
            # One stage of one rank after the other: pairs that share a link would time each other.
            world.wait_for_all()
            if rank in (evictor, plan.partner):
                seconds = _there_and_back(wires[evictor], saved_bytes[stage], world, is_evictor=rank == evictor)
                if rank == evictor:
                    evicted[stage] = seconds / 2
    world.wait_for_all()
    own = _moving(schedule, rank, Kind.OFFLOAD)
    return evicted, {stage: _to_host_and_back(saved_bytes[stage], world.device) / 2 for stage in own}


def _moving(schedule: Schedule, rank: int, kind: Kind) -> list[int]:
    row = schedule.rows[rank]
    return sorted(set(row.stage[row.is_kind(kind)].tolist()))


def _there_and_back(wires: Wires, nbytes: int, world: World, *, is_evictor: bool) -> float:
    # In several messages, as what a stage keeps travels in a step.
    packing = Packing.of((-(-nbytes // _PIECES),) * _PIECES)
    memory = torch.zeros(packing.total_bytes, dtype=torch.uint8, device=world.device)

    def move(wire: Wire, *, sends: bool) -> None:
        for begin, end in packing.messages:
            (wire.send if sends else wire.receive)(memory[begin:end])()

    def once() -> None:
        move(wires.evict, sends=is_evictor)
        move(wires.load, sends=not is_evictor)

    return median_seconds(once, _REPEATS, world.device)


def _to_host_and_back(nbytes: int, device: torch.device) -> float:
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def once() -> None:
        host.copy_(memory, non_blocking=True)
        memory.copy_(host, non_blocking=True)

    return median_seconds(once, _REPEATS, device)
