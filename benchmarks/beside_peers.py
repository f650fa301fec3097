"""pipeloom beside other training programs, with real compute. Run by ``make bench-peers``.

All programs begin with pipeloom's weights, read its batches and have to compute its losses to five digits. Each runs by
itself first, for the time of its start and its memory. Then all programs of a row run in turns of a few steps, while
the others are paused. Each round starts them afresh: the speed of a program differs from one start to the next.

    python benchmarks/beside_peers.py [--rows TEXT ...] [--size small large] [--rounds 2] [--folder outputs/peers]
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from peers.case import ROWS, SIZES, Program, Row, Size
from peers.launch import Alone, run_alone, run_in_turns, why_skipped
from peers.start import write_start
from peers.table import Measured, show, write
from pipeloom.system.host_memory import available_memory
from pipeloom.terminal.words import format_bytes
from side_by_side.results import load_noted, machine, wide_console


def measure(row: Row, size: Size, start: Path, rounds: int, console: Console) -> Measured:
    """Run all programs of a row that can run here, each by itself and then, in each round, all in turns."""
    with load_noted() as load:
        measured = Measured(row, size, load)
        for program in row.programs:
            reason = why_skipped(row, program)
            if reason is not None:
                console.print(f"Skipped: {row.name}, {program.name}: {reason}.")
                continue
            try:
                measured.alone[program] = run_alone(row, program, size, start, size.warmup + 2)
            except RuntimeError as error:
                _note(error, measured, console)
        for together in _fitting(measured.alone, row, console) * rounds:
            found, errors = run_in_turns(row, together, size, start)
            for program, steps in found.items():
                measured.in_turns.setdefault(program, []).append(steps)
            for error in errors:
                _note(error, measured, console)
    return measured


def _note(error: RuntimeError, measured: Measured, console: Console) -> None:
    console.print(f"ERROR: {error}", markup=False)
    measured.failed = True


def _fitting(alone: Mapping[Program, Alone], row: Row, console: Console) -> list[list[Program]]:
    """The programs that run at the same time: all, or each by itself where memory does not suffice for all."""
    needed, free = sum(one.memory_bytes for one in alone.values()), available_memory().size_bytes
    if needed <= free:
        return [list(alone)]
    what = f"all programs at once need {format_bytes(needed)}, {format_bytes(free)} are free"
    console.print(f"{row.name}: {what}; so they run one after the other, and background load affects them unequally.")
    return [[program] for program in alone]


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
    options.add_argument("--rounds", type=int, default=2, help="how often all are started together")
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
                if one.in_turns:
                    write(found, chosen.folder / "peers.csv")
    show(found, console)
    console.print(f"Written to {chosen.folder}: peers.csv")
    return int(any(one.failed or any(map(one.is_error, one.in_turns)) for one in found))


if __name__ == "__main__":
    sys.exit(main())
