"""Times data movement other than messages between stages, before the first step.

Activations to a partner rank or to the host; swapped stages; the tied matrix and its gradient.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.under_way import finish
from pipeloom.execute.communication.wires import Wire, Wires, evictions
from pipeloom.execute.parts.tied import Tied
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.saved import Packing
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import HOST_MOVES, PARTNER_MOVES
from pipeloom.schedule.stage_swaps import Amounts, Content

_REPEATS = 3
_PIECES = 16


def time_moves(
    schedule: Schedule, rank: int, wires: Mapping[int, Wires], world: World, saved_bytes: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Time moving the activations of a micro-batch of each of this rank's stages to the partner and to the host.

    One way: half of a round trip, while no rank computes. Collective.

    Args:
        schedule: contains the moves.
        rank: of this process in its pipeline.
        wires: connections between partners, by evicting rank.
        world: this process and the others.
        saved_bytes: activations of a micro-batch, for each stage of the pipeline.

    Returns:
        Seconds by stage to the partner, and to the host; without stages that move nothing.
    """
    evicted: dict[int, float] = {}
    for evictor, plan in evictions(schedule).items():
        for stage in _moving(schedule, evictor, PARTNER_MOVES):
            # One rank and stage at a time: pairs may share a link.
            world.wait_for_all()
            if rank in (evictor, plan.partner):
                seconds = _there_and_back(wires[evictor], saved_bytes[stage], world, is_evictor=rank == evictor)
                if rank == evictor:
                    evicted[stage] = seconds / 2
    world.wait_for_all()
    own = _moving(schedule, rank, HOST_MOVES)
    return evicted, {stage: _to_host_and_back(saved_bytes[stage], world.device) / 2 for stage in own}


def _moving(schedule: Schedule, rank: int, moves: Sequence[Kind]) -> list[int]:
    row = schedule.rows[rank]
    return sorted(set(row.stage[row.is_kind(*moves)].tolist()))


def _there_and_back(wires: Wires, nbytes: int, world: World, *, is_evictor: bool) -> float:
    # In several messages, as in a step.
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


def time_stage_swaps(store: StageStore, stages: Iterable[int], device: torch.device) -> tuple[Amounts, ...]:
    """Time swaps of each stage: seconds of its weights, gradient and optimizer state.

    One way: half of a round trip, with allocation and release of device memory, while nothing computes. Stages of equal
    sizes are timed once. Contents stay unchanged.

    Args:
        store: of the stages, all at rest.
        stages: indices of the stages.
        device: that they are swapped to.
    """
    known: dict[Amounts, Amounts] = {}
    found: list[Amounts] = []
    for stage in stages:
        sizes = store.amounts(stage)
        if sizes not in known:
            known[sizes] = Amounts(
                **{
                    part.name.lower(): _visit(store, stage, part, device) / 2
                    for part in Content
                    if part.name is not None and sizes.of(part)
                }
            )
        found.append(known[sizes])
    return tuple(found)


def _visit(store: StageStore, stage: int, part: Content, device: torch.device) -> float:
    def once() -> None:
        with store.visit(stage, part, part):
            pass

    return median_seconds(once, _REPEATS, device)


def time_messages(tied: Tied, schedule: Schedule, rank: int, world: World, transport: Transport) -> tuple[float, float]:
    """Time sending the tied matrix and sending its gradient back, while no rank computes. Collective.

    The round trip is divided in proportion to the bytes.

    Args:
        tied: has the specs of its messages.
        schedule: has the ranks of both stages.
        rank: of this process in its pipeline.
        world: this process and the others.
        transport: to the pipeline's other ranks.

    Returns:
        Seconds of both on the rank of the first stage; zeros on other ranks, and if no message is needed.
    """
    first, last = schedule.placement.rank_by_stage[0], schedule.placement.rank_by_stage[-1]
    if first == last:
        return 0.0, 0.0
    timeout_s = world.timeout.total_seconds()

    def once() -> None:
        for source, destination, kind in (first, last, Kind.SEND_TIED), (last, first, Kind.SEND_TIED_GRAD):
            spec = tied.specs[kind]
            if rank == source:
                finish(transport.send(torch.zeros_like(spec.empty(world.device)), destination), timeout_s)
            elif rank == destination:
                finish(transport.receive(spec, source), timeout_s)

    measured_s = median_seconds(once, _REPEATS, world.device, before=world.wait_for_all)
    # Only the first stage's rank measures the whole round trip.
    both_s = measured_s if rank == first else 0.0
    weights, gradient = (tied.specs[kind].dtype.itemsize for kind in (Kind.SEND_TIED, Kind.SEND_TIED_GRAD))
    return both_s * weights / (weights + gradient), both_s * gradient / (weights + gradient)
