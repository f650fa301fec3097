"""Flags of a command line, with everything that is wrong with them at once."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from pipeloom.cli import COMMANDS, main, plan, train
from pipeloom.cli.flags import _ELSEWHERE, parse_flags, read_flags
from pipeloom.cli.reference import Command, Output, Place, command_of
from pipeloom.cli.run_config import parse_config
from pipeloom.errors import ConfigError
from pipeloom.workload.limits import ClusterName


@dataclass(frozen=True, kw_only=True)
class Options:
    """Something of every type."""

    inner_number: int = 1
    is_on: bool = False
    choice: Literal["first", "second"] | None = None
    rate: float = 0.5
    pair: tuple[float, float] = (0.0, 1.0)
    many: tuple[int, ...] | Literal["auto"] | None = None
    names: tuple[str, ...] = ()
    file: Path | None = None
    asked: bool | None = None
    cluster: ClusterName | None = None
    out: Annotated[Path | None, Output("folder")] = None
    plot: Annotated[Path | None, Output("picture")] = None
    place: Annotated[str | None, Place("PLACE")] = None


COMMAND = Command(name="test", options=Options, examples={}, retired={"--old": "use --rate"})


def refusal(words, command=COMMAND):
    with pytest.raises(ConfigError) as refused:
        parse_flags(command, words)
    return list(refused.value.problems)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--inner-number", "-3"], "inner_number", -3),
        (["--inner_number=3"], "inner_number", 3),
        (["--is-on"], "is_on", True),
        (["--no-is-on"], "is_on", False),
        (["--choice", "second"], "choice", "second"),
        (["--choice", "None"], "choice", None),
        (["--rate", "1e-3"], "rate", 1e-3),
        (["--rate", "-inf"], "rate", float("-inf")),
        (["--pair", "1", "-2.5"], "pair", (1.0, -2.5)),
        (["--pair", "1,-2.5"], "pair", (1.0, -2.5)),
        (["--many", "1", "2", "3"], "many", (1, 2, 3)),
        (["--many", "1,2", "3"], "many", (1, 2, 3)),
        (["--many", "64,128"], "many", (64, 128)),  # which is also 64128 with a separator
        (["--many", "0,1"], "many", (0, 1)),
        (["--names", "007"], "names", ("007",)),
        (["--many=1,2"], "many", (1, 2)),
        (["--many", "auto"], "many", "auto"),
        (["--names=-a,b"], "names", ("-a", "b")),
        (["--file", "a b.txt"], "file", Path("a b.txt")),
        (["--file=-x"], "file", Path("-x")),
        (["--file", "None"], "file", None),
        (["--asked"], "asked", True),
        (["--rate", "1", "--rate", "2"], "rate", 2.0),
        (["--is-on", "--no-is-on"], "is_on", False),
        (["--many", "1", "--many", "2"], "many", (2,)),
        (["--no-asked"], "asked", False),
        (["word"], "place", "word"),
        (["--rate", "1", "word", "--is-on"], "place", "word"),
    ],
    ids=str,
)
def test_a_value_is_that_of_its_flag(words, name, value):
    assert getattr(parse_flags(COMMAND, words), name) == value


BAD = {
    "--inner-number x": "--inner-number must be a whole number, found 'x'",
    "--inner-number=1.5": "--inner-number must be a whole number, found '1.5'",
    "--inner-number": "--inner-number must be a whole number, found nothing",
    "--inner-number=": "--inner-number must be a whole number, found ''",
    "--inner-numbr 1": "there is no flag --inner-numbr; did you mean '--inner-number'?",
    "--inner 1": "there is no flag --inner; did you mean '--inner-number'?",
    "--zzz": "there is no flag --zzz",
    "--hlep": "there is no flag --hlep; did you mean '--help'?",
    "--old 1": "test has no flag --old any more; use --rate",
    "--is-on true": "--is-on takes no value: write --is-on for true, --no-is-on for false",
    "--is-on=1": "--is-on takes no value: write --is-on for true, --no-is-on for false",
    "--choice secondx": "--choice must be one of first, second, found 'secondx'; did you mean 'second'?",
    "--rate fast": "--rate must be a number, found 'fast'",
    "--pair 1": "--pair must be 2 values, each a number, found '1'",
    "--many 1 x": "--many must be one value or more, each a whole number or auto, found '1 x'",
    "--names": "--names must be one value or more, each a text that is not empty, found nothing",
    "--file=": "--file must be a path, found ''",
    "word --rate 1 2": "expected no word '2' after --rate, which takes one value",
    "--plot picture.xyz": "--plot: cannot draw to picture.xyz: expected a file ending in one of .png, .svg, .pdf",
    "--plot nowhere/x.png": "--plot: cannot write nowhere/x.png: there is no folder nowhere",
    "--out /dev/null/x": "--out: cannot write /dev/null/x: /dev/null is not a folder",
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_wrong_is_one_sentence(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(words.split()) == [BAD[words]]


def test_all_that_is_wrong_is_reported_in_the_order_of_the_words():
    bad = [words for words in BAD if words.count("--") == 1 and not words.startswith(("word", "--plot", "--out"))]
    once = {words.partition(" ")[0].partition("=")[0]: words for words in bad}
    assert refusal(" ".join(once.values()).split()) == [BAD[words] for words in once.values()]


def test_values_that_are_right_are_there_beside_what_is_wrong():
    options, problems = read_flags(COMMAND, ["--rate", "2", "--many", "x", "--cluster=~/c.toml"])
    assert (options.rate, options.many, options.cluster) == (2.0, None, str(Path.home() / "c.toml"))
    assert len(problems) == 1


def test_a_dot_is_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_flags(COMMAND, ["--file", "."]).file == tmp_path


@dataclass(frozen=True, kw_only=True)
class Required:
    """Options without defaults."""

    run: Annotated[Path, Place("RUN")]
    """Run folder."""
    seq: int
    """Sequence length."""


def test_what_is_missing_is_reported_with_what_is_wrong():
    command = Command(name="test", options=Required, examples={})
    missing = "RUN is missing: run folder; usage: pipeloom test RUN [OPTIONS]"
    assert refusal(["--seq=1", "--rate=2"], command) == ["there is no flag --rate", missing]
    assert refusal(["here"], command) == ["--seq N is missing: sequence length"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reports_all_wrong_flags_at_once(capsys, command):
    assert main([command, "--first-wrong", "1", "--second-wrong=2"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0].startswith(f"pipeloom {command}: the command line has ")
    assert lines[1:3] == ["  - there is no flag --first-wrong", "  - there is no flag --second-wrong"]


@pytest.mark.parametrize("command", [name for name in COMMANDS if command_of(name).settings])
def test_a_flag_that_a_command_does_not_read_is_refused_by_name(capsys, command):
    unread = (
        "--checkpoint.every=2" if command in ("simulate", "slices", "survive", "verify") else "--machine.fused-norm"
    )
    if command == "launch":
        return  # reads everything
    assert main([command, unread]) == 2
    assert f"{unread.partition('=')[0]} has no effect on {command}; leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("plan --layout.pp 4", "--layout.pp; did you mean '--pp'?"),
        ("plan --machine.cluster dgx-a100", "--machine.cluster; did you mean '--cluster'?"),
        ("simulate --layout.seq-len 64", "--layout.seq-len; did you mean '--data.seq-len'?"),
        ("train --layout.lr 3", "--layout.lr; did you mean '--optimizer.lr'?"),
        ("simulate --model llama-3-8b", "--model; did you mean '--model.preset', '--model.file' or "),
    ],
)
def test_the_flag_of_another_command_leads_to_the_own_one(capsys, words, hint):
    assert main(words.split()) == 2
    assert f"there is no flag {hint}" in capsys.readouterr().err


def test_flags_and_a_file_that_are_wrong_are_one_message(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("layout.loop = 2\n[training]\nsteps = 0\n")
    words = [str(tmp_path / "run.toml"), "--layout.dpp", "2", "--model.hidden-size", "wide", "--pp", "2"]
    assert main(["train", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"pipeloom train: {tmp_path / 'run.toml'} with the flags over it has 5 problems:"
    assert [line.removeprefix("  - ").split(",")[0] for line in lines[1:]] == [
        "there is no flag --layout.dpp; did you mean '--layout.dp' or '--layout.pp'?",
        "--model.hidden-size must be a whole number",
        "there is no flag --pp; did you mean '--layout.pp'?",
        "there is no setting 'layout.loop'; did you mean 'layout.loops'?",
        "training.steps must be at least 1",
    ]


def test_a_file_that_is_not_there_is_reported_with_the_flags(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("")
    assert main(["simulate", "rum.toml", "--layout.pp", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [
        "  - cannot read the configuration rum.toml: No such file or directory; did you mean 'run.toml'?",
        "  - --layout.pp must be a whole number, found 'x'",
    ]


@pytest.mark.parametrize("unknown", [["--foo", "1"], ["--foo"], ["--foo", "1", "2"]])
def test_a_run_file_behind_an_unknown_flag_is_read(tmp_path, capsys, unknown):
    (tmp_path / "run.toml").write_text('[training]\nsteps = 0\n[model]\nfamily = "bert"\n')
    assert main(["train", *unknown, str(tmp_path / "run.toml")]) == 2
    _, *problems = capsys.readouterr().err.splitlines()
    assert [problem.split(" must ")[0].split(";")[0] for problem in problems] == [
        "  - there is no flag --foo",
        "  - model.family: there is no model family 'bert'",
        "  - training.steps",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_examples_are_commands_when_pasted(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for flag, most in (("--help", 45), ("--help-all", None)):
        with pytest.raises(SystemExit):
            main([name, flag])
        page = capsys.readouterr().out
        assert max(map(len, page.splitlines())) <= 80
        assert most is None or len(page.splitlines()) <= most
        joined = page.replace(" \\\n", " ")
        shown = [shlex.split(line, comments=True) for line in joined.splitlines() if line.startswith("  pipeloom ")]
        for words, example in zip(shown, command_of(name).examples, strict=True):
            assert words[: len(shlex.split(example))] == shlex.split(example)


def test_a_file_behind_an_unknown_flag_is_no_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("words")
    with pytest.raises(ConfigError) as refused:
        parse_config(command_of("train"), ["--data.pth", "my.txt"])
    assert refused.value.problems == ("there is no flag --data.pth; did you mean '--data.path'?",)


@pytest.mark.parametrize("name", ["evaluate", "generate"])
def test_settings_of_a_run_have_the_values_of_that_run_in_the_help(name, capsys):
    expected = {"--help": "or those of RUN.", "--help-all": "Settings without a default have the values of RUN"}
    for flag, sentence in expected.items():
        with pytest.raises(SystemExit):
            main([name, flag])
        shown = " ".join(capsys.readouterr().out.split())
        assert sentence in shown
        assert "Pipeline-model-parallel size: pipeline ranks [" not in shown
        assert "--layout.[no-]sequence-parallel" in shown


@pytest.mark.parametrize("there", _ELSEWHERE)
def test_a_name_of_another_program_names_ours(there):
    named = []
    for command in (train.COMMAND, plan.COMMAND):
        with pytest.raises(ConfigError) as refused:
            parse_flags(command, [f"--{there}", "1"])
        named += [one for one in refused.value.problems if f"there is no flag --{there}; did you mean" in one]
    assert named


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--many 1,024",
            "numbers without leading zeros, found '1,024'; write 1024 without commas, or 1 24 for 2 values",
        ),
        ("--many 8 1,000,000", "'1,000,000'; write 1000000 without commas, or 1 0 0 for 3 values"),
        ("--many 8,016", "'8,016'; write 8016 without commas, or 8 16 for 2 values"),
        ("--many 64,08", "found '64,08'; write 64 8 for 2 values"),
        ("--many 064", "found '064'; write 64 for 1 value"),
        ("--inner-number 1,024", "a whole number, found '1,024'; write 1024 without commas"),
    ],
)
def test_a_number_with_separators_of_thousands_is_refused_with_both_ways_to_write_it(words, problem):
    (found,) = refusal(words.split())
    assert found.startswith(f"{words.split()[0]} must be ")
    assert found.endswith(problem)
