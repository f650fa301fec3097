"""Which checkpoint a run goes on from: the newest whole one."""

from dataclasses import dataclass
from pathlib import Path

from pipeloom.checkpoint_folder import (
    FOLDER,
    damage,
    find_checkpoint,
    is_checkpoint,
    missing_files,
    read_info,
    run_of,
    step_folders,
)
from pipeloom.errors import ConfigError, UserError


@dataclass(frozen=True)
class Choice:
    """A checkpoint that was chosen.

    Attributes:
        path: whole and absolute.
        damaged: newer ones that are not whole, newest first, each with a sentence that says why.
    """

    path: Path
    damaged: tuple[tuple[Path, str], ...] = ()


def choose_checkpoint(path: Path) -> Choice:
    """The checkpoint itself, or the newest whole one of a run folder. Its files are compared with their hashes.

    Args:
        path: a checkpoint or a run folder.

    Raises:
        UserError: there is none that is whole; says what is wrong with each and, for a damaged checkpoint that was
            named, which others of its run are whole.
    """
    path = path.absolute()
    if is_checkpoint(path):
        if _problem(path) is not None:
            raise UserError(_refusal(path))
        return Choice(path)
    find_checkpoint(path)  # raises where there is none
    damaged: list[tuple[Path, str]] = []
    for one in reversed(step_folders(path)):
        problem = _problem(one)
        if problem is None:
            return Choice(one, tuple(damaged))
        damaged.append((one, problem))
    lines = [f"no checkpoint in {path} is whole:", *(f"  - {one.name}: {problem}" for one, problem in damaged)]
    raise UserError("\n".join(lines))


def refuse_steps(choice: Choice, steps: int, folder: Path) -> None:
    """Refuse a checkpoint that a run cannot go on from.

    Args:
        choice: the checkpoint.
        steps: of the run, counted from its first start.
        folder: where the run is written to.

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
    if any(_problem(one) is None for one in _later(choice, folder)):
        problems.append(
            f"output.folder {folder} has checkpoints of later steps than {choice.path.name}; "
            "resume from the latest one, or choose another output.folder"
        )
    if problems:
        raise ConfigError(problems, "going on from a checkpoint")


def _later(choice: Choice, folder: Path) -> list[Path]:
    """Checkpoints in a run folder of later steps than a chosen one of the same folder, but for known damaged ones."""
    run, damaged = run_of(choice.path), [one.name for one, _ in choice.damaged]
    names = [one.name for one in step_folders(folder)]
    if run is None or run.resolve() != folder.resolve() or choice.path.name not in names:
        return []
    later = names[names.index(choice.path.name) + 1 :]
    return [folder / FOLDER / name for name in later if name not in damaged]


def _problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is not whole."""
    found = [f"{name} is missing" for name in missing_files(checkpoint)] or damage(checkpoint)
    return "; ".join(found) or None


def _refusal(checkpoint: Path) -> str:
    run = run_of(checkpoint)
    others = [one for one in step_folders(run) if one != checkpoint] if run is not None else []
    whole = [one.name for one in others if _problem(one) is None]
    hint = f"whole ones beside it: {', '.join(whole)}" if whole else "no other one beside it is whole"
    return f"the checkpoint {checkpoint} is damaged: {_problem(checkpoint)}; {hint}"
