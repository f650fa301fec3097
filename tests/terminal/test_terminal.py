"""What reaches the terminal, whoever printed it, and how."""

import io
import os
import re
import sys
import unicodedata

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.progress import TextColumn
from rich.table import Table

from pipeloom.terminal.console import hanging, headed, make_console
from pipeloom.terminal.guard import guarded_streams, printable, raw
from pipeloom.terminal.progress import Bar, restore_terminal

BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
HOSTILE = "a\x1b[31m\x0eb\x9b2Jc\u202ed\udcffe[red]f[/bold]g:smile:"
SHOWN = r"a\x1b[31m\x0eb\x9b2Jc\u202ed\udcffe[red]f[/bold]g:smile:"


class Terminal(io.StringIO):
    """A stream that claims to be one."""

    def isatty(self):
        return True


def test_what_is_printed_inside_is_guarded_and_the_streams_come_back(capsys):
    before = sys.stdout, sys.stderr
    with guarded_streams():
        sys.stdout.write(f"{HOSTILE}\n")
        sys.stderr.write(f"{HOSTILE}\n")
        sys.stdout.writelines(["one\r", "two\n"])
    assert (sys.stdout, sys.stderr) == before
    found = capsys.readouterr()
    assert found.out == f"{SHOWN}\none\\x0dtwo\n"
    assert found.err == f"{SHOWN}\n"


def test_streams_come_back_after_an_error_and_are_guarded_once(capsys):
    before = sys.stdout

    def fails():
        with guarded_streams(), guarded_streams():
            sys.stdout.write("\x1b\n")
            assert raw(sys.stdout) is before
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert sys.stdout is before
    assert capsys.readouterr().out == "\\x1b\n"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_tables_and_headlines_take_foreign_text_literally(stream, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = stream()
    console = make_console(file, width=120)
    rows = Table("name")
    rows.add_row(HOSTILE)
    for drawn in (HOSTILE, rows, headed(HOSTILE, HOSTILE)):
        console.print(drawn)
    text = re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())  # the console's own styles
    assert text.count(SHOWN) == 4
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\udcff]", text)


def test_a_line_of_a_table_is_as_wide_with_foreign_text_as_without():
    file = io.StringIO()
    rows = Table("name")
    rows.add_row("\x1b" * 5)
    make_console(file, width=60).print(rows)
    assert len({len(line) for line in file.getvalue().splitlines()}) == 1


def test_a_bar_still_draws_on_a_guarded_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with guarded_streams():
        bar = Bar(sys.stdout, TextColumn("step {task.completed}"), total=2)
        with bar:
            assert bar.update(2)
            sys.stdout.write("beside\x1b[2J\n")
        restore_terminal(sys.stdout)
    drawn = terminal.getvalue()
    assert "\x1b[?25l" in drawn
    assert drawn.endswith("\x1b[?25h")
    assert "step 2" in drawn
    assert "\x1b[2J" not in drawn


@given(st.text(st.characters(codec=None)))
def test_printable_text_can_be_written_and_moves_no_cursor(text):
    shown = printable(text)
    shown.encode("utf-8")
    categories = {unicodedata.category(letter) for letter in shown if letter not in "\n\t"}
    assert not categories & {"Cc", "Cs", "Zl", "Zp"}
    assert not any(unicodedata.bidirectional(letter) in BIDI_CONTROLS for letter in shown)
    assert printable(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字 and 👩‍🔬\n\tstay", "plain, ünïcode, 漢字 and 👩‍🔬\n\tstay"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("one\r\n\x0b\x0c", "one\\x0d\n\\x0b\\x0c"),
        ("\x7f\x85\x9b", r"\x7f\x85\x9b"),
        ("\u202egnp.exe\u2066\u200f", r"\u202egnp.exe\u2066\u200f"),
        (os.fsdecode(b"\xff"), r"\udcff"),
    ],
)
def test_control_characters_are_shown(text, shown):
    assert printable(text) == shown


def test_long_lines_of_names_and_texts_hang_in_a_terminal_alone(monkeypatch):
    text = (
        "verdict    measured 3,150 ms a step; `pipeloom train some-long/config.toml` measures\n           again\n\nend"
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    assert hanging(text, 11) == text
    monkeypatch.setenv("COLUMNS", "50")
    assert hanging(text, 11).split("\n") == [
        "verdict    measured 3,150 ms a step; `pipeloom",
        "             train some-long/config.toml` measures",
        "           again",
        "",
        "end",
    ]
