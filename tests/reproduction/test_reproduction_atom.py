"""docs/reproduction/atom.md: loads are those that ``pipeloom schedule`` prints, and runs those of the benchmarks."""

import re
from pathlib import Path

import pytest

from pipeloom.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reproduction" / "atom.md").read_text(encoding="utf-8")
LOADS = re.findall(r"^\| (breadth-first|depth-first) \| (\d+) \| (\d+) \| (\S+) \|$", PAGE, flags=re.M)


def test_the_table_of_loads_has_both_orders():
    assert [row[:2] for row in LOADS] == [(order, n) for order in ("breadth-first", "depth-first") for n in ("2", "32")]


@pytest.mark.parametrize(("order", "count", "loads", "idle"), LOADS)
def test_loads_are_those_that_the_command_prints(capsys, order, count, loads, idle):
    (command,) = re.findall(r"^pipeloom (schedule .*)$", PAGE, flags=re.M)
    words = command.replace("breadth-first", order).replace("--num-microbatches 32", f"--num-microbatches {count}")
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^# stages swapped in +(\d+)", printed, flags=re.M) == [loads]
    (fraction,) = re.findall(r"^# bubble fraction +(\S+)", printed, flags=re.M)
    assert f"{float(fraction):.3f}" == idle


def test_runs_are_those_of_the_benchmarks():
    measured = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\S+ \(.* to .*\)) \| (\d+ %) \| equal \|$", PAGE, flags=re.M)
    assert len(rows) == 3
    for count, ratio, hidden in rows:
        assert re.search(rf"^\| {count} \| {re.escape(ratio)} \|.*\| {hidden} \|.*\| equal \|$", measured, flags=re.M)
    assert "4.1 times the budget" in measured
