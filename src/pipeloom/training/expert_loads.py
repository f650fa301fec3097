"""The executor part that sums the loads of a run's experts over replicas."""

from collections.abc import Mapping
from datetime import timedelta

from torch import nn

from pipeloom.config import RunConfig
from pipeloom.execute.communication.collectives import make_load_group
from pipeloom.execute.parts.expert_loads import ExpertLoads
from pipeloom.execute.processes.world import World
from pipeloom.runs.action_log import ActionLog


def loads_of(
    config: RunConfig,
    world: World,
    modules: Mapping[int, nn.Module],
    timeout: timedelta | None,
    log: ActionLog | None,
) -> ExpertLoads | None:
    """The part; ``None`` for a model without experts.

    Args:
        config: resolved.
        world: all ranks, which call this at the same point of the sequence of calls that make groups.
        modules: stages of this rank.
        timeout: longest wait for another replica; ``None`` for the world's.
        log: where sums are noted.
    """
    if config.model.experts is None:
        return None
    return ExpertLoads(modules, make_load_group(config.layout, world, timeout, log), world.device)
