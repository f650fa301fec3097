"""The tree of errors is the one that its docstring draws."""

import inspect
import re

import pytest

from pipeloom import errors

CLASSES = {name: item for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, Exception)}


def drawn_tree():
    """Class -> parent as drawn, by the depth at which each name stands."""
    parents, path = {}, {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if match:
            depth = len(match[1])
            path = {other: name for other, name in path.items() if other < depth}
            parents[match[2]] = path[max(path)] if path else None
            path[depth] = match[2]
    return parents


def test_the_drawn_tree_has_every_error_below_its_base():
    drawn = drawn_tree()
    assert set(drawn) == set(CLASSES)
    for name, parent in drawn.items():
        assert CLASSES[name].__bases__[0].__name__ == (parent or "Exception")


def test_every_error_is_caught_by_the_root_and_says_what_it_is():
    for item in CLASSES.values():
        assert issubclass(item, errors.PipeloomError)
        assert inspect.getdoc(item)


def test_the_two_sides_are_also_pythons_own_errors():
    assert issubclass(errors.UserError, ValueError)
    assert issubclass(errors.RunError, RuntimeError)


@pytest.mark.parametrize(("problems", "count"), [(["one"], "has 1 problem:"), (["one", "two"], "has 2 problems:")])
def test_a_configuration_error_lists_its_problems(problems, count):
    error = errors.ConfigError(problems, "run.toml")
    assert str(error).splitlines() == [f"run.toml {count}", *(f"  - {problem}" for problem in problems)]
    assert error.problems == tuple(problems)


def test_the_reason_of_a_failure_names_neither_number_nor_path(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "nosuch").read_text()
    assert errors.reason_of(caught.value) == "No such file or directory"
    assert errors.reason_of(OSError("without a number")) == "without a number"
    assert errors.reason_of(ValueError("plain")) == "plain"


def test_a_schedule_error_without_a_place_names_the_rule_only():
    error = errors.ScheduleError("complete", "a message", rank=None, slot=None, window="")
    assert str(error) == "schedule breaks rule 'complete': a message"
    placed = errors.ScheduleError("complete", "a message", rank=2, slot=None, window="rows")
    assert str(placed) == "schedule breaks rule 'complete' at rank 2: a message\nrows"
