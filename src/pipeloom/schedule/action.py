"""The smallest noun: one thing that one rank does once in a step."""

import re
from enum import StrEnum
from typing import NamedTuple

from pipeloom.errors import ScheduleTextError


class Kind(StrEnum):
    """What an action does. The value is the letter in an action's text, as PyTorch writes it."""

    FORWARD = "F"
    BACKWARD = "B"
    """Full backward: gradient for the input and for the weights."""
    BACKWARD_INPUT = "I"
    """First half of a split backward: gradient for the input."""
    BACKWARD_WEIGHT = "W"
    """Second half of a split backward: gradient for the weights."""
    RECOMPUTE = "R"
    """The forward once more, from the stage's input, which is all that the forward itself kept for the backward."""
    SEND_F = "SEND_F"
    """Send the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradient for the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient for the stage's output from the next stage."""
    EVICT = "EVICT"
    """Move what a stage keeps for a micro-batch's backward to the rank's partner."""
    LOAD = "LOAD"
    """Move it back."""
    OFFLOAD = "OFFLOAD"
    """Move what a stage keeps for a micro-batch's backward to the memory of the host."""
    RELOAD = "RELOAD"
    """Move it back."""
    UNSHARD = "UNSHARD"
    """Gather the stage's full weights from the ranks that hold shards of them."""
    RESHARD = "RESHARD"
    """Drop the gathered weights again."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Reduce the stage's gradients over the data-parallel ranks."""
    SEND_TIED = "SEND_TIED"
    """Send the matrix that embedding and head share from the first stage, to which it belongs, to the last one."""
    RECV_TIED = "RECV_TIED"
    """Receive that matrix for the head."""
    SEND_TIED_GRAD = "SEND_TIED_GRAD"
    """Send the head's gradient for that matrix from the last stage to the first one."""
    RECV_TIED_GRAD = "RECV_TIED_GRAD"
    """Receive the head's gradient, which becomes part of the first stage's."""
    SWAP_IN = "SWAP_IN"
    """Bring the stage's weights, gradients and optimizer state from the memory of the host."""
    SWAP_OUT = "SWAP_OUT"
    """Move them there."""
    UPDATE = "UPDATE"
    """The optimizer's step on the stage's weights."""


COMPUTE_KINDS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.RECOMPUTE})
COMPUTE_LANE_KINDS = COMPUTE_KINDS | {Kind.UPDATE}
"""Kinds that run on the compute lane."""
USES_WEIGHTS = COMPUTE_KINDS - {Kind.BACKWARD_WEIGHT}
"""Kinds that compute on the stage's weights; their gradient is made of a layer's input and its output's gradient."""
SEND_KINDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVE_KINDS = frozenset({Kind.RECV_F, Kind.RECV_B})
LOAD_OF = {Kind.EVICT: Kind.LOAD, Kind.OFFLOAD: Kind.RELOAD}
"""What brings back what an action moves out: the tier is the partner, or the host."""
OUT_OF = {load: out for out, load in LOAD_OF.items()}
MOVE_KINDS = frozenset(LOAD_OF) | frozenset(OUT_OF)
"""Kinds that move what a stage keeps for a micro-batch."""
STAGE_SWAP_KINDS = frozenset({Kind.SWAP_IN, Kind.SWAP_OUT})
"""Kinds that move a whole stage between device and host."""
COLLECTIVE_KINDS = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""Kinds of the data-parallel lane."""
TIED_SEND_KINDS = frozenset({Kind.SEND_TIED, Kind.SEND_TIED_GRAD})
TIED_RECEIVE_KINDS = frozenset({Kind.RECV_TIED, Kind.RECV_TIED_GRAD})
TIED_KINDS = TIED_SEND_KINDS | TIED_RECEIVE_KINDS
"""Messages about the matrix that embedding and head share."""
STAGE_KINDS = COLLECTIVE_KINDS | TIED_KINDS | STAGE_SWAP_KINDS | {Kind.UPDATE}
"""Kinds that concern a whole stage: their actions name no micro-batch."""

_PATTERN = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(?:(\d+)(?:\.(\d+))?)?", re.ASCII)
_MOST_DIGITS = 10
"""Of a number in an action's text: ``Row`` holds those below 2 ** 31."""
_MOST_SHOWN = 60
"""Characters of a text that is no action, in a message."""


class Action(NamedTuple):
    """One entry of a schedule's row: a kind of work, on a stage, for a micro-batch.

    Identity has no time in it: two actions are equal if they are the same work.

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
