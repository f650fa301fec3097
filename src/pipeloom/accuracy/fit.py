"""Calibration: a least-squares fit of a program's efficiencies on a machine to measured step times."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeloom.accuracy.disturbed import disturbed
from pipeloom.accuracy.prior import RANGES, Estimate, Prior
from pipeloom.accuracy.programs import cluster_of
from pipeloom.accuracy.rows import Row
from pipeloom.accuracy.schedules import predict
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Efficiency, Software
from pipeloom.errors import UserError
from pipeloom.system.files import write_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOISE = 0.04
"""Relative error that one row has for reasons of its own: groups that measured the same layouts differ by 2 to 6 %.
Above it the loss is linear instead of squared (soft L1), so that outliers do not dominate."""

DRAG_S = 1e-4
"""Starting value of ``drag_s`` in programs that have it; by default a program has none."""


@dataclass(frozen=True)
class Fit:
    """A calibrated program.

    Attributes:
        software: the program with fitted efficiencies.
        cluster: the machine, that of the first row if rows have several.
        rows: the rows of the fit.
        starts: fitted efficiency -> starting value.
        variances: fitted efficiency -> variance of its logarithm, given rows and prior.
        error_before, error_after: mean of |predicted / measured - 1| on these rows.
    """

    software: Software
    cluster: Cluster
    rows: tuple[Row, ...]
    starts: dict[str, float]
    variances: dict[str, float]
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


def first_guess(software: Software, prior: Prior) -> Software:
    """The program with the efficiencies of other programs, so that a calibration does not depend on an earlier one."""
    drag_s = DRAG_S if software.efficiency.drag_s > 0 else 0.0
    return replace(software, efficiency=replace(prior.center, drag_s=drag_s))


def fit(
    rows: Sequence[Row],
    cluster: Cluster | None,
    start: Software,
    names: Sequence[str] = (),
    *,
    prior: Prior,
) -> Fit:
    """Fit efficiencies to the measured step times of ``rows``: their most probable values, given the rows and a prior.

    The logarithm of each efficiency has a normal distribution around its starting value, as wide as other programs
    differ in it (``Prior``). The logarithm of predicted / measured has the width ``NOISE``, with a soft L1 loss. So
    what the rows do not determine keeps its starting value, and few rows change it little. Within ``RANGES``; disturbed
    runs are left out.

    Args:
        rows: of one program.
        cluster: of all rows; ``None`` to choose by each row's device.
        start: the program with the starting values.
        names: of the efficiencies to fit; empty for all that influence a row.
        prior: how far efficiencies of programs differ.

    Raises:
        UserError: no row is measured, a name is unknown, or SciPy is not installed.
    """
    timed, optimize = _checked(rows, names)
    clusters = [cluster or cluster_of(row, start) for row, _ in timed]

    def errors(program: Software) -> "NDArray[np.float64]":
        return np.log(
            [
                predict(Placed(row.run, place, program), row.schedule).prediction.step_time_s / measured
                for place, (row, measured) in zip(clusters, timed, strict=True)
            ]
        )

    before = errors(start)
    chosen = list(names) or [name for name in RANGES if _matters(name, start, errors, before)]
    # In logarithms: efficiencies are factors, so half and double are equally far away.
    lowest, highest = np.log(np.array([RANGES[name] for name in chosen])).T
    center = np.log([getattr(start.efficiency, name) for name in chosen])
    first = np.clip(center, lowest + 1e-6, highest - 1e-6)
    widths = np.array([prior.width(name) for name in chosen])

    def at(logs: "NDArray[np.float64]") -> Software:
        values = {name: float(value) for name, value in zip(chosen, np.exp(logs), strict=True)}
        return replace(start, efficiency=replace(start.efficiency, **values))

    def residuals(logs: "NDArray[np.float64]") -> "NDArray[np.float64]":
        return np.concatenate([errors(at(logs)) / NOISE, (logs - center) / widths])

    found, variances = _least(optimize, residuals, first, (lowest, highest), len(timed))
    program = replace(at(found), cluster=clusters[0].name)
    starts, spreads = (
        {name: float(one) for name, one in zip(chosen, each, strict=True)} for each in (np.exp(first), variances)
    )
    fitted = tuple(row for row, _ in timed)
    return Fit(program, clusters[0], fitted, starts, spreads, _mean(before), _mean(errors(program)))


def _least(
    optimize: Any,
    residuals: Callable[["NDArray[np.float64]"], "NDArray[np.float64]"],
    first: "NDArray[np.float64]",
    bounds: tuple["NDArray[np.float64]", "NDArray[np.float64]"],
    num_rows: int,
) -> tuple["NDArray[np.float64]", "NDArray[np.float64]"]:
    """Arguments of the smallest loss, and their variances."""
    # SciPy's steps are relative to the arguments, which would be 0 where a logarithm is: they begin at 1 here.
    offset = 1 - bounds[0]

    def of_shifted(shifted: "NDArray[np.float64]") -> "NDArray[np.float64]":
        return residuals(shifted - offset)

    answer = optimize.least_squares(
        of_shifted,
        first + offset,
        bounds=(bounds[0] + offset, bounds[1] + offset),
        loss=partial(_losses, num_rows=num_rows),
        diff_step=1e-3,
        ftol=1e-5,
        max_nfev=40,
    )
    # SciPy scales the derivatives by the loss, and the prior makes the curvature regular.
    return answer.x - offset, np.diag(np.linalg.inv(answer.jac.T @ answer.jac))


def estimates(result: Fit) -> dict[str, Estimate]:
    """The fitted efficiencies with their uncertainties, for ``pooled``."""
    values = result.software.efficiency
    return {name: Estimate(getattr(values, name), variance) for name, variance in result.variances.items()}


def _losses(squares: "NDArray[np.float64]", num_rows: int) -> "NDArray[np.float64]":
    """Loss and its first two derivatives: soft L1 for rows, squares for the prior behind them."""
    losses = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
    above = 1 + squares[:num_rows]
    losses[:, :num_rows] = 2 * (np.sqrt(above) - 1), above**-0.5, -0.5 * above**-1.5
    return losses


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
