"""A family with a mistake in it: one message, with the family, the file, the line and what was returned or raised."""

import importlib
import linecache
import sys

import pytest

from pipeloom.cli import main
from pipeloom.errors import ConfigError, FamilyError, ScheduleError
from pipeloom.families import FAMILIES, Choice, Rows, make_schedule
from pipeloom.families.family import family, forward
from pipeloom.schedule import Action, Kind

SIZES = {"pp": 2, "loops": 1, "num_microbatches": 1}
RULE_LINE = 4
FILE = '''from pipeloom.families import Rows, family
from pipeloom.families.family import backward, forward

@family("own", is_looped=True, stage_inputs={closed_form})
def own(request):
    """Own."""
    {body}
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write and load a file with the family ``own``; returns its path."""
    monkeypatch.syspath_prepend(tmp_path)
    linecache.clearcache()

    def write(body, closed_form="None"):
        file = tmp_path / "own_family.py"
        file.write_text(FILE.format(body=body, closed_form=closed_form))
        importlib.import_module("own_family")
        return file

    yield write
    FAMILIES.remove("own")
    sys.modules.pop("own_family", None)


def refused(**sizes):
    with pytest.raises(FamilyError) as caught:
        make_schedule("own", **{**SIZES, **sizes})
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        ("return [][1]", "IndexError: list index out of range"),
        ("return request.ranks", "AttributeError: 'Request' object has no attribute 'ranks'"),
        ("assert request.loops > 1", "AssertionError"),
        (
            "return Rows([[forward(0)]], [1])",
            "TypeError: forward() missing 1 required positional argument",
        ),
        ("return __import__('statistics').mean([])", "StatisticsError: mean requires"),
    ],
)
def test_an_exception_of_a_rule_is_named_with_its_line(own, body, printed):
    file = own(body)
    message = refused()
    assert message.startswith(f"the family 'own' raised {printed}")
    assert f", in {file}, line {RULE_LINE + 3}: {body}; " in message
    assert message.count("\n") == 0


@pytest.mark.parametrize(
    ("body", "problems"),
    [
        ("pass", ["expected Rows(rows, max_stage_inputs), found None"]),
        ("return [[forward(0, 0)]]", ["expected Rows(rows, max_stage_inputs), found [[Action("]),
        ("return Rows(None, [1, 1])", ["rows must be a list with a row for each rank, found None"]),
        ("return Rows('0F0', [1, 1])", ["rows must be a list with a row for each rank, found '0F0'"]),
        ("return Rows([[], None], [1, 1])", ["the row of rank 1 must be a list of actions, found None"]),
        ("return Rows([[], [forward(1, 0), '1B0']], [1, 1])", ["rank 1, slot 1 must be an action", "found '1B0'"]),
        ("return Rows([[forward(0.5, 0)], []], [1, 1])", ["rank 0, slot 0 must be an action with whole numbers"]),
        ("return Rows([[forward(0, True)], []], [1, 1])", ["rank 0, slot 0 must be an action with whole numbers"]),
        ("return Rows([[], []], 3)", ["max_stage_inputs must be a list with a whole number for each rank, found 3"]),
        ("return Rows([[], []], [1, None])", ["max_stage_inputs must be", "found [1, None]"]),
        ("return Rows([None, []], 'ab')", ["the row of rank 0 must be", "max_stage_inputs must be"]),
    ],
)
def test_what_is_no_rows_of_actions_is_refused_with_what_it_is(own, body, problems):
    file = own(body)
    message = refused()
    assert message.startswith(f"the family 'own' ({file}, line {RULE_LINE}) returned no rows of actions:\n")
    assert all(problem in message for problem in problems)


def test_one_mistake_in_every_row_is_not_named_for_every_row(own):
    own("return Rows([None] * 500, [1] * 500)")
    assert refused(pp=500).count("\n") == 5


def test_a_long_value_is_cut(own):
    own("return 'x' * 10_000")
    assert len(refused()) < 300


def test_a_broken_rule_names_the_family_in_a_note(own):
    file = own("return Rows([[forward(0, 0), backward(0, 0)], []], [1, 1])")
    with pytest.raises(ScheduleError) as caught:
        make_schedule("own", **SIZES)
    assert caught.value.__notes__ == [f"the rows are those of the family 'own' ({file}, line {RULE_LINE})"]


def test_a_family_that_splits_backwards_declares_it(own):
    actions = "forward(0, 0), Action(Kind.BACKWARD_INPUT, 0, 0), Action(Kind.BACKWARD_WEIGHT, 0, 0)"
    file = own(f"from pipeloom import Action, Kind; return Rows([[{actions}]], [1])")
    where = f"the family 'own' ({file}, line {RULE_LINE})"
    assert refused(pp=1) == f"{where} splits backwards; add splits_backward=True to its declaration"


def test_several_stages_on_a_rank_are_refused_without_a_family_to_use_instead():
    def rule(request):
        """Own."""

    family("own", is_looped=False)(rule)
    try:
        (problem,) = Choice(family="own", **{**SIZES, "loops": 2}).problems()
        assert problem == "own runs one stage on each rank, found loops 2; use loops 1"
    finally:
        FAMILIES.remove("own")


def test_a_mistake_in_a_closed_form_is_named(own):
    own("pass", closed_form="lambda request: 1 / 0")
    with pytest.raises(FamilyError, match="the family 'own' raised ZeroDivisionError: division by zero, in .*line 4"):
        _ = Choice(family="own", **SIZES).stage_inputs


def test_numbers_of_numpy_and_rows_that_are_tuples_are_taken():
    import numpy as np

    def rule(request):
        """Own."""
        number = np.int64(0)
        rows = tuple((forward(stage, number), Action(Kind.BACKWARD, stage, 0)) for stage in np.arange(2))
        return Rows(rows, np.ones(2, np.int64).tolist())

    family("own", is_looped=True)(rule)
    try:
        assert str(make_schedule("own", **SIZES).rows[1]) == "Row(1F0 1B0)"
    finally:
        FAMILIES.remove("own")


def test_a_message_of_a_rule_stays_as_it_is(own):
    own("from pipeloom.errors import ConfigError; raise ConfigError(['too small'])")
    with pytest.raises(ConfigError, match="too small") as caught:
        make_schedule("own", **SIZES)
    assert not isinstance(caught.value, FamilyError)


COMMANDS = {
    "schedule": ["schedule", "own", "--pp", "2"],
    "families": ["families"],
    "train": ["train", "--schedule.family", "own", "--layout.pp", "2", "--output.folder", "out"],
    "simulate": ["simulate", "--schedule.family", "own", "--layout.pp", "2"],
    "plan": ["plan", "--model", "gpt-6.6b", "--cluster", "dgx-a100", "--devices", "2", "--global-batch", "2", "--seq",
             "128", "--families", "own", "--pp", "2"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_ends_with_the_message_and_writes_nothing(own, command, tmp_path, monkeypatch, capsys):
    own("return [][1]")
    before = sorted(tmp_path.rglob("*.py"))
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[command]) == 2
    err = capsys.readouterr().err
    assert "the family 'own' raised IndexError" in err
    assert "Traceback" not in err
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix != ".pyc" and path.is_file()) == before
    assert not (tmp_path / "out").exists()


def test_a_traceback_is_printed_where_the_environment_says_so(own, monkeypatch, capsys):
    own("return [][1]")
    monkeypatch.setenv("PIPELOOM_TRACEBACK", "1")
    assert main(COMMANDS["schedule"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert "return [][1]" in err
    assert err.rstrip().endswith("PIPELOOM_TRACEBACK=1 prints the traceback")
