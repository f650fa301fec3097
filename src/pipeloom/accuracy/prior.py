"""How far the efficiencies of programs differ: what a calibration assumes before it has seen a program's rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

from pipeloom.accuracy.programs import DEFAULT_SOFTWARE
from pipeloom.catalog import load_software, load_spread
from pipeloom.cost.software import FRACTIONS, Efficiency

RANGES: dict[str, tuple[float, float]] = {
    "matmul": (0.5, FRACTIONS["matmul"]),
    "kernel": (0.2, 5.0),
    "memory": (0.3, 1.0),
    "batched_matmul": (0.1, 0.9),
    "flash1": (0.05, 0.6),
    "flash2": (0.1, 0.75),
    "softmax_bytes": (8.0, 60.0),
    "norm_bytes": (10.0, 80.0),
    "loss_bytes": (4.0, 80.0),
    "accumulation_bytes": (1.0, 48.0),
    "launch": (0.2, 16.0),
    "tensor_bus": (0.2, 1.0),
    "data_bus": (0.02, 1.0),
    "p2p": (0.02, 1.0),
    "collective_s": (1e-6, 1e-3),
    "drag_s": (1e-7, 3e-3),
    "exchange_s": (1e-6, 3e-3),
    "microbatch_s": (1e-6, 1e-2),
    "step_s": (1e-4, 1.0),
    "optimizer_bytes": (20.0, 400.0),
}
"""Bounds of efficiencies: what is physically plausible."""
NAMES = tuple(name for name in RANGES if name != "drag_s")
"""Efficiencies that every program has."""
BETWEEN_BOUNDS = 6.0
"""Standard deviations between the bounds of an efficiency, before any program has been fitted: nearly all programs are
inside."""
WIDEST = log(2)
"""Largest standard deviation before any program has been fitted: the bounds of seconds span orders of magnitude."""


@dataclass(frozen=True)
class Prior:
    """Distribution of efficiencies over programs: the logarithm of each is normal, independent of the others.

    Attributes:
        center: the medians.
        widths: name -> standard deviation of the logarithm; for others a part of their range (``BETWEEN_BOUNDS``).
    """

    center: Efficiency = field(default_factory=Efficiency)
    widths: Mapping[str, float] = field(default_factory=dict)

    def width(self, name: str) -> float:
        """Standard deviation of the logarithm of an efficiency."""
        lowest, highest = RANGES[name]
        return self.widths.get(name, min(log(highest / lowest) / BETWEEN_BOUNDS, WIDEST))


def shipped(name_or_path: str = DEFAULT_SOFTWARE) -> Prior:
    """The prior in a program file: its efficiencies, and its table ``spread``.

    Raises:
        UserError: there is no such name or file, or the file is wrong.
    """
    return Prior(load_software(name_or_path).efficiency, load_spread(name_or_path))


class Estimate(NamedTuple):
    """An efficiency of one program, by its rows and a first prior.

    Attributes:
        value: the most probable one.
        variance: of its logarithm.
    """

    value: float
    variance: float


def pooled(programs: Sequence[Mapping[str, Estimate]], first: Prior) -> Prior:
    """The distribution of efficiencies over programs.

    Its center is the median of the programs: one with a slow kernel of its own would move a mean for all others. Its
    variance has two parts, the spread of the programs, and the mean uncertainty of each: one step of expectation and
    maximization for random effects (Dempster, Laird and Rubin 1977). The first prior counts as a program, so that an
    efficiency that no program has keeps it.

    Args:
        programs: of each program the estimates of those efficiencies that influence its rows.
        first: the prior of these estimates.
    """
    values: dict[str, float] = {}
    widths: dict[str, float] = {}
    for name in NAMES:
        usual = first.width(name)
        own = [Estimate(getattr(first.center, name), usual**2), *(each[name] for each in programs if name in each)]
        logs = [log(estimate.value) for estimate in own]
        center = median(logs)
        variance = fmean((value - center) ** 2 + one.variance for value, one in zip(logs, own, strict=True))
        values[name], widths[name] = exp(center), sqrt(variance)
    return Prior(replace(first.center, **values), widths)
