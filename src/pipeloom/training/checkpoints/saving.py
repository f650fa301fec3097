"""Decides after each step, the same on all ranks, whether to write a checkpoint and whether to end the run early."""

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pipeloom.checkpoint.checkpoint_folder import Cause, damage, list_checkpoints, step_of
from pipeloom.config import RunConfig
from pipeloom.errors import Interrupted, PeerLostError, RunError
from pipeloom.execute.processes.signals import StopSignals
from pipeloom.execute.processes.world import World, is_launched
from pipeloom.runs.run_folder import CONFIG, RunFolder, put_aside
from pipeloom.system.end_signals import STOPS
from pipeloom.terminal.guard import print_beside
from pipeloom.terminal.words import format_bytes, quoted

GRACE = "checkpoint.grace_s"
LIMIT = "checkpoint.time_limit_s"
_SPARE = 1.5
"""Factor of the last checkpoint's seconds that are kept free before the time limit."""
_SAVE_S = 5.0
"""Seconds that are kept free before the first checkpoint."""


class Writer(Protocol):
    """Writes the state of a run; all ranks call all methods in the same order."""

    def write(self, step: int, cause: Cause, *, in_background: bool) -> bool:
        """Write a checkpoint; returns whether a thread writes it while training continues."""

    def ended(self, *, waits: bool) -> float | None:
        """Seconds that the thread wrote for; ``None`` if there is none, or it still writes. Raises its error."""


