"""Arrays of a bound: seconds of stages, ranks and of the ways between them; stage inputs that schedules hold."""

from dataclasses import dataclass
from math import ceil, floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
"""An array of seconds, bytes or counts."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch for each stage.

    Attributes:
        forward_s: of its forward.
        backward_s: of its backward.
        weights_s: of the weight gradients in it, where backwards are split.
        hops_s: of the messages from the first stage to it.
    """

    forward_s: Floats
    backward_s: Floats
    weights_s: Floats
    hops_s: Floats

    @property
    def both_s(self) -> Floats:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def inputs_s(self) -> Floats:
        """The part of a backward for which the stage before waits."""
        return self.backward_s - self.weights_s

    @property
    def first_gradient_s(self) -> Floats:
        """Earliest arrival of the gradient of the first micro-batch."""
        behind_s = self.inputs_s.sum() - np.cumsum(self.inputs_s)
        return self.forward_s.sum() + behind_s + 2 * self.hops_s[-1] - self.hops_s

    @property
    def drain_s(self) -> Floats:
        """From a stage's last forward to the end of the first stage's last backward."""
        behind_s = self.forward_s.sum() - np.cumsum(self.forward_s)
        return behind_s + self.inputs_s.sum() + 2 * self.hops_s[-1] - self.hops_s + self.weights_s[0]


@dataclass(frozen=True)
class Work:
    """Seconds of the work of a step, for each rank or for each stage.

    Attributes:
        arrival_s: until a micro-batch arrives at its first stage.
        return_s: from there until the gradient has passed the first stage of the pipeline.
        busy_s: of all its forwards and backwards.
        weights_s: of them the weight gradients that no other rank waits for, where backwards are split.
    """

    arrival_s: Floats
    return_s: Floats
    busy_s: Floats
    weights_s: Floats

    def end_s(self, least_s: Floats | float = 0.0, share: float = 1.0) -> Floats:
        """Earliest end of the work and of everything that waits for it.

        A rank starts when the first micro-batch arrives. It may first run all backwards that other ranks wait for; the
        last gradient then returns while the rank computes weight gradients.

        Args:
            least_s: seconds after the last action of each.
            share: part of a micro-batch that ranks send at once.
        """
        return share * self.arrival_s + self.busy_s + np.maximum(least_s, share * self.return_s - self.weights_s)


class InFlight(NamedTuple):
    """Stage inputs that several schedules of the same stages hold at the peaks of their ranks.

    Attributes:
        inputs: [schedule, rank, number of its stage] stage inputs; one of each without a closed form.
        is_closed: [schedule] whether they have a closed form.
        order: [schedule, rank, place] numbers of the rank's stages, those with the most inputs first.
        descending: [schedule, rank, place] their stage inputs, above 0.
    """

    inputs: Floats
    is_closed: NDArray[np.bool_]
    order: NDArray[np.intp]
    descending: Floats

    def take(self, schedules: NDArray[np.bool_]) -> "InFlight":
        """Those of some schedules."""
        if schedules.all():
            return self
        inputs, descending = self.inputs[schedules], self.descending[schedules]
        return InFlight(inputs, self.is_closed[schedules], self.order[schedules], descending)


def least_work_s(layers: int, ranks: int, layer_s: float, head_s: float) -> float:
    """The least seconds of the busiest rank, of all divisions of equal layers and a head over ranks.

    Args:
        layers: their number.
        ranks: at least 1.
        layer_s: seconds of a layer.
        head_s: seconds of the head.
    """
    # Either the rank of the head has room for so many layers less, or it is the busiest one itself.
    fewer, more = ceil(head_s / layer_s), floor(head_s / layer_s)
    beside = max(fewer, ceil((layers + fewer) / ranks)) * layer_s
    own = head_s + max(0, ceil((layers - (ranks - 1) * more) / ranks)) * layer_s
    return min(beside, own)
