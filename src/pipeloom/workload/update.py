"""When a step updates its weights, and of which gradient it limits the norm."""

from dataclasses import dataclass
from typing import Literal

Clip = Literal["whole", "stage", "none"]


@dataclass(frozen=True, kw_only=True)
class Update:
    """An optimizer's step, as schedules and layouts have it.

    Attributes:
        within_step: whether each stage is updated when its gradient is complete, before the step ends.
        clip: the gradient whose norm is limited: that of the whole model, of each stage by itself, or none.
    """

    within_step: bool = False
    clip: Clip = "whole"

    @property
    def needs_norm(self) -> bool:
        """Whether it needs the norm of the whole model's gradient."""
        return self.clip == "whole"

    @property
    def needs_whole_stages(self) -> bool:
        """Whether it needs the whole gradient of a stage on each rank that has it, before the step ends."""
        return self.within_step and self.clip == "stage"
