"""Measurements as a table and as files, compared with targets."""

import csv
import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from side_by_side.case import Case, Measured, Plan

Row = dict[str, Any]


def median_s(measured: Measured) -> float:
    """The median step."""
    return statistics.median(measured.seconds)


@dataclass(frozen=True)
class Target:
    """Something that is to hold.

    Attributes:
        what: for people.
        found: what was measured.
        limit: the most that it may be.
    """

    what: str
    found: float
    limit: float

    @property
    def is_met(self) -> bool:
        """Whether it holds."""
        return self.found <= self.limit

    def __str__(self) -> str:
        """One line."""
        return f"{self.what}: {self.found:.3f}, at most {self.limit:g}: {'met' if self.is_met else 'MISSED'}"


@dataclass
class Load:
    """How busy others kept this machine meanwhile.

    Attributes:
        before: load average over a minute, before.
        after: the same, after.
    """

    before: float
    after: float = 0.0


@contextmanager
def load_noted() -> Iterator[Load]:
    """Note the load average before and after."""
    load = Load(_load())
    yield load
    load.after = _load()


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


@dataclass(frozen=True)
class Outcome:
    """A plan that was run.

    Attributes:
        plan: the plan.
        measured: for each contender.
        load: of the machine.
        targets: what was to hold.
    """

    plan: Plan
    measured: tuple[Measured, ...]
    load: Load
    targets: tuple[Target, ...] = field(default=())

    @property
    def ours(self) -> Measured:
        """The first contender of pipeloom."""
        return next(one for one in self.measured if one.contender.runtime == "pipeloom")

    def best_of_pytorch(self, leave_out: Sequence[str] = ()) -> Measured:
        """PyTorch's fastest."""
        theirs = [one for one in self.measured if one.contender.runtime == "PyTorch"]
        return min((one for one in theirs if one.contender.order not in leave_out), key=median_s)


def rows(outcome: Outcome) -> list[Row]:
    """A row for each contender."""
    case, first = outcome.plan.case, outcome.ours.seconds
    return [
        {
            "case": case.name,
            "network": str(case.link) if case.link is not None else "loopback",
            "runtime": one.contender.runtime,
            "order": one.contender.label,
            "loops": one.contender.loops,
            "median_ms": round(median_s(one) * 1e3, 3),
            "min_ms": round(min(one.seconds) * 1e3, 3),
            "max_ms": round(max(one.seconds) * 1e3, 3),
            "theory_ms": round(one.theory_s * 1e3, 3),
            "beside_compute_ms": round((median_s(one) - one.compute_s) * 1e3, 3),
            "to_theory": round(median_s(one) / one.theory_s, 4) if one.theory_s else None,
            "pipeloom_to_this": round(median_s(outcome.ours) / median_s(one), 4),
            "pipeloom_to_this_min": round(min(a / b for a, b in zip(first, one.seconds, strict=True)), 4),
            "pipeloom_to_this_max": round(max(a / b for a, b in zip(first, one.seconds, strict=True)), 4),
            "num_actions": one.num_actions,
            "us_per_action": round(median_s(one) / one.num_actions * 1e6, 1),
            "cpu_ms": round(one.cpu_s * 1e3, 1),
            "repetitions": len(one.seconds),
            **{
                f"{lane}_{what}_ms": round(value * 1e3, 1)
                for lane, both in one.lanes.items()
                for what, value in zip(("hidden", "exposed"), both, strict=True)
            },
        }
        for one in outcome.measured
    ]


def machine(scheduling: str) -> Row:
    """What it was measured on."""
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "scheduling": scheduling,
    }


def write(outcomes: Sequence[Outcome], about: Row, folder: Path, name: str) -> None:
    """``NAME.csv``, a line for each contender, and ``NAME.json``, with every repetition and the targets."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [row for outcome in outcomes for row in rows(outcome)]
    columns = list(dict.fromkeys(key for row in lines for key in row))
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    tree = {
        "machine": about,
        "cases": [
            {
                "case": outcome.plan.case.name,
                "load_average": [outcome.load.before, outcome.load.after],
                "seconds": {f"{one.contender} x{one.contender.loops}": one.seconds for one in outcome.measured},
                "rows": rows(outcome),
                "targets": [vars(target) | {"met": target.is_met} for target in outcome.targets],
            }
            for outcome in outcomes
        ],
    }
    (folder / f"{name}.json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def wide_console() -> Console:
    """A console that does not cut tables where nobody looks at a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def show(outcome: Outcome, console: Console, extra: Callable[[Row], tuple[str, ...]], columns: Sequence[str]) -> None:
    """Print an outcome: a line for each contender, what our lanes hid, the targets."""
    case = outcome.plan.case
    table = Table("runtime", "order", "loops", "step ms", "min .. max", "theory ms", *columns, title=_title(case))
    for column in table.columns[2:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for row in rows(outcome):
        spread = f"{row['min_ms']:.1f} .. {row['max_ms']:.1f}"
        cells = (row["runtime"], row["order"], str(row["loops"]), f"{row['median_ms']:.1f}", spread)
        table.add_row(*cells, f"{row['theory_ms']:.1f}", *extra(row))
    console.print(table)
    for one in outcome.measured:
        for lane, (hidden_s, exposed_s) in one.lanes.items():
            where = f"{one.contender}: {lane}"
            console.print(f"  {where}: {hidden_s * 1e3:.0f} ms of a rank hidden, {exposed_s * 1e3:.0f} ms exposed")
    for target in outcome.targets:
        console.print(f"  {target}")
    console.print(f"  load average {outcome.load.before:.1f} before, {outcome.load.after:.1f} after\n")


def _title(case: Case) -> str:
    sizes = f"{case.pp} pipeline ranks x {case.dp} replicas, {case.num_microbatches} micro-batches"
    network = f"{case.link}" if case.link is not None else "loopback"
    return f"{case.name}: {sizes}, {network}"


def network_cells(row: Row) -> tuple[str, ...]:
    """What a row of a benchmark of networks adds."""
    spread = f"{row['pipeloom_to_this_min']:.2f} .. {row['pipeloom_to_this_max']:.2f}"
    to_this = f"{row['pipeloom_to_this']:.2f}"
    return f"{row['to_theory']:.3f}", f"{row['beside_compute_ms']:.0f}", to_this, spread


NETWORK_COLUMNS = ("/ theory", "not computing ms", "pipeloom / this", "min .. max")


def overhead_cells(row: Row) -> tuple[str, ...]:
    """What a row of a benchmark of overhead adds."""
    return str(row["num_actions"]), f"{row['us_per_action']:.0f}", f"{row['cpu_ms']:.1f}"


OVERHEAD_COLUMNS = ("actions", "us / action", "cpu ms, all ranks")
