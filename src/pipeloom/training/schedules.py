"""Executable schedules of a run: of a training step, for each replica, and of forwards alone."""

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.config import RunConfig
from pipeloom.errors import UserError
from pipeloom.passes import Moves
from pipeloom.recipe import build, ring_recipe
from pipeloom.schedule import Schedule
from pipeloom.schedule.joint import prove_together
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE, lane_of
from pipeloom.training.stages import StageSizes


def training_schedule(config: RunConfig) -> Schedule:
    """The executable schedule of a training step; from a resolved configuration."""
    return build(config.recipe(), StageSizes(config))


def forward_schedule(config: RunConfig, number: int, *, trains: bool = True) -> Schedule:
    """An executable forward-only schedule of so many micro-batches; the same stages also train or have weights only."""
    sizes = {"num_microbatches": number, "group_size": None, "keep": None, "num_slices": 1}
    choice = config.choice()  # with the placement of the training schedule
    forward_only = replace(choice, family="forward-only", placement=choice.placement_name, **sizes)
    return build(replace(config.recipe(), start=forward_only, moves=Moves(), given=None), StageSizes(config, trains))


def token_schedule(config: RunConfig, number: int) -> Schedule:
    """An executable schedule of so many tokens, one after the other, on the one rank of a resolved configuration."""
    return build(ring_recipe(config.recipe(), config.layout.num_stages, number), StageSizes(config, trains=False))


def schedules_by_replica(config: RunConfig) -> list[Schedule]:
    """The training schedule of each replica, with its own number of micro-batches; from a resolved configuration.

    Raises:
        UserError: replicas would wait for each other.
    """
    numbers = config.layout.microbatches_by_replica
    made = {number: training_schedule(config.of_replica(numbers.index(number))) for number in set(numbers)}
    check_replicas(list(made.values()))
    return [made[number] for number in numbers]


def run_of_replica(config: RunConfig, replica: int) -> RunConfig:
    """The run with the schedule of a replica.

    Raises:
        UserError: replicas would wait for each other.
    """
    if config.layout.microbatches is not None:
        schedules_by_replica(config)
    return config.of_replica(replica)


def check_meetings(config: RunConfig, schedule: Schedule, pieces: Sequence[range]) -> None:
    """Prove that replicas which share experts can all run their schedules, which are one, to the end.

    Args:
        config: resolved.
        schedule: of each replica.
        pieces: of each stage.

    Raises:
        ScheduleError: they would wait for each other.
    """
    layout, experts = config.layout, config.model.expert_layout
    if layout.ep == 1 or experts is None:
        return
    layers = [range(max(0, own.start - 1), min(config.model.num_layers, own.stop - 1)) for own in pieces]
    stages = [stage for stage, own in enumerate(layers) if any(map(experts.are_in, own))]
    prove_together([schedule] * layout.data_ranks, stages, layout.ep)


def check_replicas(schedules: Sequence[Schedule]) -> None:
    """Refuse schedules of replicas whose gathers and reductions have another order, and would wait for each other.

    Raises:
        UserError: there are such replicas.
    """
    first, *others = map(_together, schedules)
    if any(other != first for other in others):
        raise UserError(
            "the replicas of layout.microbatches reduce stages in another order, and would wait for each other; use "
            "schedule.family breadth-first, or layout.num_microbatches for all"
        )


def _together(schedule: Schedule) -> list[list[str]]:
    """For each rank what it does with the other replicas, in order."""
    place = schedule.placement
    return [[str(one) for one in row if lane_of(one, place) == DATA_PARALLEL_LANE] for row in schedule.rows]
