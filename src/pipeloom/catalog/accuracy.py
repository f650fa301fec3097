"""Errors of predictions compared with measurements: ``accuracy.toml`` of the catalog."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from typing import Any, cast


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Errors of predicted step times; all except counts are fractions.

    Attributes:
        rows: number of measured steps.
        mean_abs_error, p90_abs_error: mean and 90th percentile of |predicted / measured - 1|.
        bias: mean of predicted / measured - 1.
        groups: number of groups of comparable layouts (``accuracy.rows.Group``).
        pairs: number of pairs of layouts of one group, both predicted to take at most 1.5 times its fastest step.
        pair_error: median over the pairs of |ratio of the predicted step times / ratio of the measured ones - 1|. A
            factor that all predictions share cancels out. ``None`` without pairs.
        order_below, order_above: share of the pairs that are measured in the predicted order, of those whose predicted
            times differ by less than ``pair_error``, and of the others; ``None`` without such pairs.
        median_regret, worst_regret: over the groups, the measured step time of the layout that was predicted fastest /
            that of the fastest - 1; ``None`` without groups.
        features: what some of the measured layouts have (``planner.error_bar.features_of``).
        longest: tokens of the longest measured sequences.
    """

    rows: int
    mean_abs_error: float
    p90_abs_error: float
    bias: float
    groups: int
    pairs: int
    pair_error: float | None
    order_below: float | None
    order_above: float | None
    median_regret: float | None
    worst_regret: float | None
    features: Sequence[str]
    longest: int


@dataclass(frozen=True)
class Accuracy:
    """Results of ``benchmarks/held_out.py``.

    Attributes:
        table, date: name of the table of measurements, and date of the comparison.
        by_program: (program, device) -> errors on held-out rows: the fit that predicted them did not use them.
        by_device: device -> errors of the general efficiencies on all its rows, with equal weight for every program.
        general_of: device -> program -> mean absolute error of the general efficiencies.
    """

    table: str
    date: str
    by_program: dict[tuple[str, str], Errors]
    by_device: dict[str, Errors]
    general_of: dict[str, dict[str, float]]


@lru_cache(maxsize=1)
def load_accuracy() -> Accuracy:
    """Read the file of the package."""
    text = files("pipeloom.catalog").joinpath("accuracy.toml").read_text(encoding="utf-8")
    content = tomllib.loads(text)
    return Accuracy(
        table=content["provenance"]["table"],
        date=content["provenance"]["date"],
        by_program={(entry["program"], entry["device"]): _errors(entry) for entry in content["program"]},
        by_device={entry["device"]: _errors(entry) for entry in content["general"]},
        general_of={entry["device"]: entry["mean_abs_error_of"] for entry in content["general"]},
    )


def _errors(entry: dict[str, Any]) -> Errors:
    return Errors(**{item.name: cast("Any", entry.get(item.name)) for item in fields(Errors)})
