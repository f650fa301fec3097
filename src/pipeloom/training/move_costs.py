"""Measured costs of what moves beside activations: the tied matrix, what stages keep, and stages with the host."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pipeloom.config import RunConfig
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.wires import Wires
from pipeloom.execute.parts.tied import Tied
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.measure.moves import time_messages, time_moves, time_stage_swaps
from pipeloom.schedule import Schedule
from pipeloom.training.stages import saved_bytes

_Own = TypeVar("_Own")


def moves_anything(config: RunConfig) -> bool:
    """Whether the run moves activations."""
    return config.schedule.balance or config.schedule.offload


def tied_message_costs(
    tied: Tied | None, schedule: Schedule, place: int, world: World, transport: Transport, *, config: RunConfig
) -> dict[str, Any]:
    """Measured costs of messages of the tied matrix, by the fields of ``StageCosts``; empty except on rank 0."""
    if tied is None:
        return {}
    every = _of_pipeline(time_messages(tied, schedule, place, world, transport), world, config)
    return dict(zip(("tied_s", "tied_grad_s"), max(every), strict=True)) if every else {}


def move_costs(
    wires: Mapping[int, Wires], schedule: Schedule, place: int, world: World, *, config: RunConfig
) -> dict[str, Any]:
    """Measured costs of moving activations, in the same form."""
    if not moves_anything(config):
        return {}
    whole = [int(one) for one in saved_bytes(config).by_stage(schedule.num_stages)]
    every = _of_pipeline(time_moves(schedule, place, wires, world, whole), world, config)
    found = {
        name: {stage: seconds for one in every for stage, seconds in one[tier].items()}
        for tier, name in enumerate(("evict_s", "offload_s"))
    }
    return {name: tuple(one.get(stage, 0.0) for stage in range(len(whole))) for name, one in found.items()}


def swap_costs(store: StageStore | None, stages: Collection[int], world: World, *, config: RunConfig) -> dict[str, Any]:
    """Measured costs of swapping this rank's stages, or their experts, in the same form."""
    if store is None:
        return {}
    own = dict(zip(stages, time_stage_swaps(store, stages, world.device), strict=True))
    found = {stage: amounts for one in _of_pipeline(own, world, config) for stage, amounts in one.items()}
    return {"moves": tuple(found[stage] for stage in sorted(found))}


def _of_pipeline(own: _Own, world: World, config: RunConfig) -> list[_Own]:
    """On rank 0, the values of the first pipeline's ranks; an empty list elsewhere."""
    every = world.gather(own)
    return [] if every is None else [every[rank] for rank in config.layout.pipelines()[0]]
