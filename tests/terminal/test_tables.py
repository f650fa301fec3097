"""Tables: what has no room beside the rest follows below."""

import pytest
from rich.console import Console

from pipeloom.terminal.console import print_table, table


def shown(width, capsys):
    rows = table("name", ["alpha", "beta", "gamma", "words"], texts=["words"])
    for number in range(3):
        rows.add_row(f"row {number}", "1,000", str(20 + number), "3.25%", "a layout in " + "many words " * 4)
    print_table(Console(width=width), rows)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [16, 24, 40, 60, 80, 120])
def test_every_cell_is_there_at_every_width_and_nothing_is_cut(width, capsys):
    printed = shown(width, capsys)
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    for word in ("alpha", "beta", "gamma", "1,000", "20", "21", "22", "3.25%"):
        assert word in printed.split()
    assert printed.count("many") == printed.count("layout") * 4 == 12


def test_a_table_that_fits_is_one_block_and_others_repeat_the_names_of_rows(capsys):
    assert shown(120, capsys).count("row 0") == 1
    assert shown(24, capsys).count("row 0") == 2
    assert shown(16, capsys).count("row 0") == 3


def test_names_that_are_long_leave_room_for_the_figures(capsys):
    rows = table("", ["figure"])
    rows.add_row("a name of many words that goes on and on and on", "1,234,567")
    print_table(Console(width=30), rows)
    printed = capsys.readouterr().out
    assert "1,234,567" in printed
    assert max(map(len, printed.splitlines())) <= 30
