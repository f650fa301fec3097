"""pipeloom beside other training programs, with real compute. Run by ``make bench-peers``.

All programs begin with pipeloom's weights, read its batches and have to compute its losses to five digits. Each is
started afresh in each round, one after the other.

    python benchmarks/beside_peers.py [--rows TEXT ...] [--size small large] [--rounds 2] [--folder outputs/peers]
"""

import argparse
import signal
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from peers.case import ROWS, SIZES, Program, Row, Size
from peers.launch import launch, why_skipped
from peers.start import write_start
from peers.table import Measured, show, write
from side_by_side.results import load_noted, machine, wide_console


def measure(row: Row, size: Size, start: Path, rounds: int, console: Console) -> Measured:
    """Run all programs of a row that can run here, in turn."""
    programs: list[Program] = []
    for program in row.programs:
        reason = why_skipped(row, program)
        if reason is None:
            programs.append(program)
        else:
            console.print(f"Skipped: {row.name}, {program.name}: {reason}.")
    with load_noted() as load:
        measured = Measured(row, size, load)
        for number in range(rounds):
            # Each round begins with another one.
            for program in programs if number == 0 else _turned(programs, number):
                try:
                    measured.rounds.setdefault(program, []).append(launch(row, program, size, start))
                except RuntimeError as error:
                    console.print(f"ERROR: {error}", markup=False)
                    measured.failed = True
        measured.rounds = {program: found for program, found in measured.rounds.items() if found}
    return measured


def _turned(programs: list[Program], by: int) -> list[Program]:
    by %= len(programs) or 1
    return programs[by:] + programs[:by]


def versions() -> dict[str, str]:
    """Of the packages that the programs are made of, PyTorch aside."""
    return {"transformers": version("transformers") if find_spec("transformers") else "missing"}


def chosen_rows(words: list[str]) -> list[Row]:
    """The rows with these names; a word that is no name selects all rows whose names contain it."""
    names = {row.name for row in ROWS}
    return [row for row in ROWS if any(word == row.name if word in names else word in row.name for word in words)]


def main() -> int:
    """Run every row, print and write what came of it; 1 if a program failed, or had other losses than pipeloom."""
    # An end by a signal has to end the processes and the network of a row, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", nargs="+", default=[""], help="names of the rows to run, or parts of them")
    options.add_argument("--size", nargs="+", choices=[size.name for size in SIZES], default=["small"])
    options.add_argument("--rounds", type=int, default=2, help="how often each program is started")
    options.add_argument("--folder", type=Path, default=Path("outputs/peers"))
    chosen, console = options.parse_args(), wide_console()
    console.print(f"{machine('ordinary scheduling: other load on this machine counts') | versions()}\n")
    found: list[Measured] = []
    for size in [one for one in SIZES if one.name in chosen.size]:
        with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
            write_start(size, Path(folder))
            for row in chosen_rows(chosen.rows):
                one = measure(row, size, Path(folder), chosen.rounds, console)
                found.append(one)
                if one.rounds:
                    write(found, chosen.folder / "peers.csv")
    show(found, console)
    console.print(f"Written to {chosen.folder}: peers.csv")
    return int(any(one.failed or any(map(one.is_error, one.rounds)) for one in found))


if __name__ == "__main__":
    sys.exit(main())