class Saving:
    """Writes checkpoints when they are due, and ends the run with a checkpoint after a signal.

    Checkpoints between steps are written by a thread, one at a time (``checkpoint.background``). The run waits for the
    last one, and for that of a signal. A checkpoint by ``every`` waits for an unfinished one; the clock skips it.

    Ranks receive signals at different times, or only some do, and their clocks differ. So each rank adds its votes to
    the all-reduce at the end of a step, and all ranks act on the sums. All ranks call the writer, and all raise a
    ``RunError`` if one of them could not write.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        folder: RunFolder,
        writer: Writer,
        begun_s: float | None = None,
    ) -> None:
        self._config = config
        self._world = world
        self._folder = folder
        self._writer = writer
        self._writing: int | None = None  # step of the checkpoint that the thread writes
        self.signals = StopSignals(config.checkpoint.grace_s, GRACE, self._print_line, self._last_words)
        self._votes: Sequence[float] = ()
        self._saved_s = time.monotonic()
        self._step_begin_s = 0.0
        self._least_step_s = self._least_save_s = 0.0
        self._last_step_s = self._last_save_s = 0.0
        self._begun_s = self._saved_s if begun_s is None else begun_s

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
        """This rank's votes of a step: a checkpoint is due, the time limit is near, and one for each signal."""
        every_s = self._config.checkpoint.every_s
        # Rank 0's clock alone decides; clocks of several hosts would sometimes disagree.
        is_late = self._writing is None and 0 < every_s <= time.monotonic() - self._saved_s
        is_due = self._world.rank == 0 and is_late
        is_over = self._is_last_in_time(max(self._last_step_s, time.monotonic() - self._step_begin_s))
        return [float(is_due), float(is_over), *self._signal_votes()]

    def _is_last_in_time(self, step_s: float) -> bool:
        """Whether another step of so many seconds could end after ``checkpoint.time_limit_s``, by rank 0's clock."""
        limit_s = self._config.checkpoint.time_limit_s
        if limit_s is None or self._world.rank > 0:
            return False
        # The last checkpoint waits for one that is being written.
        num_saves = 1 if self._writing is None else 2
        save_s = num_saves * _SPARE * (self._last_save_s or _SAVE_S)
        return time.monotonic() + step_s + save_s > self._begun_s + limit_s

    def count(self, votes: Sequence[float]) -> None:
        """Store the sums of all ranks' votes."""
        self._votes = votes

    def ends_now(self) -> bool:
        """Whether the run ends after this step, also since its votes were counted. Collective.

        Validation may take longer than the grace period; the checkpoint must not wait for its end.
        """
        is_due, is_over, *_ = self._votes
        # The shortest step: only if even that does not fit any more is the rest of a validation given up.
        late = float(self._is_last_in_time(self._least_step_s))
        late, *signals = self._world.sum([late, *self._signal_votes()])
        self._votes = [is_due, is_over + late, *signals]
        return any(vote > 0 for vote in self._votes[1:])

    def newest_whole(self) -> Path | None:
        """The newest undamaged checkpoint; newer ones are renamed, with a warning. Collective."""
        world, is_first = self._world, self._world.rank == 0
        for checkpoint in world.from_first(list_checkpoints(self._folder.path)[::-1] if is_first else []):
            found = world.from_first(world.gather(damage(checkpoint, world.rank, world.size)))
            problems = dict.fromkeys(problem for of_rank in found for problem in of_rank)
            if not problems:
                return checkpoint
            if is_first:
                self._folder.warn(f"{checkpoint.name} is damaged: {'; '.join(problems)}")
                put_aside(checkpoint)
        return None

    def after_step(self, step: int) -> None:
        """Write a checkpoint if one is due, and end the run after a signal.

        Raises:
            Interrupted: a signal ended the run, after a checkpoint unless that could not be written.
            RunError: the checkpoint after the last step cannot be written.
            PeerLostError: another rank exited or does not answer.
        """
        # The minimum: only if even that exceeds the grace period is it certain that no checkpoint can be written.
        self._last_step_s = time.monotonic() - self._step_begin_s
        self._least_step_s = _least(self._least_step_s, self._last_step_s)
        self._take_result(waits=False)
        is_due, is_over, *signals = self._votes
        number = self._signal_in(signals)
        reason = ""
        if number is None and is_over > 0 and step < self._config.training.known_steps:
            # As Slurm's warning before its own limit.
            number, reason = (
                signal.SIGUSR1,
                f"the next step may exceed {LIMIT} {self._config.checkpoint.time_limit_s:g}",
            )
        cause = self._cause(step, is_due=is_due > 0, is_stopped=number is not None)
        if cause is not None:
            # Without the last checkpoint the run would end in success and lose its work; earlier ones are tried again.
            is_last = step == self._config.training.known_steps
            if number is None and not is_last and self._config.checkpoint.background:
                self._begin(step, cause)
            else:
                number = self._save(step, cause, is_needed=is_last and number is None) or number
        if number is not None:
            raise Interrupted(number, reason)

    def settle(self) -> None:
        """Wait for the thread, so that a run that fails leaves its last checkpoint."""
        self._take_result(waits=True)

    def end(self) -> None:
        """Note that all steps are done, and wait for the thread. From now on, a signal ends the run at once.

        Raises:
            Interrupted: a signal arrived after the last step.
            PeerLostError: another rank exited or does not answer.
        """
        self._take_result(waits=True)
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
        self._take_result(waits=True)
        with self._failures(step, is_needed=is_needed):
            begin_s = time.monotonic()
            self._writer.write(step, cause, in_background=False)
            self._note_save(time.monotonic() - begin_s)
        # After a failure as well: a full disk is tried again after every_s, not after each step.
        self._saved_s = time.monotonic()
        # Writing may take minutes; a signal may have arrived meanwhile.
        return self._signal_in(self._world.sum(self._signal_votes()))

    def _begin(self, step: int, cause: Cause) -> None:
        """Let the thread write a checkpoint. A failure only warns, after a later step."""
        self._take_result(waits=True)
        with self._failures(step):
            self._writing = step if self._writer.write(step, cause, in_background=True) else None
        self._saved_s = time.monotonic()

    def _take_result(self, *, waits: bool) -> None:
        """Note that the thread has written its checkpoint, or print why it could not."""
        if self._writing is None:
            return
        with self._failures(self._writing):
            save_s = self._writer.ended(waits=waits)
            if save_s is None:
                return
            self._note_save(save_s)
        self._writing = None

    def _note_save(self, save_s: float) -> None:
        self._last_save_s = save_s
        self._least_save_s = _least(self._least_save_s, save_s)

    @contextmanager
    def _failures(self, step: int, *, is_needed: bool = False) -> Iterator[None]:
        """Turn a failure to write, which all ranks raise, into a warning, unless ``is_needed``."""
        try:
            yield
        # Not a failure to write: without the other rank the run cannot continue.
        except PeerLostError:
            raise
        except RunError as error:
            problem = f"{error}{self._room()}"
            if is_needed:
                raise RunError(problem) from None
            self._warn(step, problem)

    def _signal_votes(self) -> list[float]:
        return [float(self.signals.number == number) for number in STOPS]

    def _signal_in(self, votes: Sequence[float]) -> int | None:
        """The signal that ends the run, whichever ranks received it; all ranks agree on it."""
        number = next((number for number, vote in zip(STOPS, votes, strict=True) if vote > 0), None)
        if number is not None:
            self.signals.agree(number)
        return number

    def _room(self) -> str:
        """Free space of the disk for the message, which is that without the checkpoint: its files are removed."""
        try:
            return f" ({format_bytes(shutil.disk_usage(self._folder.path).free)} are free on its disk without it)"
        except OSError:
            return ""

    def _warn(self, step: int, problem: str) -> None:
        """Print that a checkpoint is missing, and add that to the run folder if the disk has space."""
        if self._world.rank > 0:
            return
        text = f"step {step}: {problem}; the run continues without this checkpoint"
        self._folder.warn(text)

    def _print_line(self, message: str) -> None:
        if self._world.rank == 0:
            print_beside(f"pipeloom train: {message}")

    def _last_words(self, number: int) -> None:
        """Under a launcher, print what is saved; otherwise the parent process does."""
        if is_launched():
            self._print_line(f"{Interrupted(number)}\n{safe_steps(self._config, self._folder)}")


def _least(minimum: float, seconds: float) -> float:
    """The smaller of two times; a first one of 0 means none yet."""
    return min(minimum, seconds) if minimum else seconds


def safe_steps(config: RunConfig, folder: RunFolder) -> str:
    """Describe what a run that ended early has saved, and the command that resumes it."""
    run = folder.path
    if folder.is_starting:
        return f"No step was done, and nothing was written to {run}."
    checkpoints, begun = list_checkpoints(run), config.checkpoint.resume
    where = f"What the run wrote until then is in {run}."
    if not checkpoints and begun is None:
        return f"No checkpoint was written, so no step is saved. {where}"
    words = ["pipeloom", "train", str(run / CONFIG)]
    if checkpoints:
        # The run folder instead of a checkpoint: a restart then chooses the newest undamaged one.
        words += ["--checkpoint.resume", str(run), "--output.folder", str(run)]
        safe = f"{step_of(checkpoints[-1])} of {config.training.steps} steps are saved, in {checkpoints[-1]}."
    else:
        safe = f"No checkpoint was written since {begun}, from which the run started."
    how = "To resume, with the same launcher:" if is_launched() else "To resume:"
    return f"{safe} {where}\n{how} {quoted(*words)}"
