"""What each fact of a program is worth: predictions of held-out rows with it, and with it alone switched off.

    python benchmarks/ablation.py [TABLE.csv ...] [PART ...]

A fact is in a program's file beside its efficiencies (``pipeloom.cost.software.Software``), such as overlapped
exchanges. Switched off it has the default. All lines of a split have the same rows and the same prior, and each is
fitted anew, as in ``held_out.py``. A PART keeps the programs whose name contains it. Some minutes for each program.
"""

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from held_out import Programs, Split, held_out, mean_of, splits, tables_in
from pipeloom.accuracy.programs import cluster_of, program_of
from pipeloom.accuracy.rows import Row, read_rows
from pipeloom.accuracy.schedules import predict
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software

NAMES_AND_VALUES = (
    "name",
    "cluster",
    "efficiency",
    "optimizer",
    "sets",
    "attentions",
    "families",
    "shards",
    "strategies",
)
"""Attributes of a program that are no facts about its steps."""


class Ablation(NamedTuple):
    """A fact and the mean errors of held-out rows.

    Attributes:
        split: which rows.
        fact: of the program.
        with_it, without: mean of |predicted / measured - 1|.
    """

    split: Split
    fact: str
    with_it: float
    without: float


def facts_of(program: Software) -> list[str]:
    """Facts of a program that differ from the defaults."""
    usual = Software(name="")
    return [
        item.name
        for item in fields(program)
        if item.name not in NAMES_AND_VALUES and getattr(program, item.name) != getattr(usual, item.name)
    ]


def without(program: Software, fact: str) -> Software:
    """The program with the default instead of a fact."""
    return replace(program, **{fact: getattr(Software(name=""), fact)})


def matters(rows: list[Row], program: Software, fact: str) -> bool:
    """Whether a fact changes the predicted step of any row."""
    return any(_step_s(row, program) != _step_s(row, without(program, fact)) for row in rows)


def _step_s(row: Row, program: Software) -> float:
    return predict(Placed(row.run, cluster_of(row, program), program), row.schedule).prediction.step_time_s


def ablations(known: Programs, parts: list[str]) -> Iterator[Ablation]:
    """A line for each fact of a program that matters, and each of its splits."""
    for split in splits(known.rows):
        if parts and not any(part in split.program for part in parts):
            continue
        own = [row for row in known.rows if program_of(row)[0] == split.program]
        program = program_of(own[0])[1]
        facts = [fact for fact in facts_of(program) if matters(own, program, fact)]
        usual = mean_of(held_out(split, known)) if facts else 0.0
        for fact in facts:
            yield Ablation(split, fact, usual, mean_of(held_out(split, known, partial(without, fact=fact))))


def main(words: list[str]) -> None:
    """Compute and print the lines."""
    console, known = Console(width=160), Programs([row for table in tables_in(words) for row in read_rows(table)])
    lines = Table("program", "fitted on", "predicted", "fact", "with", "without")
    for line in ablations(known, [word for word in words if not word.endswith(".csv")]):
        split = line.split
        cells = [split.program, split.fitted, split.held_out, line.fact, f"{line.with_it:.1%}", f"{line.without:.1%}"]
        lines.add_row(*cells)
        console.print(": ".join(cells), highlight=False)
    console.print(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
