"""What a step should look like on this machine, predicted before the first one: profiled costs, simulated."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipeloom.config import OptimizerConfig
from pipeloom.execute.parts.data_parallel import DataParallel
from pipeloom.execute.profile import Profile
from pipeloom.execute.world import World
from pipeloom.schedule import Action, Schedule
from pipeloom.schedule.kinds import COMPUTE_KINDS
from pipeloom.simulate import Sharing, simulate
from pipeloom.trace import Trace
from pipeloom.train.batch import Batch
from pipeloom.train.optimizer import clip_gradients, make_optimizer, squared_gradient_norm
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
    parts = data_parallel.optimizer_parts()
    decayed, plain = ([nn.Parameter(torch.zeros_like(p)) for p in part] for part in parts)
    copies, optimizer = [*decayed, *plain], make_optimizer(config, decayed, plain)
    times: list[float] = []
    for _ in range(_REPEATS + 1):
        for copy in copies:
            copy.grad = torch.ones_like(copy)  # large enough to be clipped
        world.wait_for_all()
        begin = time.perf_counter()
        squares = world.sum([0.0, squared_gradient_norm([copy.grad for copy in copies if copy.grad is not None])])[1]
        clip_gradients(copies, squares**0.5, config.clip_grad_norm)
        optimizer.step()
        data_parallel.refresh()  # with the weights that there are
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        times.append(time.perf_counter() - begin)
    every = world.gather(sorted(times[1:])[_REPEATS // 2])
    return max(every) if every else 0.0
