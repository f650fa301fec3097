"""Which checkpoint a run goes on from: the newest whole one."""

from dataclasses import dataclass
from pathlib import Path

from pipeloom.checkpoint.checkpoint_folder import (
    damage,
    find_checkpoint,
    is_checkpoint,
    missing_files,
    read_info,
    run_of,
    step_folders,
    step_of,
)
from pipeloom.errors import ConfigError, UserError


@dataclass(frozen=True)
class Choice:
    """A checkpoint that was chosen.

    Attributes:
        path: whole and absolute.
        damaged: newer ones that are not whole, newest first, each with the reason in a sentence.
    """

    path: Path
    damaged: tuple[tuple[Path, str], ...] = ()


def choose_checkpoint(path: Path) -> Choice:
    """The checkpoint itself, or the newest whole one of a run folder. Its files are compared with their hashes.

    Raises:
        UserError: there is none that is whole; the message names what is wrong with each and, for a damaged checkpoint
            that was named, which others of its run are whole.
    """
    # The run may be started again from another folder, and its configuration contains the path.
    path = path.absolute()
    if is_checkpoint(path):
        if _problem(path) is not None:
            raise UserError(refusal(path))
        return Choice(path)
    find_checkpoint(path)  # raises where there is none
    damaged: list[tuple[Path, str]] = []
    # All folders, not only complete ones: a newer one that is damaged has to be reported and put aside.
    for one in reversed(step_folders(path)):
        problem = _problem(one)
        if problem is None:
            return Choice(one, tuple(damaged))
        damaged.append((one, problem))
    lines = [f"no checkpoint in {path} is whole:", *(f"  - {one.name}: {problem}" for one, problem in damaged)]
    raise UserError("\n".join(lines))


def refuse_steps(choice: Choice, steps: int, folder: Path) -> None:
    """Refuse a checkpoint that a run of so many steps, counted from its first start, cannot go on from in a folder.

    Raises:
        UserError: it has done more steps, or the folder has a whole checkpoint of later steps.
    """
    done = read_info(choice.path).step
    problems: list[str] = []
    if steps < done:
        problems.append(
            f"training.steps must be at least {done}, the steps that {choice.path} has done, found {steps}; "
            "or resume from an earlier checkpoint"
        )
    damaged = [one.name for one, _ in choice.damaged]
    later = later_checkpoints(choice.path, folder)
    # Damaged later ones are put aside by the run; a whole one would be overwritten by steps that differ from its own.
    if any(one.name not in damaged and _problem(one) is None for one in later):
        problems.append(
            f"output.folder {folder} has checkpoints of later steps than {choice.path.name}; "
            "resume from the latest one, or choose another output.folder"
        )
    if problems:
        raise ConfigError(problems, "going on from a checkpoint")


def goes_on_in(resume: Path, folder: Path) -> bool:
    """Whether a run folder or a checkpoint, which a run resumes from, belongs to the run in a folder."""
    run = run_of(resume) if is_checkpoint(resume) else resume
    # Resolved: a folder may be named through a link, or relative to another one.
    return run is not None and run.resolve() == folder.resolve()


def later_checkpoints(checkpoint: Path, folder: Path) -> list[Path]:
    """Checkpoints, complete or not, of later steps in a run folder; none if the checkpoint is not of that run."""
    if not goes_on_in(checkpoint, folder):
        return []
    done = read_info(checkpoint).step
    return [one for one in step_folders(folder) if (step_of(one) or 0) > done]


def _problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole."""
    found = [f"{name} is missing" for name in missing_files(checkpoint)] or damage(checkpoint)
    return "; ".join(found) or None


def refusal(checkpoint: Path) -> str:
    """Why a damaged checkpoint is refused, with the whole ones of its run."""
    run = run_of(checkpoint)
    others = [one for one in step_folders(run) if one != checkpoint] if run is not None else []
    whole = [one.name for one in others if _problem(one) is None]
    hint = f"whole ones beside it: {', '.join(whole)}" if whole else "no other one beside it is whole"
    return f"the checkpoint {checkpoint} is damaged: {_problem(checkpoint)}; {hint}"
