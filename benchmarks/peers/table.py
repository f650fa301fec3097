"""Programs of a row as a table, compared with the best peer."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peers.case import Program, Row, Size
from peers.launch import Alone, Steps
from side_by_side.results import Load, Target

_FIVE_DIGITS = 2e-5
_COMPARED = 7
"""First steps whose losses are compared: in float32 a difference of rounding doubles every one or two steps."""


@dataclass
class Measured:
    """A row with what came of its programs.

    Attributes:
        row: the layout.
        size: of the model.
        alone: each program by itself, for time of the start and memory.
        in_turns: the steps of each program in turns with the others, for each round.
        load: of the machine.
        failed: whether a program ended early.
    """

    row: Row
    size: Size
    load: Load
    alone: dict[Program, Alone] = field(default_factory=dict)
    in_turns: dict[Program, list[Steps]] = field(default_factory=dict)
    failed: bool = False

    def median_s(self, program: Program) -> float:
        """Of all steps that count."""
        return statistics.median(self._seconds(program))

    def _seconds(self, program: Program) -> list[float]:
        return [second for steps in self.in_turns[program] for second in steps.seconds]

    def off(self, program: Program) -> float:
        """Largest relative distance of a loss from that of pipeloom in the same step, of the first few."""
        reference = next(iter(self.in_turns.values()))[0].losses
        rounds = [steps.losses[:_COMPARED] for steps in self.in_turns[program]]
        return max(abs(a / b - 1) for losses in rounds for a, b in zip(losses, reference, strict=False))

    def is_error(self, program: Program) -> bool:
        """Whether it did not compute what pipeloom did, to five digits."""
        off = self.off(program)
        return not math.isfinite(off) or off > _FIVE_DIGITS

    @property
    def best_peer(self) -> Program | None:
        """The fastest of the others."""
        peers = [one for one in self.in_turns if one.kind != "pipeloom" and not self.is_error(one)]
        return min(peers, key=self.median_s, default=None)

    @property
    def target(self) -> Target | None:
        """pipeloom's best program and the best peer; ``None`` without a peer."""
        best, limit = self.best_peer, self.row.limit if self.size.name == "small" else 1.0
        own = [one for one in self.in_turns if one.kind == "pipeloom"]
        if best is None or not own:
            return None
        fastest = min(own, key=self.median_s)
        what = f"{self.row.name}: {fastest.name} / {best.name}"
        return Target(what, self.median_s(fastest) / self.median_s(best), limit)

    def lines(self) -> list[dict[str, Any]]:
        """A line for each program."""
        best = self.best_peer
        found = []
        for program in self.in_turns:
            seconds = self._seconds(program)
            found.append(
                {
                    "size": self.size.name,
                    "row": self.row.name,
                    "program": program.name,
                    "median_ms": round(self.median_s(program) * 1e3, 1),
                    "min_ms": round(min(seconds) * 1e3, 1),
                    "max_ms": round(max(seconds) * 1e3, 1),
                    "to_best_peer": None if best is None else round(self.median_s(program) / self.median_s(best), 3),
                    "memory_mb": round(self.alone[program].memory_bytes / 1e6),
                    "start_s": round(self.alone[program].start_s, 2),
                    "loss_off": float(f"{self.off(program):.1e}"),
                    "is_error": self.is_error(program),
                    "steps": len(seconds),
                    "load_before": round(self.load.before, 1),
                    "load_after": round(self.load.after, 1),
                }
            )
        return found


def write(measured: Sequence[Measured], file: Path) -> None:
    """All lines as CSV."""
    lines = [line for one in measured for line in one.lines()]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, list(lines[0]) if lines else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def show(measured: Sequence[Measured], console: Console) -> None:
    """One table with all rows, and what was to hold."""
    table = Table("layout", "program", "step ms", "min .. max", "/ best peer", "memory MB", "start s", "losses", "load")
    for column in table.columns[2:7]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    for one in measured:
        for number, line in enumerate(one.lines()):
            ratio = "" if line["to_best_peer"] is None else f"{line['to_best_peer']:.2f}"
            table.add_row(
                f"{line['row']} ({line['size']})" if number == 0 else "",
                line["program"],
                f"{line['median_ms']:.0f}",
                f"{line['min_ms']:.0f} .. {line['max_ms']:.0f}",
                ratio,
                str(line["memory_mb"]),
                f"{line['start_s']:.1f}",
                f"ERROR: off by {line['loss_off']:g}" if line["is_error"] else "equal",
                f"{line['load_before']} .. {line['load_after']}" if number == 0 else "",
            )
        table.add_section()
    console.print(table)
    for target in [one.target for one in measured]:
        if target is not None:
            console.print(f"  {target}")
