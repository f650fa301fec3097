"""Measured seconds of a model's pieces and of its update, which replace the predicted ones."""

from dataclasses import dataclass

from pipeloom.workload.dtypes import Precision
from pipeloom.workload.run import Run

Both = tuple[float, float]
"""Seconds of a forward and of a backward."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPieces:
    """Measured seconds of a model's pieces.

    Attributes:
        run: the measured run (``Run.of_measured_pieces``).
        embedding, layer, head: seconds for one micro-batch, including tensor-parallel collectives.
        stage: seconds of a stage in addition to its pieces.
        message_s: seconds of a core for a message between two stages, both ends together; 0 if cores are not shared, so
            that the link determines the time.
    """

    run: Run
    embedding: Both
    layer: Both
    head: Both
    stage: Both = (0.0, 0.0)
    message_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredUpdate:
    """Measured seconds after a step's pipeline: zeroing gradients, their norm, clipping, the optimizer.

    Attributes:
        fixed_s: seconds of a rank that do not depend on the number of parameters.
        parameter_s: seconds for each parameter that the rank updates.
        precision: of weights and activations.
    """

    fixed_s: float
    parameter_s: float
    precision: Precision

    def seconds(self, parameters: float) -> float:
        """Seconds of a rank that updates ``parameters``."""
        return self.fixed_s + self.parameter_s * parameters
