"""What the replicas of a run do with its experts: the part that sums their loads, and who holds which."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch import nn

from pipeloom.config import RunConfig
from pipeloom.execute.communication.expert_groups import make_load_group, make_same_experts_groups
from pipeloom.execute.parts.data_parallel import Share
from pipeloom.execute.parts.expert_loads import ExpertLoads
from pipeloom.execute.processes.world import World
from pipeloom.model.experts import is_of_expert
from pipeloom.runs.action_log import ActionLog
from pipeloom.schedule import Schedule
from pipeloom.training.schedules import check_meetings


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
    group = make_load_group(config.layout, world, timeout, log)
    return ExpertLoads(modules, group, world.device, config.layout.ep)


def shared_experts(
    config: RunConfig, world: World, schedule: Schedule, pieces: Sequence[range], log: ActionLog | None
) -> Share | None:
    """The experts that only some of the replicas have; ``None`` if all have all.

    Args:
        config: resolved.
        world: all ranks, which call this at the same point of the sequence of calls that make groups.
        schedule: of each replica.
        pieces: of each stage.
        log: where collectives are noted.

    Raises:
        ScheduleError: the replicas would wait for each other.
    """
    layout = config.layout
    if layout.ep == 1:
        return None
    check_meetings(config, schedule, pieces)
    groups = make_same_experts_groups(layout, world, log)
    return Share(is_of_expert, layout.expert_shard, groups, is_alone=layout.data_ranks == layout.ep)
