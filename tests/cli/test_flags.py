"""Flags of a command line, with everything that is wrong with them at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from pipeloom.cli import COMMANDS, main
from pipeloom.cli.flags import flag_problems, parse_flags
from pipeloom.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    """A section."""

    whole_number: int = 1
    is_on: bool = False
    choice: Literal["first", "second"] | None = None


@dataclass(frozen=True)
class Options:
    """Something of every type."""

    inner: Inner = field(default_factory=Inner)
    rate: float = 0.5
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[int, ...] | Literal["auto"] | None = None
    file: Path | None = None
    asked: bool | None = None


GOOD = [
    ["--inner.whole-number", "-3"],
    ["--inner.whole_number=3"],
    ["--inner.is-on"],
    ["--inner.no-is-on"],
    ["--inner.choice", "second"],
    ["--inner.choice", "None"],
    ["--rate", "1e-3"],
    ["--rate", "inf"],
    ["--pair", "1", "-2.5"],
    ["--many", "1", "2", "3"],
    ["--many", "auto"],
    ["--file", "a b.txt"],
    ["--asked", "True"],
]
BAD = {
    "--inner.whole-number x": "--inner.whole-number must be a whole number, found 'x'",
    "--inner.whole-number 1.5": "--inner.whole-number must be a whole number, found '1.5'",
    "--inner.whole-number": "--inner.whole-number must be a whole number, found nothing",
    "--inner.whole-number 1 2": "--inner.whole-number must be a whole number, found '1 2'",
    "--inner.whole-numbr 1": "there is no flag --inner.whole-numbr; did you mean '--inner.whole-number'?",
    "--zzz": "there is no flag --zzz",
    "--inner.is-on true": ("--inner.is-on takes no value, found 'true'; write --inner.is-on or --inner.no-is-on alone"),
    "--inner.choice secondx": (
        "--inner.choice must be one of first, second or None, found 'secondx'; did you mean 'second'?"
    ),
    "--rate fast": "--rate must be a number, found 'fast'",
    "--pair 1": "--pair must be 2 values, each a number, found '1'",
    "--many 1 x": "--many must be any number of values, each a whole number or auto or None, found '1 x'",
    "--asked yes": "--asked must be True or False or None, found 'yes'",
}


@pytest.mark.parametrize("words", GOOD, ids=" ".join)
def test_what_the_parser_takes_is_no_problem(words):
    parse_flags(Options, words, "test", "Test.")
    assert flag_problems(Options, words) == []


@pytest.mark.parametrize("words", BAD)
def test_what_the_parser_refuses_is_one_sentence(words):
    with pytest.raises(ConfigError) as refused:
        parse_flags(Options, words.split(), "test", "Test.")
    assert refused.value.problems == (BAD[words],)


def test_all_that_is_wrong_is_said_together_with_what_is_wrong_beside_it(capsys):
    words = " ".join(BAD).split()
    with pytest.raises(ConfigError) as refused:
        parse_flags(Options, words, "test", "Test.", beside=lambda: ["a file is wrong"], source="run.toml")
    assert refused.value.problems == (*BAD.values(), "a file is wrong")
    assert str(refused.value).startswith(f"run.toml has {len(BAD) + 1} problems:")
    assert capsys.readouterr().err == ""


def test_what_only_the_parser_finds_is_printed_as_it_says_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_flags(Options, ["word"], "test", "Test.")
    assert "Unrecognized options: word" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="beside the flags above, run.toml has 1 problem"):
        parse_flags(Options, ["word"], "test", "Test.", beside=lambda: ["a file is wrong"], source="run.toml")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_all_wrong_flags_at_once(capsys, command):
    assert main([command, "--first-wrong", "1", "--second-wrong=2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the command line has 2 problems" in captured.err
    assert "there is no flag --first-wrong" in captured.err
    assert "there is no flag --second-wrong" in captured.err


def test_flags_and_a_file_that_are_wrong_are_one_message(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("layout.loop = 2\n[training]\nsteps = 0\n")
    assert main(["train", str(tmp_path / "run.toml"), "--layout.dpp", "2", "--model.hidden-size", "wide"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"pipeloom train: {tmp_path / 'run.toml'} with the flags over it has 4 problems:"
    assert [line.removeprefix("  - ").split(";")[0].split(",")[0] for line in lines[1:]] == [
        "there is no flag --layout.dpp",
        "--model.hidden-size must be a whole number",
        "there is no setting 'layout.loop'",
        "training.steps must be at least 1",
    ]
