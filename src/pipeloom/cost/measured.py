"""Seconds that were measured: of a model's pieces, of messages between its stages, of updating its weights.

Where a host has fewer cores than processes, everything here is in seconds of a core: the CPU time that the process
takes while all processes are at work. What ranks wait for each other is then left to others, and the simulator shares
the cores out (``pipeloom.predict.links``).
"""

from dataclasses import dataclass

from pipeloom.workload.dtypes import Precision
from pipeloom.workload.run import Run

Both = tuple[float, float]
"""Seconds of a forward and of a backward."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPieces:
    """A model's pieces as they were measured.

    Attributes:
        run: of what (``Run.of_measured_pieces``).
        embedding, layer, head: seconds for one micro-batch, with tensor-parallel exchanges.
        stage: seconds of a stage beside its pieces.
        message_s: seconds of a core that a message between two stages takes at both ends together; 0 where cores are
            not shared, so that the link tells.
    """

    run: Run
    embedding: Both
    layer: Both
    head: Both
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """What follows a step's pipeline, as it was measured: gradients to zero, their norm, clipping, the optimizer.

    Attributes:
        fixed_s: seconds of a rank whatever it holds.
        parameter_s: seconds for each parameter that the rank updates.
        precision: of weights and activations.
    """

    fixed_s: float
    parameter_s: float
    precision: Precision

    def seconds(self, parameters: float) -> float:
        """Of a rank that updates so many."""
        return self.fixed_s + self.parameter_s * parameters
