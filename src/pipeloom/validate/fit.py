"""Calibration: the few physical efficiencies of a program on a machine, by least squares on measured steps."""

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Efficiency, Software
from pipeloom.errors import UserError
from pipeloom.predict import predict
from pipeloom.validate.rows import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANGES: dict[str, tuple[float, float]] = {
    "matmul": (0.5, 1.05),
    "kernel": (0.2, 5.0),
    "memory": (0.3, 1.0),
    "batched_matmul": (0.1, 0.9),
    "flash1": (0.1, 0.6),
    "flash2": (0.2, 0.75),
    "softmax_bytes": (8.0, 60.0),
    "norm_bytes": (10.0, 80.0),
    "loss_bytes": (4.0, 80.0),
    "launch": (0.2, 6.0),
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
"""What is physically possible: no efficiency above what the hardware can do."""

SCALE = 0.02
"""Relative error from which a row counts linearly instead of squared (soft L1), so that outliers do not rule."""

PULL = 0.03
"""Relative error that a factor e away from the starting value is worth: what no row tells stays where it is."""


@dataclass(frozen=True)
class Fit:
    """A calibrated program.

    Attributes:
        software: with its new efficiencies.
        rows: rows it was fitted on.
        mean_abs_error: on those rows, a fraction.
    """

    software: Software
    rows: int
    mean_abs_error: float


def fit(rows: Sequence[Row], cluster: Cluster, start: Software, names: Sequence[str] = ()) -> Fit:
    """Calibrate ``names`` (all that matter by default) on the measured step times of ``rows``.

    Least squares of log(predicted / measured) with a soft L1 loss, in the logarithms of the parameters, within
    ``RANGES``.

    Raises:
        UserError: there is no measured row, a name is unknown, or SciPy is not installed.
    """
    timed = [(row.run, row.step_time_s) for row in rows if row.is_ok and row.step_time_s is not None]
    if not timed:
        raise UserError("there is nothing to fit: no row has the status ok and a step_time_s")
    chosen = list(names) or [name for name in RANGES if getattr(start.efficiency, name) > 0]
    unknown = [name for name in chosen if name not in RANGES]
    if unknown:
        raise UserError(f"cannot fit {', '.join(unknown)}; known: {', '.join(RANGES)}")
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise UserError("--fit needs SciPy: pip install scipy") from error

    lowest, highest = np.log(np.array([RANGES[name] for name in chosen])).T
    first = np.clip(np.log([getattr(start.efficiency, name) for name in chosen]), lowest + 1e-6, highest - 1e-6)

    def at(logs: "NDArray[np.float64]") -> Software:
        values = {name: float(value) for name, value in zip(chosen, np.exp(logs), strict=True)}
        return replace(start, efficiency=replace(start.efficiency, **values))

    def errors(logs: "NDArray[np.float64]") -> "NDArray[np.float64]":
        program = at(logs)
        return np.array([np.log(predict(run, cluster, program).step_time_s / measured) for run, measured in timed])

    def residuals(logs: "NDArray[np.float64]") -> "NDArray[np.float64]":
        return np.concatenate([errors(logs), PULL * (logs - first)])

    answer: Any = optimize.least_squares(
        residuals,
        first,
        bounds=(lowest, highest),
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=1e-3,
        max_nfev=40,
    )
    return Fit(at(answer.x), len(timed), float(np.abs(np.expm1(errors(answer.x))).mean()))


def to_toml(result: Fit, provenance: str) -> str:
    """The calibrated program as a file of the catalog, efficiencies with four digits."""
    import tomli_w

    values = asdict(result.software)
    efficiency: dict[str, float] = values.pop("efficiency")
    default = asdict(Software(name=""))
    plain = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value != default[key] or key == "name"
    }
    told = f"{provenance} {result.rows} rows, mean absolute error on them {result.mean_abs_error:.1%}, {date.today()}."
    rounded = {key: float(f"{value:.4g}") for key, value in efficiency.items() if value != getattr(Efficiency(), key)}
    return tomli_w.dumps({**plain, "provenance": told, "efficiency": rounded})
