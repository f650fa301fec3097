"""The predicted step of a run's configuration: what ``pipeloom simulate`` prints."""

from pipeloom.calls import checked
from pipeloom.config import RunConfig
from pipeloom.errors import ConfigError
from pipeloom.planner.slice_lengths import plan_slices
from pipeloom.predict.describe import completed, describe, described_problems
from pipeloom.predict.step import SimulatedStep, simulate_step


@checked
def predict_step(config: RunConfig, *, by_seconds: bool = False) -> SimulatedStep:
    """Predict a training step of a run on its cluster (``machine.cluster``): time, utilization, memory, trace.

    Examples:
        >>> from pipeloom import load_run, predict_step
        >>> run = load_run(model={"preset": "gpt-6.6b"}, machine={"cluster": "dgx-a100"}, layout={"pp": 4, "loops": 8})
        >>> step = predict_step(run)
        >>> step.schedule
        Schedule(32 stages on 4 ranks, 8 micro-batches, 1,508 actions, level communication)
        >>> step.prediction.fits, step.trace.num_ranks
        (True, 4)

    Args:
        config: of the run, from ``load_run``.
        by_seconds: whether what ``schedule.balance`` and ``schedule.offload`` move is placed by predicted seconds; else
            by nominal ones, as ``train`` does by itself.

    Raises:
        ConfigError: everything that is wrong with the configuration, its cluster or its program.
        UserError: the schedule cannot be made.
    """
    config, problems = completed(config, described_problems)
    if problems:
        raise ConfigError(problems, "the run")
    placed = describe(config)
    # Programs without lanes are simulated only, so no run has to follow with nominal seconds.
    by_seconds = by_seconds or not placed.software.has_lanes
    if config.layout.token_slices == "auto":
        return plan_slices(placed, config.knobs(), moves_by_seconds=by_seconds).step
    return simulate_step(placed, config.knobs(), moves_by_seconds=by_seconds)
