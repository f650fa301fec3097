"""The smallest noun: one thing that one rank does once in a step."""

import re
from typing import NamedTuple

from pipeloom.errors import ScheduleTextError
from pipeloom.schedule.kinds import STAGE_KINDS, Kind

# The longest names first, since R also begins RECV_F; ASCII, since \d matches digits of all scripts.
_PATTERN = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(?:(\d+)(?:\.(\d+))?)?", re.ASCII)
_MOST_DIGITS = 10
"""Of a number in an action's text: ``Row`` holds those below 2 ** 31."""
_MOST_SHOWN = 60
"""Characters of a text that is no action, in a message."""


class Action(NamedTuple):
    """One entry of a schedule's row: a kind of work, on a stage, for a micro-batch.

    Identity has no time in it: two actions are equal if they are the same work.

    Examples:
        >>> from pipeloom import Action, Kind
        >>> action = Action(Kind.FORWARD, stage=2, microbatch=0)
        >>> print(action)
        2F0
        >>> Action.parse("2F0") == action
        True

    Attributes:
        kind: what is done.
        stage: global stage index, 0 is the model's beginning. For a send it is the sender's stage, for
            a receive the receiver's.
        microbatch: micro-batch index, or ``None`` for the kinds in ``STAGE_KINDS``.
        slice: index of the token slice, 0 where sequences are not sliced.
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    slice: int = 0

    def __str__(self) -> str:
        """Text form: ``2F0``, ``2SEND_F0``, ``2UNSHARD``; ``2F0.1`` for token slice 1."""
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        return f"{self.stage}{self.kind.value}{microbatch}" + (f".{self.slice}" if self.slice else "")

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the text form.

        Raises:
            ScheduleTextError: the text is not an action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleTextError(_explain(text.strip()))
        stage, kind, microbatch, part = match.groups()
        if max(len(number or "") for number in (stage, microbatch, part)) > _MOST_DIGITS:
            raise ScheduleTextError(f"'{_short(text.strip())}' has a number of more than {_MOST_DIGITS} digits")
        action = cls(Kind(kind), int(stage), None if microbatch is None else int(microbatch), int(part or 0))
        if (action.microbatch is None) != (action.kind in STAGE_KINDS):
            wanted = "no micro-batch" if action.kind in STAGE_KINDS else "a micro-batch"
            raise ScheduleTextError(
                f"'{text.strip()}' is no action: {action.kind} takes {wanted}, such as {_example(action)}"
            )
        return action


def _example(action: Action) -> Action:
    return action._replace(microbatch=None if action.kind in STAGE_KINDS else 0)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _explain(text: str) -> str:
    text = _short(text)
    if "OVERLAP" in text:
        return f"'{text}' is an overlapped pair, which pipeloom does not read: write its parts one after the other"
    letters = ", ".join(kind.value for kind in Kind)
    return f"'{text}' is no action: expected stage, kind, micro-batch, such as 2F0; the kinds are {letters}"
