"""What is not lost of a run that ended early, and the command that goes on."""

import shlex

from pipeloom.checkpoint.checkpoint_folder import list_checkpoints, step_of
from pipeloom.config import RunConfig
from pipeloom.execute.processes.world import is_launched
from pipeloom.runs.run_folder import CONFIG, RunFolder


def safe_steps(config: RunConfig, folder: RunFolder) -> str:
    """Sentences for people who want to go on.

    Args:
        config: of the run.
        folder: of the run.
    """
    run = folder.path
    if folder.is_starting:
        return f"No step was done; {run} is as it was."
    checkpoints, begun = list_checkpoints(run), config.checkpoint.resume
    where = f"What the run wrote until then is in {run}."
    if not checkpoints and begun is None:
        return f"No checkpoint was written, so no step is safe. {where}"
    words = ["pipeloom", "train", str(run / CONFIG)]
    if checkpoints:
        # The run folder and not one checkpoint: the newest whole one is chosen when the run starts again.
        words += ["--checkpoint.resume", str(run), "--output.folder", str(run)]
        safe = f"{step_of(checkpoints[-1])} of {config.training.steps} steps are safe, in {checkpoints[-1]}."
    else:
        safe = f"No checkpoint was written since {begun}, with which the run began."
    how = "To go on, with the same launcher:" if is_launched() else "To go on:"
    return f"{safe} {where}\n{how} {shlex.join(words)}"
