"""Profiled seconds of a stage beside those of the cost model: the forward and the halves of the backward.

    python benchmarks/profiled.py [TABLE.csv]

The notes of zero-bubble rows have the seconds that the authors' program profiled on a stage in the middle. The cost
model's are those of the median stage, as ``pipeloom validate`` predicts the row. Without a table, the published
measurements beside the checkout.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median_high
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from pipeloom.accuracy.programs import cluster_of, program_of
from pipeloom.accuracy.rows import Row, read_rows
from pipeloom.accuracy.schedules import SEARCHED, choice_of
from pipeloom.cost.placed import Placed
from pipeloom.predict.step import placed_in

TABLE = Path(__file__).parents[2] / "shared" / "data" / "measured.csv"
NAMES = ("T_F", "T_B", "T_W", "T_comm")


class Seconds(NamedTuple):
    """Seconds of a stage: forward, input half, weight half; and of a message."""

    forward: float
    input: float
    weight: float
    message: float


def profiled(row: Row) -> Seconds | None:
    """The seconds in a row's note, in milliseconds there; ``None`` without them."""
    found = {name: float(value) for name, value in re.findall(r"(T_\w+)=([\d.]+)", row.note)}
    return Seconds(*(found[name] / 1e3 for name in NAMES)) if set(NAMES) <= set(found) else None


def modeled(row: Row) -> Seconds:
    """The same from the cost model, of the median stage."""
    program = program_of(row)[1]
    placed = placed_in(Placed(row.run, cluster_of(row, program), program), choice_of(row.run, row.schedule))
    costs, stages = placed.costs, range(row.run.num_stages)
    weights_s = [costs.half_s(stage) for stage in stages]
    inputs_s = [whole_s - half_s for whole_s, half_s in zip(costs.backward_s, weights_s, strict=True)]
    messages_s = [costs.over_s(stage) for stage in stages[:-1]]
    return Seconds(*map(median_high, (costs.forward_s, inputs_s, weights_s, messages_s)))


def pairs(rows: Iterable[Row]) -> dict[str, tuple[Seconds, Seconds]]:
    """Model -> profiled and modeled seconds, means over the runs of one searched schedule that were profiled."""
    found: dict[str, list[tuple[Seconds, Seconds]]] = {}
    for row in rows:
        measured = profiled(row)
        if measured is not None and row.schedule in SEARCHED and row.run.loops == 1:
            found.setdefault(row.run.shape.name, []).append((measured, modeled(row)))
    return {model: (_mean([one for one, _ in own]), _mean([one for _, one in own])) for model, own in found.items()}


def _mean(several: Sequence[Seconds]) -> Seconds:
    return Seconds(*(fmean(values) for values in zip(*several, strict=True)))


def main(words: Sequence[str]) -> None:
    """Print the table."""
    table = Table("model", *(f"{name}, ms: profiled" for name in NAMES), *(f"modeled {name}" for name in NAMES))
    for model, (measured, ours) in pairs(read_rows(Path(words[0]) if words else TABLE)).items():
        shares = (f"{1e3 * own:.2f} ({own / one - 1:+.1%})" for one, own in zip(measured, ours, strict=True))
        table.add_row(model, *(f"{1e3 * one:.2f}" for one in measured), *shares)
    Console(width=200).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
