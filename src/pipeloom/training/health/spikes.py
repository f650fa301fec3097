"""Steps whose loss or gradient norm is out of range, and what a run does about them.

All ranks have the same sums of a step, so all find the same steps and do the same.
"""

import math
from collections import deque
from statistics import median

from pipeloom.config import TrainingConfig
from pipeloom.errors import RunError
from pipeloom.terminal.words import count

WINDOW, LEAST = 50, 20
"""Good steps whose median a step is compared with: at most, and from how many on."""
_MOST_IN_A_ROW = 10
"""Bad steps in a row after which a run ends: then it is no spike."""


class Spikes:
    """Judges the steps of a run.

    Args:
        config: policy and limits.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._limits = {"loss": config.spike_loss, "gradient norm": config.spike_grad_norm}
        self._good: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in self._limits}
        self._in_a_row = 0
        self._policy = config.on_spike

    def problem(self, step: int, loss: float, norm: float) -> str | None:
        """What is out of range in a step; ``None`` for a good one, with which later ones are compared.

        Raises:
            RunError: too many bad steps in a row.
        """
        values = {"loss": loss, "gradient norm": norm}
        found = next((words for name, value in values.items() if (words := self._words(name, value))), None)
        if found is None:
            for name, value in values.items():
                self._good[name].append(value)
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._policy != "stop" and self._in_a_row > _MOST_IN_A_ROW:
            raise RunError(f"{count(self._in_a_row, 'step')} in a row are out of range, step {step} the last: {found}")
        return f"step {step}: {found}"

    def _words(self, name: str, value: float) -> str | None:
        if not math.isfinite(value):
            return f"its {name} is {value}"
        limit, good = self._limits[name], self._good[name]
        if limit is None or len(good) < LEAST:
            return None
        usual = median(good)
        if value <= limit * usual:
            return None
        setting = "training.spike_loss" if name == "loss" else "training.spike_grad_norm"
        return (
            f"its {name} is {value:.4g}, above {setting} {limit:g} x {usual:.4g}, the median of {len(good)} good steps"
        )
