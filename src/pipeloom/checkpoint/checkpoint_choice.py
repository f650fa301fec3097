"""Chooses the checkpoint whose weights are read: the newest undamaged one."""

from collections.abc import Iterator
from contextlib import contextmanager
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
from pipeloom.errors import ConfigError, PipeloomError, UserError
from pipeloom.terminal.guard import print_beside


@dataclass(frozen=True)
class Choice:
    """The checkpoint whose weights are read.

    Attributes:
        path: absolute path of an undamaged checkpoint.
        damaged: newer, damaged checkpoints, newest first, each with the reason.
    """

    path: Path
    damaged: tuple[tuple[Path, str], ...] = ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """A line for each newer checkpoint that is not read."""
        return tuple(f"not from {path.name}: {problem}" for path, problem in self.damaged)

    def print_remarks(self) -> None:
        """Print them beside what a command prints."""
        for line in self.remarks:
            print_beside(line)


@contextmanager
def reading(checkpoint: Path) -> Iterator[None]:
    """Context of work that reads a checkpoint that was chosen: an error has a note if it is not there any more."""
    try:
        yield
    except PipeloomError as error:
        # Missing files look like damage; but a run in progress removes the checkpoints that it does not keep.
        if not checkpoint.exists():
            error.add_note(
                f"{checkpoint} was removed meanwhile, as by a run in progress, which keeps its newest checkpoints "
                "(checkpoint.keep); repeat the command, or name a checkpoint that stays (checkpoint.keep_every)"
            )
        raise


def choose_checkpoint(path: Path) -> Choice:
    """Choose a checkpoint by its path, or the newest undamaged one of a run folder. Files are checked by their hashes.

    Raises:
        UserError: none is undamaged; names what is wrong with each. If ``path`` is a damaged checkpoint, also names
            undamaged ones of the same run.
    """
    # Absolute, since the configuration records the path, and a later start may use another working directory.
    path = path.absolute()
    if is_checkpoint(path):
        if _problem(path) is not None:
            raise UserError(refusal(path))
        return Choice(path)
    find_checkpoint(path)  # raises where there is none
    damaged: list[tuple[Path, str]] = []
    # All folders, not only complete ones: newer damaged ones are reported and renamed.
    for one in reversed(step_folders(path)):
        problem = _problem(one)
        if problem is None:
            return Choice(one, tuple(damaged))
        damaged.append((one, problem))
    lines = [f"all checkpoints in {path} are damaged:", *(f"  - {one.name}: {problem}" for one, problem in damaged)]
    raise UserError("\n".join(lines))


def refuse_steps(choice: Choice, steps: int, folder: Path) -> None:
    """Refuse a checkpoint that a run of ``steps`` steps in total cannot resume from in a run folder.

    Raises:
        ConfigError: the checkpoint has more steps, or the folder has an undamaged checkpoint of later steps.
    """
    done = read_info(choice.path).step
    problems: list[str] = []
    if steps < done:
        problems.append(
            f"training.steps must be at least {done}, the step of {choice.path}, found {steps}; "
            "or resume from an earlier checkpoint"
        )
    damaged = [one.name for one, _ in choice.damaged]
    later = later_checkpoints(choice.path, folder)
    # The run renames damaged later ones; an undamaged one would be overwritten by a different continuation.
    if any(one.name not in damaged and _problem(one) is None for one in later):
        problems.append(
            f"output.folder {folder} has checkpoints of later steps than {choice.path.name}; "
            "resume from the latest one, or choose another output.folder"
        )
    if problems:
        raise ConfigError(problems, "resuming from a checkpoint")


def goes_on_in(resume: Path, folder: Path) -> bool:
    """Whether ``resume``, a run folder or a checkpoint, belongs to the run in ``folder``."""
    run = run_of(resume) if is_checkpoint(resume) else resume
    # Resolved, because of symbolic links and relative paths.
    return run is not None and run.resolve() == folder.resolve()


def later_checkpoints(checkpoint: Path, folder: Path) -> list[Path]:
    """Checkpoints of later steps in a run folder, complete or not; none if ``checkpoint`` is of another run."""
    if not goes_on_in(checkpoint, folder):
        return []
    done = read_info(checkpoint).step
    return [one for one in step_folders(folder) if (step_of(one) or 0) > done]


def _problem(checkpoint: Path) -> str | None:
    """Why a checkpoint is damaged or incomplete; ``None`` if it is neither."""
    found = [f"{name} is missing" for name in missing_files(checkpoint)] or damage(checkpoint)
    return "; ".join(found) or None


def refusal(checkpoint: Path) -> str:
    """The message for a damaged checkpoint, with the undamaged ones of its run."""
    run = run_of(checkpoint)
    others = [one for one in step_folders(run) if one != checkpoint] if run is not None else []
    whole = [one.name for one in others if _problem(one) is None]
    hint = f"undamaged ones of its run: {', '.join(whole)}" if whole else "its run has no undamaged one"
    return f"the checkpoint {checkpoint} is damaged: {_problem(checkpoint)}; {hint}"
