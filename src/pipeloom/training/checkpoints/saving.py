"""Decides after each step, the same on all ranks, whether to write a checkpoint and whether to end the run early."""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime

from pipeloom.checkpoint.checkpoint_folder import Cause, list_checkpoints, step_of
from pipeloom.config import RunConfig
from pipeloom.errors import Interrupted, PeerLostError, RunError
from pipeloom.execute.processes.signals import STOPS, StopSignals
from pipeloom.execute.processes.world import World, is_launched
from pipeloom.runs.run_folder import CONFIG, RunFolder
from pipeloom.terminal.guard import printable
from pipeloom.terminal.words import format_bytes

GRACE = "checkpoint.grace_s"


class Saving:
    """Writes checkpoints when they are due, and ends the run with a checkpoint after a signal.

    Ranks receive signals at different times, or only some do, and their clocks differ. So each rank adds its votes to
    the all-reduce at the end of a step, and all ranks act on the sums. All ranks call ``write``, and all raise a
    ``RunError`` if one of them could not write.
    """

    def __init__(self, config: RunConfig, world: World, folder: RunFolder, write: Callable[[int, Cause], None]) -> None:
        self._config = config
        self._world = world
        self._folder = folder
        self._write = write
        self.signals = StopSignals(config.checkpoint.grace_s, GRACE, self._say, self._last_words)
        self._votes: Sequence[float] = ()
        self._saved_s = time.monotonic()
        self._step_begin_s = 0.0
        self._least_step_s = self._least_save_s = 0.0

    def begin_step(self) -> None:
        """Note that a step begins. From the first step on, a signal ends the run after a step instead of at once."""
        self._step_begin_s = time.monotonic()
        if not self.signals.waits:
            self.signals.waits = True
            # Start-up is not lost work, so the first interval begins with the first step.
            self._saved_s = self._step_begin_s
        self.signals.expect(
            self._least_step_s + self._least_save_s,
            f"a step takes {self._least_step_s:.1f} s and a checkpoint {self._least_save_s:.1f} s",
        )

    def votes(self) -> list[float]:
        """This rank's votes of a step: 1 if a checkpoint is due by the clock, then 1 for each received signal."""
        every_s = self._config.checkpoint.every_s
        # Rank 0's clock alone decides; clocks of several hosts would sometimes disagree.
        is_due = self._world.rank == 0 and 0 < every_s <= time.monotonic() - self._saved_s
        return [float(is_due), *self._signal_votes()]

    def count(self, votes: Sequence[float]) -> None:
        """Store the sums of all ranks' votes."""
        self._votes = votes

    def after_step(self, step: int) -> None:
        """Write a checkpoint if one is due, and end the run after a signal.

        Raises:
            Interrupted: a signal ended the run, after a checkpoint unless that could not be written.
            RunError: the checkpoint after the last step cannot be written.
            PeerLostError: another rank exited or does not answer.
        """
        # The minimum: only if even that exceeds the grace period is it certain that no checkpoint can be written.
        self._least_step_s = _least(self._least_step_s, time.monotonic() - self._step_begin_s)
        is_due, *signals = self._votes
        number = self._signal_in(signals)
        cause = self._cause(step, is_due=is_due > 0, is_stopped=number is not None)
        if cause is not None:
            # Without the last checkpoint the run would end in success and lose its work; earlier ones are tried again.
            is_needed = step == self._config.training.known_steps and number is None
            number = self._save(step, cause, is_needed=is_needed) or number
        if number is not None:
            raise Interrupted(number)

    def end(self) -> None:
        """Note that all steps are done. From now on, a signal ends the run at once.

        Raises:
            Interrupted: a signal arrived after the last step.
        """
        self.signals.waits = False
        if self.signals.number is not None:
            raise Interrupted(self.signals.number)

    def _cause(self, step: int, *, is_due: bool, is_stopped: bool) -> Cause | None:
        settings, is_last = self._config.checkpoint, step == self._config.training.known_steps
        # Causes whose checkpoints stay come first: those of the clock and of signals are removed later.
        if is_last and settings.final != "none":
            return "end"
        if settings.every is not None and step % settings.every == 0:
            return "steps"
        if is_stopped:
            return "signal"
        return "clock" if is_due and not is_last else None

    def _save(self, step: int, cause: Cause, *, is_needed: bool) -> int | None:
        """Write a checkpoint; returns a signal that arrived meanwhile. A failure only warns, unless ``is_needed``."""
        begin_s = time.monotonic()
        try:
            self._write(step, cause)
        # Not a failure to write: without the other rank the run cannot continue.
        except PeerLostError:
            raise
        except RunError as error:  # raised on all ranks
            problem = f"{error}{self._room()}"
            if is_needed:
                raise RunError(problem) from None
            self._warn(step, problem)
        else:
            self._least_save_s = _least(self._least_save_s, time.monotonic() - begin_s)
        # After a failure as well: a full disk is tried again after every_s, not after each step.
        self._saved_s = time.monotonic()
        # Writing may take minutes; a signal may have arrived meanwhile.
        return self._signal_in(self._world.sum(self._signal_votes()))

    def _signal_votes(self) -> list[float]:
        return [float(self.signals.number == number) for number in STOPS]

    def _signal_in(self, votes: Sequence[float]) -> int | None:
        """The signal that ends the run, whichever ranks received it; all ranks agree on it."""
        number = next((number for number, vote in zip(STOPS, votes, strict=True) if vote > 0), None)
        if number is not None:
            self.signals.agree(number)
        return number

    def _room(self) -> str:
        """Free space of the disk, for the message: torch does not name a full disk as the cause."""
        try:
            return f" ({format_bytes(shutil.disk_usage(self._folder.path).free)} are free on its disk)"
        except OSError:
            return ""

    def _warn(self, step: int, problem: str) -> None:
        """Print that a checkpoint is missing, and add that to the run folder if the disk has space."""
        if self._world.rank > 0:
            return
        text = f"step {step}: {problem}; the run continues without this checkpoint"
        self._say(f"warning: {text}")
        self._folder.add_warning(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}  {text}")

    def _say(self, message: str) -> None:
        with suppress(OSError):  # of a closed terminal
            if self._world.rank > 0:
                return
            print(printable(f"pipeloom train: {message}"), file=sys.stderr, flush=True)  # noqa: T201  people wait for it

    def _last_words(self, number: int) -> None:
        """Under a launcher, print what is saved; otherwise the parent process does."""
        if is_launched():
            self._say(f"{Interrupted(number)}\n{safe_steps(self._config, self._folder)}")


def _least(minimum: float, seconds: float) -> float:
    """The smaller of two times; a first one of 0 means none yet."""
    return min(minimum, seconds) if minimum else seconds


def safe_steps(config: RunConfig, folder: RunFolder) -> str:
    """Describe what a run that ended early has saved, and the command that resumes it."""
    run = folder.path
    if folder.is_starting:
        return f"No step was done; {run} is as it was."
    checkpoints, begun = list_checkpoints(run), config.checkpoint.resume
    where = f"What the run wrote until then is in {run}."
    if not checkpoints and begun is None:
        return f"No checkpoint was written, so no step is safe. {where}"
    words = ["pipeloom", "train", str(run / CONFIG)]
    if checkpoints:
        # The run folder instead of a checkpoint: a restart then chooses the newest undamaged one.
        words += ["--checkpoint.resume", str(run), "--output.folder", str(run)]
        safe = f"{step_of(checkpoints[-1])} of {config.training.steps} steps are safe, in {checkpoints[-1]}."
    else:
        safe = f"No checkpoint was written since {begun}, from which the run started."
    how = "To resume, with the same launcher:" if is_launched() else "To resume:"
    return f"{safe} {where}\n{how} {shlex.join(words)}"
