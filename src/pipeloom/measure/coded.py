"""Rehearsals of stages whose messages are coded (``layout.boundary``): coding is part of their seconds."""

from dataclasses import dataclass, fields

from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.coding import decode_blocks, encode_blocks, wire_spec
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.measure.rehearsal import Rehearsal, StageRun
from pipeloom.measure.stopwatch import Now


@dataclass(frozen=True)
class CodedRun(StageRun):
    """A run that codes what the stage would send, and decodes what it would receive.

    Attributes:
        coded_input: its input as another rank sends it; ``None`` where it is not from another rank.
        coded_gradient: the same of the gradient of its output.
    """

    coded_input: Tensor | None = None
    coded_gradient: Tensor | None = None

    def forward(self, part: Portion) -> None:
        """Run the forward of a part."""
        if self.coded_input is not None:
            decode_blocks(self.coded_input, TensorSpec.of(self.tensor))
        super().forward(part)
        if self.coded_gradient is not None and self.gradient is not None:
            encode_blocks(self.gradient)  # in place of the output, which has its spec

    def backward(self, part: Portion, clock: Now) -> tuple[float, float]:
        """Run and time the backward of a part; coding is in the first half."""
        if not self.trains:
            return 0.0, 0.0
        begin = clock()
        if self.coded_gradient is not None and self.gradient is not None:
            decode_blocks(self.coded_gradient, TensorSpec.of(self.gradient))
        if self.coded_input is not None and self.stage.needs_input_gradient:
            encode_blocks(self.tensor)  # in place of its gradient, which has its spec
        coding_s = clock() - begin
        first_s, second_s = super().backward(part, clock)
        return coding_s + first_s, second_s


@dataclass(frozen=True, kw_only=True)
class CodedRehearsal(Rehearsal):
    """A rehearsal whose outputs have the specs of what travels.

    Attributes:
        exact: the rehearsal without codes.
    """

    exact: Rehearsal

    def run_of(self, stage: Stage, number: int = 0) -> StageRun:
        """A run of a micro-batch, or of one of its slices, with the codes of its messages."""
        run, crosses = self.exact.run_of(stage, number), self.schedule.placement.crosses
        coded_input = encode_blocks(run.tensor) if stage.index and crosses(stage.index - 1) else None
        has_gradient = run.gradient is not None and crosses(stage.index)
        coded_gradient = encode_blocks(run.gradient) if has_gradient and run.gradient is not None else None
        return CodedRun(run.stage, run.tensor, run.gradient, run.objective, run.trains, coded_input, coded_gradient)


def with_codes(rehearsal: Rehearsal) -> Rehearsal:
    """The rehearsal with messages as they travel."""
    boundary = rehearsal.layout.boundary
    if boundary is None:
        return rehearsal
    own = {item.name: getattr(rehearsal, item.name) for item in fields(Rehearsal)}
    return CodedRehearsal(**own | {"outputs": [wire_spec(one, boundary) for one in own["outputs"]]}, exact=rehearsal)
