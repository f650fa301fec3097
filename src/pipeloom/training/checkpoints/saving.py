"""When a run writes a checkpoint, and when it ends early: what all ranks decide together after each step."""

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
    """Writes checkpoints in time, and ends the run in order on a signal.

    Ranks notice signals at different times, or only some do, and their clocks differ. So each rank votes in the sum
    that ends a step anyway, and all act on the sums. All ranks call ``write``, and all raise a
    ``RunError`` if one could not write.
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
        """Note that a step begins; from the first one on, a signal lets the run end in order."""
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
        """What this rank adds to the sums of a step: whether a checkpoint is due by the clock, and each signal."""
        every_s = self._config.checkpoint.every_s
        # One clock decides: those of several hosts would disagree about a step now and then.
        is_due = self._world.rank == 0 and 0 < every_s <= time.monotonic() - self._saved_s
        return [float(is_due), *self._signal_votes()]

    def count(self, votes: Sequence[float]) -> None:
        """Note the sums of all ranks' votes."""
        self._votes = votes

    def after_step(self, step: int) -> None:
        """Write a checkpoint if it is time for one, and end the run after a signal.

        Raises:
            Interrupted: a signal ended the run; what could be saved is.
            RunError: the checkpoint after the last step cannot be written.
            PeerLostError: another rank went away.
        """
        # The least: only where even that is longer than the grace is it certain that the run cannot end in order.
        self._least_step_s = _least(self._least_step_s, time.monotonic() - self._step_begin_s)
        is_due, *signals = self._votes
        number = self._signal_in(signals)
        cause = self._cause(step, is_due=is_due > 0, is_stopped=number is not None)
        if cause is not None:
            # Without the last checkpoint the work would be lost in silence; another failure is followed by another try.
            is_needed = step == self._config.training.known_steps and number is None
            number = self._save(step, cause, is_needed=is_needed) or number
        if number is not None:
            raise Interrupted(number)

    def end(self) -> None:
        """Note that all steps are done: from now on, a signal ends the run at once.

        Raises:
            Interrupted: one came since the last step.
        """
        self.signals.waits = False
        if self.signals.number is not None:
            raise Interrupted(self.signals.number)

    def _cause(self, step: int, *, is_due: bool, is_stopped: bool) -> Cause | None:
        settings, is_last = self._config.checkpoint, step == self._config.training.known_steps
        # First the causes whose checkpoints stay: one that is due by steps must not go as one by the clock.
        if is_last and settings.final != "none":
            return "end"
        if settings.every is not None and step % settings.every == 0:
            return "steps"
        if is_stopped:
            return "signal"
        return "clock" if is_due and not is_last else None

    def _save(self, step: int, cause: Cause, *, is_needed: bool) -> int | None:
        """Write a checkpoint; the signal that has come meanwhile. A failure is a warning, unless it is needed."""
        begin_s = time.monotonic()
        try:
            self._write(step, cause)
        # Not a failure to write: without the other rank there is no next step.
        except PeerLostError:
            raise
        except RunError as error:  # on all ranks
            problem = f"{error}{self._room()}"
            if is_needed:
                raise RunError(problem) from None
            self._warn(step, problem)
        else:
            self._least_save_s = _least(self._least_save_s, time.monotonic() - begin_s)
        # After a failure as well: a full disk is tried again after every_s and not after each step.
        self._saved_s = time.monotonic()
        # Writing may take minutes, in which a signal may have come.
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
        """How much room there is for a checkpoint: of a full disk, torch reports whatever fails first."""
        try:
            return f" ({format_bytes(shutil.disk_usage(self._folder.path).free)} are free on its disk)"
        except OSError:
            return ""

    def _warn(self, step: int, problem: str) -> None:
        """Print that a checkpoint is missing, and note it in the run folder, as far as the disk has room for it."""
        if self._world.rank > 0:
            return
        text = f"step {step}: {problem}; the run goes on without this checkpoint"
        self._say(f"warning: {text}")
        self._folder.add_warning(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}  {text}")

    def _say(self, message: str) -> None:
        with suppress(OSError):  # of a terminal that has gone away
            if self._world.rank > 0:
                return
            print(printable(f"pipeloom train: {message}"), file=sys.stderr, flush=True)  # noqa: T201  people wait for it

    def _last_words(self, number: int) -> None:
        """Print what is safe, where no other process does."""
        if is_launched():
            self._say(f"{Interrupted(number)}\n{safe_steps(self._config, self._folder)}")


def _least(known: float, found: float) -> float:
    """The smaller one of two times, of which the first is 0 as long as nothing is known."""
    return min(known, found) if known else found


def safe_steps(config: RunConfig, folder: RunFolder) -> str:
    """What is not lost of a run that ended early, and the command that goes on; for people."""
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
