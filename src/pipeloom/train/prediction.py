"""What a step should look like on this machine, predicted before the first one: profiled costs, simulated."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

from pipeloom.config import OptimizerConfig
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.batch import Batch
from pipeloom.measure.stages import Profile
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.measure.update import Update
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.simulate import Sharing, simulate
from pipeloom.trace import Trace
from pipeloom.train.optimizer import make_optimizer
from pipeloom.train.pipeline import Pipeline
from pipeloom.train.stage_updates import StageUpdates

_REPEATS = 3


@dataclass(frozen=True)
class Prediction:
    """A step as it was predicted.

    Attributes:
        trace: of the pipeline.
        step_time_s: of the pipeline and what follows it: gradient norm and optimizer.
    """

    trace: Trace
    step_time_s: float


def predict_step(
    pipeline: Pipeline, world: World, batch: Batch, optimizer: OptimizerConfig, updates: StageUpdates | None
) -> Prediction | None:
    """Profile the stages, their collectives and the update on this machine and simulate the pipeline's schedule.

    Collectives are timed while all ranks compute; that they slow compute down where they share its cores is left out.
    Weights and optimizer state of the pipeline are as before. Every rank calls it.

    Args:
        pipeline: whose step it is.
        world: this process among the others.
        batch: like those of the steps.
        optimizer: of the update that follows the pipeline.
        updates: where actions of the schedule update the stages instead.

    Returns:
        The prediction on rank 0, ``None`` elsewhere.
    """
    profile = pipeline.profile(batch)
    if profile is not None and updates is not None:
        update_s = tuple(updates.seconds(stage, world.device) for stage in pipeline.data_parallel.weights)
        trace = simulate_profile(pipeline.schedule, replace(profile, costs=replace(profile.costs, update_s=update_s)))
        return Prediction(trace, trace.end_s)
    update_s = _time_update(world, pipeline.data_parallel, optimizer)
    if profile is None:
        return None
    trace = simulate_profile(pipeline.schedule, profile)
    return Prediction(trace, trace.end_s + update_s)


def simulate_profile(schedule: Schedule, profile: Profile) -> Trace:
    """The schedule on the clock of a profile: ranks of one host slow each other down as they did when profiled."""

    def host(action: Action, rank: int) -> Hashable | None:
        return profile.host_by_rank[rank] if action.kind in COMPUTE_KINDS else None

    return simulate(schedule, profile.action_costs, Sharing(host, profile.capacity_by_host))


def _time_update(world: World, data_parallel: DataParallel, config: OptimizerConfig) -> float:
    """Seconds of gradient norm, clipping and optimizer step on copies, all ranks at once; the slowest's, on rank 0."""
    update = Update(partial(make_optimizer, config), config.clip_grad_norm, data_parallel.optimizer_parts(), world)

    def before() -> None:
        update.fill_gradients()
        world.wait_for_all()

    def once() -> None:
        update.step()
        data_parallel.refresh()  # with the weights that there are

    every = world.gather(median_seconds(once, _REPEATS, world.device, before))
    return max(every) if every else 0.0
