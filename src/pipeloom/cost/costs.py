"""How long an action takes."""

from dataclasses import dataclass
from typing import Protocol

from pipeloom.schedule import Action, Kind


class Costs(Protocol):
    """Action -> seconds."""

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` keeps its lane busy."""
        ...


@dataclass(frozen=True)
class UniformCosts:
    """Every stage alike.

    Attributes:
        forward_s: seconds of one stage's forward for one micro-batch.
        backward_s: seconds of the full backward; a split backward is two halves of it.
        transfer_s: seconds from the moment both sides of a message are ready until it has arrived. It is
            carried by the receive, so that one edge moves one message at a time.
    """

    forward_s: float
    backward_s: float
    transfer_s: float = 0.0

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` keeps its lane busy."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward_s
            case Kind.BACKWARD:
                return self.backward_s
            case Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT:
                return self.backward_s / 2
            case Kind.RECV_F | Kind.RECV_B:
                return self.transfer_s
        return 0.0


@dataclass(frozen=True)
class StageCosts:
    """Every stage its own, such as measured ones.

    Attributes:
        forward_s: for each stage, seconds of its forward for one micro-batch.
        backward_s: for each stage, seconds of its full backward.
        transfer_s: seconds of moving one tensor between two ranks; carried by the receive.
        weight_share: part of a backward that a split leaves to the gradients of the weights.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: float = 0.0
    weight_share: float = 0.5

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` keeps its lane busy."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward_s[action.stage]
            case Kind.BACKWARD_INPUT:
                return self.backward_s[action.stage] * (1 - self.weight_share)
            case Kind.BACKWARD_WEIGHT:
                return self.backward_s[action.stage] * self.weight_share
        return UniformCosts(0.0, self.backward_s[action.stage], self.transfer_s).seconds(action)
