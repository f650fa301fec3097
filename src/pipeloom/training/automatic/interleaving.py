"""Chooses the stages of each rank, and their order, for ``layout.loops = "auto"``: by predicted steps, as measured."""

import gc
from collections.abc import Callable
from dataclasses import replace

from pipeloom.config import RunConfig, find_problems
from pipeloom.config.automatic_loops import candidates
from pipeloom.data.text import Data
from pipeloom.errors import HostError
from pipeloom.execute.processes.world import World
from pipeloom.measure.stages import Profile
from pipeloom.training.automatic.profiled_step import simulate_profile
from pipeloom.training.memory_check import check_memory
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve

ERROR = 0.05
"""Predictions that differ by less are equal. Chosen: the mean error of nine short runs on two cores was 5.5 %."""


def with_chosen_loops(config: RunConfig, world: World, data: Data, print_line: Callable[[str], None]) -> RunConfig:
    """Replace ``auto`` by a number of loops and a family, the same on every rank. Collective.

    The stages of each number, and those with split backwards, are built and profiled on their ranks, with messages
    between them, and the step of each candidate is simulated. Time of the optimizer is the same for all and left out.

    Args:
        config: resolved except for ``layout.loops`` and what follows from it.
        world: all ranks.
        data: of the run.
        print_line: called with a line about the choice, on rank 0.

    Returns:
        The configuration, resolved.

    Raises:
        HostError: no candidate fits the memory.
    """
    if not config.layout.is_automatic:
        return config
    steps: list[tuple[RunConfig, float]] = []
    shared: Profile | None = None
    for runs in candidates(config):
        possible = [run for run in runs if not find_problems(run, trains=False)]
        fitting = [resolve(run, data) for run in possible if fits(run, world)]
        if not fitting:
            continue
        profile = _profile(fitting[-1], world, data)
        if profile is None:  # on all ranks but 0
            continue
        shared = shared or profile
        profile = _beside(profile, shared)
        steps += [(run, simulate_profile(training_schedule(run), profile).end_s) for run in fitting]
    chosen = simplest(steps) if steps else None
    if chosen is not None:
        print_line(described(steps, chosen))
    chosen = world.from_first(chosen)
    if chosen is None:
        raise HostError("not enough memory for any of the numbers that layout.loops auto compares; set a smaller model")
    return chosen


def simplest(steps: list[tuple[RunConfig, float]]) -> RunConfig:
    """The first run whose predicted seconds equal the fewest, within the error of predictions."""
    fewest_s = min(step_s for _, step_s in steps)
    return next(run for run, step_s in steps if step_s <= fewest_s * (1 + ERROR))


def described(steps: list[tuple[RunConfig, float]], chosen: RunConfig) -> str:
    """A line with the choice and the predicted step of each candidate."""
    name = "{0.layout.num_loops} ({0.family})".format
    found = ", ".join(f"{name(run)} {step_s * 1e3:.0f}" for run, step_s in steps)
    return f"loops      {name(chosen)}: simplest within {ERROR:.0%} of the fastest; predicted ms: {found}"


def fits(run: RunConfig, world: World) -> bool:
    """Whether a run fits the memory of every host. Collective."""
    try:
        check_memory(run)
    except HostError:
        return world.sum([1])[0] == 0
    return world.sum([0])[0] == 0


def _profile(run: RunConfig, world: World, data: Data) -> Profile | None:
    pipeline = Pipeline(run, world)
    # Any batch will do: step time does not depend on the tokens.
    found = pipeline.profile(pipeline.batch(data.validation.batch(0, run.layout.batch_size)))
    pipeline.close()
    del pipeline
    gc.collect()  # the stages of two candidates need not fit at once
    return found


def _beside(profile: Profile, shared: Profile) -> Profile:
    """The profile with the messages and the sharing of cores of another one: they do not depend on the stages."""
    return replace(
        profile,
        costs=replace(profile.costs, transfer_s=shared.costs.transfer_s),
        capacity_by_host=shared.capacity_by_host,
        turn_s_by_host=shared.turn_s_by_host,
        receive_s=shared.receive_s,
        send_s=shared.send_s,
    )
