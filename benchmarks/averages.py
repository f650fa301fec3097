"""Seconds of an update over a slow network: gradients that are reduced, averages that are waited for, and delayed ones.

Run by ``make bench-averages``. Two replicas of a llama of 4.9 million parameters are on hosts of their own
(``side_by_side/hosts.py``, which takes root). Each way is started in turn in every round.

    python benchmarks/averages.py [--rate 200] [--every 5] [--rounds 2]
"""

import argparse
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from rich.table import Table

from peers.case import Program, Row, Size
from peers.launch import run_alone
from peers.start import write_start
from side_by_side.case import Link
from side_by_side.hosts import why_not
from side_by_side.results import load_noted, machine, wide_console

LATENCY_MS = 5
SIZE = Size(name="averages", warmup=1, turns=1, timed=5)
"""A program runs by itself: all steps count but the first and the last."""


def row_of(rate: int, every: int) -> Row:
    """The three ways on a network of so many Mbit/s, with so many updates between averages."""
    averages = ("--layout.average-every", str(every))
    programs = (
        Program("gradients reduced", "pipeloom"),
        Program(f"average every {every}", "pipeloom", words=averages),
        Program(f"average every {every}, delayed", "pipeloom", words=(*averages, "--optimizer.outer-delayed")),
    )
    return Row(name=f"dp 2, {rate} Mbit/s", programs=programs, limit=1.0, dp=2, link=Link(rate, LATENCY_MS))


def main() -> int:
    """Print a table; 1 where the machine has no such network."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, nargs="+", default=[50, 200], help="Mbit/s")
    parser.add_argument("--every", type=int, default=5, help="updates between averages")
    parser.add_argument("--rounds", type=int, default=2)
    chosen, console = parser.parse_args(), wide_console()
    if (reason := why_not()) is not None:
        console.print(f"Skipped: {reason}.")
        return 1
    console.print(f"{machine('ordinary scheduling: other load on this machine counts')}\n")
    for rate in chosen.rate:
        row, found = row_of(rate, chosen.every), defaultdict[str, list[float]](list)
        with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder, load_noted() as load:
            write_start(SIZE, Path(folder))
            for _ in range(chosen.rounds):
                for program in row.programs:
                    alone = run_alone(row, program, SIZE, Path(folder), SIZE.steps)
                    found[program.name] += alone.steps.seconds
        table = Table(
            "way",
            "update, ms",
            "min .. max",
            "of reduced",
            title=f"{row.name}, load {load.before:.1f} before, {load.after:.1f} after",
        )
        first = median(found[row.programs[0].name])
        for name, seconds in found.items():
            least, most, middle = min(seconds), max(seconds), median(seconds)
            table.add_row(
                name, f"{middle * 1e3:.0f}", f"{least * 1e3:.0f} .. {most * 1e3:.0f}", f"{middle / first:.2f}"
            )
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
