"""Problems of the steps of a run: one sentence each."""

from pipeloom.config.layout_problems import Problems
from pipeloom.config.run import RunConfig
from pipeloom.config.sections import OutputConfig


def adds_checkpoints(run: RunConfig) -> bool:
    """Whether a run's last checkpoint may be beside earlier ones of its folder, though none is planned before it."""
    own = run.checkpoint
    return own.time_limit_s is not None or (own.resume is not None and run.output.folder is not None)


def step_problems(config: RunConfig) -> Problems:
    """Steps that do not come, and checkpoints that are not there."""
    if config.training.on_spike == "rollback" and config.restart.times:
        yield "training.on_spike rollback does not work with restart.times, whose states are newer; leave one out"
    if config.training.on_spike == "rollback" and not config.saves_between_steps and not adds_checkpoints(config):
        yield (
            "training.on_spike rollback goes back to a checkpoint, and checkpoint.every and checkpoint.every_s plan "
            "none; set one of them, or use skip"
        )
    steps, falling = config.training.known_steps, config.optimizer.lr_wsd_decay_steps or 0
    if falling and falling + config.optimizer.known_lr_warmup_steps > steps:
        rising = config.optimizer.known_lr_warmup_steps
        yield (
            f"optimizer.lr_wsd_decay_steps and lr_warmup_steps must be at most training.steps {steps} together, found "
            f"{falling} and {rising}"
        )
    if wrong := [step for step in config.output.profile or () if not 1 <= step <= steps]:
        yield f"output.profile must be steps from 1 to training.steps {steps}, found {wrong}"
    traced = config.output.trace_step
    if traced > steps and traced != OutputConfig.trace_step:  # short runs have the default, too
        yield f"output.trace_step must be at most training.steps {steps}, found {traced}"
