"""Every error that pipeloom raises on purpose.

    PipeloomError
    ├── UserError                wrong input: expected, found, what to change
    │   ├── ConfigError          a wrong configuration; all of its problems
    │   │   └── CallError        a wrong call of the Python interface; all problems of its arguments
    │   ├── HostError            the run does not fit on this host; it may fit on other hosts
    │   ├── FamilyError          a family of schedules failed; the error, its file and line
    │   ├── StrategyError        a plug-in's strategy of the planner failed; the error, its file and line
    │   ├── OptimizerError       a plug-in's optimizer failed; the error, its file and line
    │   ├── ScheduleTextError    text that is not a schedule
    │   └── ScheduleError        a schedule breaks a rule; the rule, the place and the rows around it
    └── RunError                 correct input, but the run failed
        ├── BoundaryError        a tensor between two stages has another shape than both sides agreed on
        ├── ActionError          an action raised an error; its text and the rows around it
        ├── WrongRankError       a rank stores or computes wrong values; which one
        ├── StallError           a rank waited too long; the position of every rank
        ├── PeerLostError        another rank closed its connection
        └── WorkerError          a worker process ended early; its reason

``Interrupted`` is outside the tree: it is a ``KeyboardInterrupt``, so that ``except Exception`` does not catch it.

A bug is an ``AssertionError``: no caller is expected to catch it.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

TRACEBACK = "PIPELOOM_TRACEBACK"
"""Variable of the environment: whether a traceback is printed with every error."""


class PipeloomError(Exception):
    """Base class of every error that pipeloom raises on purpose. Its text is a complete message for the user.

    Examples:
        >>> from pipeloom import PipeloomError, make_schedule
        >>> try:
        ...     make_schedule("1f1b", pp=4, num_microbatches=0)
        ... except PipeloomError as error:
        ...     print(error)
        schedule '1f1b' has 1 problem:
          - the number of micro-batches must be at least 1, found 0

    Attributes:
        family: the family of schedules whose rows or rule are wrong; ``None`` for any other error.
        strategy: the strategy of the planner that failed; ``None`` for any other error.
    """

    family: str | None = None
    strategy: str | None = None


class UserError(PipeloomError, ValueError):
    """The input is wrong. The message states what was expected, what was found and what to change.

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
        problems: one sentence for each problem.
        source: where the configuration came from, such as the name of its file; begins the message.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n".join([f"{source} has {count}:", *(f"  - {p}" for p in problems)]))


class CallError(ConfigError, TypeError):
    """A call of the Python interface has wrong arguments; also a ``TypeError``, which Python raises for such calls."""


class HostError(UserError):
    """This host cannot run the configuration; under a launcher, other hosts may be able to."""


class FamilyError(UserError):
    """A family of schedules raised an error, or returned something other than rows of actions."""


class StrategyError(UserError):
    """A strategy of the planner that a plug-in adds raised an error."""


class OptimizerError(UserError):
    """An optimizer that a plug-in adds raised an error."""


class ScheduleTextError(UserError):
    """A text is not a schedule."""


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
        rank: pipeline rank of the offending row; ``None`` if no single row is wrong.
        slot: index of the offending action in that row; ``None`` if no single action is wrong.
        window: the rows around it, as text.
    """

    def __init__(self, rule: str, message: str, *, rank: int | None, slot: int | None, window: str) -> None:
        self.rule = rule
        self.rank = rank
        self.slot = slot
        place = "" if rank is None else f" at rank {rank}" + ("" if slot is None else f", slot {slot}")
        super().__init__(f"schedule breaks rule '{rule}'{place}: {message}" + (f"\n{window}" if window else ""))


class RunError(PipeloomError, RuntimeError):
    """The run failed although its input was correct: for example, the loss is not finite or a process was killed.

    Examples:
        >>> from pipeloom import PipeloomError, RunError
        >>> issubclass(RunError, PipeloomError)
        True
    """


class BoundaryError(RunError):
    """A tensor between two stages has another shape or dtype than both sides agreed on."""


class ActionError(RunError):
    """An action failed. The message has its text and the rows around it."""


class StallError(RunError):
    """A rank waited too long. The message has the action that it waited for, and the position of every rank."""


class PeerLostError(RunError):
    """Another rank closed its connection; the cause is in that rank's own error."""


class WrongRankError(RunError):
    """A rank stores or computes wrong values; every rank raises it.

    Args:
        rank: which one.
        message: for the user.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class WorkerError(RunError):
    """A worker process ended before the work was done.

    Attributes:
        rank: the worker, or the one that a ``WrongRankError`` names; ``None`` where it is not known.
        was_killed: whether a signal killed it, so that this is the reason and no consequence of another one.
        is_wrong: whether it is the rank of a ``WrongRankError``.
        is_reason: whether it is the reason: it neither waited too long nor lost its connection to another one.
        ended: the other workers that were killed because of it.
    """

    rank: int | None = None
    was_killed = False
    is_wrong = False
    is_reason = False
    ended: tuple[int, ...] = ()


class Interrupted(KeyboardInterrupt):
    """A signal ended the work.

    Args:
        number: of the signal.
        message: for the user; empty for a default with the signal's name.
    """

    def __init__(self, number: int, message: str = "") -> None:
        self.number = number
        super().__init__(message or f"interrupted by {signal.Signals(number).name}")

    @property
    def status(self) -> int:
        """Exit status: 75 for a scheduler's signal, otherwise 128 + the number of the signal, as shells report it."""
        # EX_TEMPFAIL of sysexits.h: the same command, started again, resumes.
        return 75 if self.number in (signal.SIGTERM, signal.SIGUSR1) else 128 + self.number


def reason_of(error: BaseException) -> str:
    """Text of an error, for a message that names the file itself: of an ``OSError`` without errno and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def raised_in(error: BaseException, file: str) -> str | None:
    """``FILE, line N: TEXT`` of the innermost frame of a traceback in this file; ``None`` if there is none."""
    from traceback import extract_tb

    if isinstance(error, SyntaxError) and error.filename == file:
        return _line(file, error.lineno or 1)
    # The innermost frame of the file is nearest to the mistake: below it is the code that it called.
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return _line(file, lines[-1] or 1) if lines else None


def raised_by(error: Exception, function: Callable[..., Any]) -> str:
    """What a plug-in's function raised, for a message: the exception, its line in the function's file, what to do."""
    where = raised_in(error, _file_of(function)) or place_of(function)
    return f"{type_and_text(error)}, in {where}; {TRACEBACK}=1 prints the traceback"


def place_of(function: Callable[..., Any]) -> str:
    """File and line in which a function of a plug-in begins."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code is not None else repr(function)


def _file_of(function: Callable[..., Any]) -> str:
    """The file of a function, or of the module of a class."""
    code = getattr(function, "__code__", None)
    if code is not None:
        return code.co_filename
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return getattr(module, "__file__", None) or ""


def type_and_text(error: BaseException) -> str:
    """``TYPE: TEXT`` of an exception, as at the end of a traceback."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(file: str, number: int) -> str:
    import linecache

    text = linecache.getline(file, number).strip()
    return f"{file}, line {number}: {text}" if text else f"{file}, line {number}"
