"""The head of an unfinished run's page: its progress, what is missing, and why."""

from collections.abc import Iterator
from typing import Any

from pipeloom.runs import run_folder
from pipeloom.runs.run_reading import Run
from pipeloom.runs.traced_step import median_step, traced_candidates
from pipeloom.system.folder_lock import is_locked
from pipeloom.terminal.words import count, quoted


def unfinished_contents(run: Run) -> dict[str, Any] | None:
    """Headline, state, missing contents with reasons, checkpoints, and the command to resume; ``None`` if complete."""
    missing = [[what, why] for what, why in _missing(run) if why]
    if run.summary is not None:
        did_nothing = run.summary["step_time_s"] is None
        whole = (
            "All steps of this run were completed by an earlier run" if did_nothing else "Files of this run are missing"
        )
        head = {"headline": whole, "state": "", "resume": None}
        return {**head, "missing": missing, "checkpoints": [path.name for path in run.checkpoints]} if missing else None
    runs, folder = is_locked(run.folder), run.folder
    state = "It is still running." if runs else "It is not running any more."
    done = f"{done_steps(run):,} of {count(run.config.training.known_steps, 'step')} are done."
    # A run accepts the same folder as output only to resume from it.
    words = ("pipeloom", "train", folder / run_folder.CONFIG, "--checkpoint.resume", folder, "--output.folder", folder)
    return {
        "headline": "This run has not finished",
        "state": f"{'It may still be running.' if runs is None else state} {done}",
        "missing": missing,
        "checkpoints": [path.name for path in run.checkpoints],
        "resume": quoted(*words) if run.checkpoints else None,
    }


def done_steps(run: Run) -> int:
    """Number of completed optimizer steps."""
    return run.metrics[-1]["step"] if run.metrics else 0


def traced_step(run: Run) -> int | None:
    """The step whose trace is kept; ``None`` if it is not determined yet."""
    if run.summary is not None:
        return run.summary["traced_step"]
    if run.begun is None:
        return None
    times_s = {line["step"]: line["step_time_s"] for line in run.metrics}
    return median_step(traced_candidates(run.config, run.begun), times_s)


def _missing(run: Run) -> Iterator[tuple[str, str]]:
    """(what is missing, why); the reason is empty if it was not wanted."""
    config, is_finished = run.config, run.summary is not None
    if run.schedule is None:
        yield run_folder.SCHEDULE, _because(run, "it is written when all ranks have started")
    if not run.metrics:
        yield run_folder.METRICS, "no step is completed"
    if run.trace is None:
        yield f"{run_folder.TRACE}: measured timeline and bubble", _because(run, f"{_when_traced(run)} is traced")
    if run.predicted is None and not is_finished:
        yield (
            f"{run_folder.PREDICTED_TRACE}: predicted timeline",
            ("it is written before the first step" if config.training.predict else "training.predict is off"),
        )
    if not is_finished:
        yield f"{run_folder.SUMMARY}: validation loss, unigram loss, predicted step time", "it is written at the end"
        if config.training.sample_tokens:
            yield run_folder.SAMPLE, "it is written at the end"


def _when_traced(run: Run) -> str:
    """The traced step, or the steps of which one will be."""
    step, begun = traced_step(run), run.begun
    if step is not None or begun is None:
        return "step output.trace_step" if step is None else f"step {step:,}"
    of = traced_candidates(run.config, begun)
    return f"step {of[0]:,}" if len(of) == 1 else f"one of the steps {of[0]:,} to {of[-1]:,}"


def _because(run: Run, reason: str) -> str:
    if run.summary is None:
        return reason
    if run.summary["step_time_s"] is None:
        return "no step was run with these settings in this folder"
    return f"{reason}; the file is missing"
