"""Every error that pipeloom raises on purpose.

    PipeloomError
    ├── UserError                the question is wrong: expected, found, what to change
    │   ├── ConfigError          a configuration, with all of its problems at once
    │   ├── HostError            a run that this host cannot hold; another one of the same run may
    │   ├── FamilyError          a family of schedules with a mistake in it: which, in which line of its file
    │   ├── ScheduleTextError    text that is no schedule
    │   └── ScheduleError        a schedule that breaks a rule: which, where, and the rows around it
    └── RunError                 the question was right, the run failed
        ├── BoundaryError        a tensor between two stages has another shape than was agreed
        ├── ActionError          an action raised; its text and the rows around it
        ├── StallError           a rank waited too long; every rank's position
        ├── PeerLostError        another rank went away
        └── WorkerError          a worker process ended; its reason

``Interrupted`` is outside the tree: as a ``KeyboardInterrupt``, no handler of errors catches it by accident.

A bug is an ``AssertionError``: no caller is expected to catch it.
"""

import signal
from collections.abc import Sequence


class PipeloomError(Exception):
    """Root of every error that pipeloom raises on purpose: one clear message, meant for a person.

    Examples:
        >>> from pipeloom import PipeloomError, make_schedule
        >>> try:
        ...     make_schedule("1f1b", pp=4, num_microbatches=0)
        ... except PipeloomError as error:
        ...     print(error)
        schedule '1f1b' has 1 problem:
          - the number of micro-batches must be at least 1, found 0
    """


class UserError(PipeloomError, ValueError):
    """The input is wrong. The message says what was expected, what was found and what to change.

    Examples:
        >>> from pipeloom import UserError, load_cluster
        >>> try:
        ...     load_cluster("dgx-a1000")
        ... except UserError as error:
        ...     print("did you mean" in str(error))
        True
    """


class ConfigError(UserError):
    """A configuration is wrong.

    Args:
        problems: one sentence for each problem; all that could be found are reported together.
        source: where the configuration came from, for the headline.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{source} has {count}:", *(f"  - {p}" for p in problems)]))


class HostError(UserError):
    """This host cannot run the configuration; under a launcher, other hosts may be able to."""


class FamilyError(UserError):
    """A family of schedules raised, or returned something else than rows of actions."""


class ScheduleTextError(UserError):
    """Text that cannot be read as a schedule."""


class ScheduleError(UserError):
    """A schedule breaks a rule.

    Examples:
        >>> from pipeloom import ScheduleError, parse_schedule
        >>> try:
        ...     parse_schedule("0F0 0B0 0F1")
        ... except ScheduleError as error:
        ...     print(error.rule, error.rank, error.slot)
        complete 0 1

    Args:
        rule: name of the broken rule, as listed in ``pipeloom.schedule.rules``.
        message: what is wrong.
        rank: pipeline rank of the offending row, if one row is to blame.
        slot: position in that row, if one action is to blame.
        window: the rows around the place, already formatted.
    """

    def __init__(self, rule: str, message: str, *, rank: int | None, slot: int | None, window: str) -> None:
        self.rule = rule
        self.rank = rank
        self.slot = slot
        place = "" if rank is None else f" at rank {rank}" + ("" if slot is None else f", slot {slot}")
        super().__init__(f"schedule breaks rule '{rule}'{place}: {message}" + (f"\n{window}" if window else ""))


class RunError(PipeloomError, RuntimeError):
    """The run failed although the input was right, such as a loss that is not finite or a process that was killed.

    Examples:
        >>> from pipeloom import PipeloomError, RunError
        >>> issubclass(RunError, PipeloomError)
        True
    """


class BoundaryError(RunError):
    """A tensor that crosses a stage boundary is not what both sides agreed on."""


class ActionError(RunError):
    """An action failed; carries the action's text and the rows around it."""


class StallError(RunError):
    """A rank waited longer than allowed. Names the action that it waited for, and the position of every rank."""


class PeerLostError(RunError):
    """Another rank closed its connection. Its own error is the one to read."""


class WorkerError(RunError):
    """A worker process ended before the work was done."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the work.

    Args:
        number: of the signal.
        message: for people; may be empty.
    """

    def __init__(self, number: int, message: str = "") -> None:
        self.number = number
        super().__init__(message or f"interrupted by {signal.Signals(number).name}")

    @property
    def status(self) -> int:
        """Exit status, as shells have it for a process that a signal ended."""
        return 128 + self.number


def reason_of(error: BaseException) -> str:
    """Why something failed, for a message that names the file itself; the system's words without number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def raised_in(error: BaseException, file: str) -> str | None:
    """File, line and text of the last line of a file that an exception went through; ``None`` for none."""
    from traceback import extract_tb

    if isinstance(error, SyntaxError) and error.filename == file:
        return _line(file, error.lineno or 1)
    # The last frame of the file is the nearest to the mistake: below it is the code that it called.
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return _line(file, lines[-1] or 1) if lines else None


def said(error: BaseException) -> str:
    """An exception's name and text."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(file: str, number: int) -> str:
    import linecache

    text = linecache.getline(file, number).strip()
    return f"{file}, line {number}: {text}" if text else f"{file}, line {number}"
