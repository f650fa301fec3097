"""Calibration: a least-squares fit of a program's efficiencies on a machine to measured step times."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeloom.accuracy.disturbed import disturbed
from pipeloom.accuracy.rows import Row
from pipeloom.accuracy.schedules import predict
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import FRACTIONS, Efficiency, Software
from pipeloom.errors import UserError
from pipeloom.system.files import write_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    "accumulation_bytes": (1.0, 24.0),
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
"""Bounds of the fit: what is physically plausible."""

SCALE = 0.02
"""Relative error above which the loss is linear instead of squared (soft L1), so that outliers do not dominate."""

PULL = 0.2
"""Regularization: a parameter that differs from its starting value by a factor e costs as much as this relative error.
Chosen by the errors on held-out rows of every program (docs/accuracy.md)."""

DRAG_S = 1e-4
"""Starting value of ``drag_s`` in programs that have it; by default a program has none."""


@dataclass(frozen=True)
class Fit:
    """A calibrated program.

    Attributes:
        software: the program with fitted efficiencies.
        cluster: the machine.
        rows: the rows of the fit.
        starts: fitted efficiency -> starting value.
        error_before, error_after: mean of |predicted / measured - 1| on these rows.
    """

    software: Software
    cluster: Cluster
    rows: tuple[Row, ...]
    starts: dict[str, float]
    error_before: float
    error_after: float

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """Efficiencies that ended at a bound, which means that they compensate for something that is not modeled."""
        values = {name: getattr(self.software.efficiency, name) for name in self.starts}
        edges = {name: RANGES[name] for name in values}
        return tuple(
            name for name, value in values.items() if min(abs(np.log(value / edge)) for edge in edges[name]) < 0.01
        )


def first_guess(software: Software) -> Software:
    """The program with default efficiencies, so that a calibration does not depend on an earlier one."""
    return replace(software, efficiency=Efficiency(drag_s=DRAG_S if software.efficiency.drag_s > 0 else 0.0))


def fit(
    rows: Sequence[Row],
    cluster: Cluster,
    start: Software,
    names: Sequence[str] = (),
    placed: Callable[[Row, Software], Placed] | None = None,
) -> Fit:
    """Fit efficiencies to the measured step times of ``rows``.

    Least squares of log(predicted / measured) with a soft L1 loss, in the logarithms of the parameters, within
    ``RANGES``. Disturbed runs are left out.

    Args:
        rows: of one machine and program.
        cluster: the machine.
        start: the program with the starting values.
        names: of the efficiencies to fit; empty for all that influence a row.
        placed: row and program -> where it ran, for rows of several machines; ``None`` for ``cluster``.

    Raises:
        UserError: no row is measured, a name is unknown, or SciPy is not installed.
    """
    timed, optimize = _checked(rows, names)

    def errors(program: Software) -> "NDArray[np.float64]":
        where = placed or (lambda row, program: Placed(row.run, cluster, program))
        steps = (predict(where(row, program), row.schedule).prediction for row, _ in timed)
        return np.log([step.step_time_s / measured for step, (_, measured) in zip(steps, timed, strict=True)])

    before = errors(start)
    chosen = list(names) or [name for name in RANGES if _matters(name, start, errors, before)]
    # In logarithms: efficiencies are factors, so half and double are equally far away.
    lowest, highest = np.log(np.array([RANGES[name] for name in chosen])).T
    first = np.clip(np.log([getattr(start.efficiency, name) for name in chosen]), lowest + 1e-6, highest - 1e-6)

    def at(logs: "NDArray[np.float64]") -> Software:
        values = {name: float(value) for name, value in zip(chosen, np.exp(logs), strict=True)}
        return replace(start, efficiency=replace(start.efficiency, **values))

    def residuals(logs: "NDArray[np.float64]") -> "NDArray[np.float64]":
        # An additional residual for each parameter pulls it towards its start unless rows determine it.
        return np.concatenate([errors(at(logs)), PULL * (logs - first)])

    answer: Any = optimize.least_squares(
        residuals,
        first,
        bounds=(lowest, highest),
        loss="soft_l1",
        f_scale=SCALE,
        diff_step=1e-3,
        ftol=1e-5,
        max_nfev=40,
    )
    program = replace(at(answer.x), cluster=cluster.name)
    starts = {name: float(value) for name, value in zip(chosen, np.exp(first), strict=True)}
    fitted = tuple(row for row, _ in timed)
    return Fit(program, cluster, fitted, starts, _mean(before), _mean(errors(program)))


def _checked(rows: Sequence[Row], names: Sequence[str]) -> tuple[list[tuple[Row, float]], Any]:
    """The undisturbed measured rows with their seconds, and SciPy's module."""
    odd = disturbed(rows)
    timed = [(row, row.step_time_s) for row in rows if row.is_ok and row.step_time_s is not None and id(row) not in odd]
    if not timed:
        raise UserError("there is nothing to fit: no row has the status ok and a step_time_s")
    unknown = [name for name in names if name not in RANGES]
    if unknown:
        raise UserError(f"cannot fit {', '.join(unknown)}; known: {', '.join(RANGES)}")
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise UserError("--fit needs SciPy: pip install scipy") from error
    return timed, optimize


def _mean(errors: "NDArray[np.float64]") -> float:
    # Errors are log(predicted / measured); reports have predicted / measured - 1.
    return float(np.abs(np.expm1(errors)).mean())


def _matters(
    name: str,
    start: Software,
    errors: Callable[[Software], "NDArray[np.float64]"],
    before: "NDArray[np.float64]",
) -> bool:
    """Whether half or double the efficiency changes the prediction of any row; ``False`` for 0."""
    value = getattr(start.efficiency, name)
    if value <= 0:
        return False
    others = (replace(start, efficiency=replace(start.efficiency, **{name: value * factor})) for factor in (0.5, 2.0))
    return any(bool(np.abs(errors(other) - before).max() > 1e-6) for other in others)


def to_toml(result: Fit, table: str, source: str = "") -> str:
    """The calibrated program as a program file, with the provenance of its efficiencies.

    Args:
        result: of ``fit``.
        table: name of the table of the rows.
        source: of the program's facts.
    """
    import tomli_w

    values = asdict(result.software)
    efficiency: dict[str, float] = values.pop("efficiency")
    default = asdict(Software(name=""))
    plain = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value != default[key] or key in ("name", "cluster")
    }
    provenance = {
        "by": "pipeloom validate --fit",
        "table": table,
        "cluster": result.cluster.name,
        "sets": sorted({row.set_name for row in result.rows}),
        "models": sorted({row.run.shape.name for row in result.rows}),
        "rows": len(result.rows),
        "date": str(date.today()),
        "mean_abs_error_before": _digits(result.error_before),
        "mean_abs_error_after": _digits(result.error_after),
        "at_bounds": list(result.at_bounds),
        "start_and_bounds": {
            name: f"{start:.4g}, {RANGES[name][0]:g} to {RANGES[name][1]:g}" for name, start in result.starts.items()
        },
    }
    values = {key: _digits(value) for key, value in efficiency.items() if value != getattr(Efficiency(), key)}
    given = {"source": source} if source else {}
    return tomli_w.dumps({**given, **plain, "provenance": provenance, "efficiency": values})


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def write(result: Fit, path: Path, table: str, source: str = "") -> None:
    """Write ``to_toml`` to a file.

    Raises:
        UserError: it cannot be written.
    """
    write_text(path, to_toml(result, table, source))
