"""pipeloom beside other training programs, with real compute. Run by ``make bench-peers``.

All programs begin with pipeloom's weights, read its batches and have to compute its losses to five digits. Each is
started afresh in each round, one after the other.

    python benchmarks/beside_peers.py [--rows TEXT ...] [--size small large] [--rounds 2] [--folder outputs/peers]
"""

import argparse
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
        measured.rounds = {program: found for program, found in measured.rounds.items() if found}
    return measured


def _turned(programs: list[Program], by: int) -> list[Program]:
    by %= len(programs) or 1
    return programs[by:] + programs[:by]


def versions() -> dict[str, str]:
    """Of the packages that the programs are made of, PyTorch aside."""
    return {"transformers": version("transformers") if find_spec("transformers") else "missing"}


def main() -> None:
    """Run every row, print and write what came of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", nargs="+", default=[""], help="parts of the names of the rows to run")
    options.add_argument("--size", nargs="+", choices=[size.name for size in SIZES], default=["small"])
    options.add_argument("--rounds", type=int, default=2, help="how often each program is started")
    options.add_argument("--folder", type=Path, default=Path("outputs/peers"))
    chosen, console = options.parse_args(), wide_console()
    console.print(f"{machine('ordinary scheduling: other load on this machine counts') | versions()}\n")
    found: list[Measured] = []
    for size in [one for one in SIZES if one.name in chosen.size]:
        with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
            write_start(size, Path(folder))
            for row in [one for one in ROWS if any(part in one.name for part in chosen.rows)]:
                one = measure(row, size, Path(folder), chosen.rounds, console)
                if one.rounds:
                    found.append(one)
                    write(found, chosen.folder / "peers.csv")
    show(found, console)
    console.print(f"Written to {chosen.folder}: peers.csv")


if __name__ == "__main__":
    main()
