"""Starts the processes of a run again after a failure (``restart.times``)."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint
from pipeloom.checkpoint.checkpoint_folder import list_checkpoints, read_info, step_of
from pipeloom.checkpoint.kept_files import newest_kept
from pipeloom.config import RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.errors import PipeloomError, RunError, UserError, WorkerError
from pipeloom.execute.processes.world import is_launched
from pipeloom.runs.hang import read_hang
from pipeloom.runs.run_folder import CONFIG, RunFolder
from pipeloom.runs.run_start import go_back, remove_unfinished
from pipeloom.system.temporary import SHARED_MEMORY, temporary_folder


@dataclass(frozen=True)
class Again:
    """Where the ranks keep their states, and whether they were started before.

    Attributes:
        folder: in shared memory; ``None`` without ``restart.times``.
        step: of the state in ``before`` to resume from; ``None`` for a checkpoint, or the begin.
        before: folder with that state.
        is_again: whether processes of this run have failed before.
        since: steps before the first one of this run with this layout.
    """

    folder: Path | None = None
    step: int | None = None
    before: Path | None = None
    is_again: bool = False
    since: int = 0

    def leave_before(self) -> None:
        """Free the memory of the state that the ranks began from, under another layout."""
        if self.before is not None and self.before != self.folder:
            for file in self.before.glob("rank-*"):
                file.unlink(missing_ok=True)


NEVER = Again()


class Restarts:
    """Runs a job on the ranks of a run, again after failures.

    Args:
        config: of the run.
        folder: of the run; this process has its lock.
        print_line: prints a line.
        stack: on which folders in shared memory are removed at the end.
    """

    def __init__(
        self, config: RunConfig, folder: RunFolder, print_line: Callable[[str], None], stack: ExitStack
    ) -> None:
        self.config = config
        self._folder, self._print_line, self._stack = folder, print_line, stack
        self._failures: Counter[int] = Counter()
        self._done = 0
        self._last: tuple[int | None, str] | None = None
        resume = config.checkpoint.resume
        self._again = Again(self._new_folder(), since=0 if resume is None else read_info(resume).step)

    def run(self, job: Callable[[RunConfig, Again], Any]) -> Any:
        """Call ``job`` with the configuration until it returns.

        Raises:
            RunError: a rank has failed too often.
        """
        while True:
            try:
                return job(self.config, self._again)
            except RunError as error:
                if not self.config.restart.times:
                    raise
                self._prepare(error)

    def _prepare(self, error: RunError) -> None:
        """Choose layout and state for the next start, or raise the error."""
        rank = _culprit(error, self._folder.path)
        self._failures[rank] += 1
        self._use_choices()
        step, before = self._newest()
        self._refuse_repetition(step, error)
        layout = ""
        if self._failures[rank] > self.config.restart.times:
            layout = f", without rank {rank}: {self._leave_out(rank, error)}"
        folder = self._new_folder() if layout else self._again.folder
        where = f"step {step}, in memory" if step is not None else self._use_checkpoint()
        done = self._done if step is None else step
        since = done if layout else min(done, self._again.since)
        self._again = Again(folder, step, before, is_again=True, since=since)
        self._forget_lost()
        remove_unfinished(self._folder.path)
        if layout:
            self._folder.forget_measured()
        if not self._folder.is_starting:
            go_back(self._folder, done)
        line = f"started again from {where}{layout}, after: {str(error).splitlines()[0]}"
        self._print_line(f"restart    {line}")
        self._folder.add_warning(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}  {line}")

    def _refuse_repetition(self, step: int | None, error: RunError) -> None:
        """Raise an error that another start does not mend: the same one from the same state, and no rank is its reason.

        Such as a loss that is not finite, which all ranks compute again.
        """
        failure = (step, str(error).splitlines()[0])
        if failure == self._last and not _has_culprit(error):
            error.add_note("this is the second failure of this kind at the same step; a new start would not mend it")
            raise error
        self._last = failure

    def _newest(self) -> tuple[int | None, Path | None]:
        """The newest state in memory that all ranks have, and its folder; ``None`` for no step."""
        own, before = self._again.folder, self._again.before
        assert own is not None
        step = newest_kept(own, self.config.layout.num_ranks)
        if step is None and before != own and self._again.step is not None:
            return self._again.step, before  # it failed again before it kept a state of its own
        return step, own

    def _leave_out(self, rank: int, error: RunError) -> str:
        """Continue with fewer ranks, or raise the error; returns the layout in words."""
        from pipeloom.training.automatic.fewer_ranks import with_fewer_ranks  # not at the start: it loads the planner

        fewer = with_fewer_ranks(self.config) if self.config.restart.layout == "plan" else None
        if fewer is None:
            error.add_note(f"rank {rank} has failed {self._failures[rank]} times, more often than restart.times")
            if self.config.restart.layout == "plan":
                error.add_note("restart.layout plan: no layout of fewer ranks takes the batch and the other settings")
            raise error
        self.config = fewer
        self._failures.clear()  # the ranks have other numbers now
        return _words(fewer)

    def _use_choices(self) -> None:
        """Take what the ranks chose by measuring from the run folder, so that it is not chosen again."""
        file = self._folder.path / CONFIG
        if not self._folder.is_starting and file.is_file():
            earlier, _ = read_run_file(file)
            self.config = replace(self.config, layout=earlier.layout, schedule=earlier.schedule)

    def _forget_lost(self) -> None:
        """Name another checkpoint than the one that the run began from, if that is not there any more."""
        resume = self.config.checkpoint.resume
        if resume is not None and not resume.exists():
            found = list_checkpoints(self._folder.path)
            resume = found[-1] if found else None
            self.config = replace(self.config, checkpoint=replace(self.config.checkpoint, resume=resume))

    def _use_checkpoint(self) -> str:
        """Resume from the newest undamaged checkpoint of the run, if it has any."""
        self._done = 0
        path = self._folder.path
        if not self._folder.is_starting and list_checkpoints(path):
            chosen = choose_checkpoint(path).path
            self._done = step_of(chosen) or 0
            self.config = replace(self.config, checkpoint=replace(self.config.checkpoint, resume=chosen))
            return f"{chosen.name}, on the disk"
        resume = self.config.checkpoint.resume
        self._done = 0 if resume is None else step_of(resume) or 0
        return "the begin" if resume is None else f"{resume.name}, from which it began"

    def _new_folder(self) -> Path | None:
        if not self.config.restart.times:
            return None
        return self._stack.enter_context(temporary_folder(SHARED_MEMORY))


def _has_culprit(error: RunError) -> bool:
    """Whether one rank is the reason: a signal killed it, or a check found it wrong."""
    return isinstance(error, WorkerError) and (error.was_killed or error.is_wrong)


def _culprit(error: RunError, run: Path) -> int:
    """The rank that is the reason of a failure."""
    if isinstance(error, WorkerError) and error.rank is not None and _has_culprit(error):
        return error.rank
    try:
        found = read_hang(run).found
    except PipeloomError:
        found = ()
    if found:
        return found[0].rank
    return error.rank or 0 if isinstance(error, WorkerError) else 0


def _words(config: RunConfig) -> str:
    layout = config.layout
    return f"{config.title}, {layout.axes.product('layout.')}, layout.loops {layout.num_loops}"


def refuse_launched(config: RunConfig) -> None:
    """Refuse ``restart.times`` under a launcher, which starts processes again itself.

    Raises:
        UserError: names what to do instead.
    """
    if config.restart.times and is_launched():
        raise UserError(
            f"restart.times {config.restart.times} has no effect under a launcher, which starts processes itself; "
            "leave it out, and let the launcher start the same command with --checkpoint.resume RUN "
            "(the scripts of `pipeloom launch` do)"
        )
