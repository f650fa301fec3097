"""What a step should look like on this machine, predicted before the first one: profiled costs, simulated."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.batch import Batch
from pipeloom.measure.stages import Profile
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.simulate import Sharing, simulate
from pipeloom.trace import Trace
from pipeloom.train.optimizer import StageUpdates, WholeUpdates
from pipeloom.train.pipeline import Pipeline


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
    pipeline: Pipeline, world: World, batch: Batch, updates: WholeUpdates | StageUpdates
) -> Prediction | None:
    """Profile the stages, their collectives and the update on this machine and simulate the pipeline's schedule.

    Collectives are timed while all ranks compute; that they slow compute down where they share its cores is left out.
    Weights and optimizer state of the pipeline are as before. Every rank calls it.

    Returns:
        The prediction on rank 0, ``None`` elsewhere.
    """
    profile = pipeline.profile(batch)
    within_s, behind_s = updates.seconds(world)
    if profile is None:
        return None
    profile = replace(profile, costs=replace(profile.costs, update_s=within_s))
    trace = simulate_profile(pipeline.schedule, profile)
    return Prediction(trace, trace.end_s + behind_s)


def simulate_profile(schedule: Schedule, profile: Profile) -> Trace:
    """The schedule on the clock of a profile: ranks of one host slow each other down as they did when profiled."""

    def host(action: Action, rank: int) -> Hashable | None:
        return profile.host_by_rank[rank] if action.kind in COMPUTE_KINDS else None

    return simulate(schedule, profile.action_costs, Sharing(host, profile.capacity_by_host))
