"""The public Python API: its names, their examples, what they cost to import, and what types they have."""

import doctest
import inspect
import json
import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest

import pipeloom
from pipeloom.families import FAMILIES

HEAVY = ("torch", "matplotlib", "rich", "numba", "pydantic", "numpy")
LEAST_S = 0.3


@pytest.mark.parametrize("name", pipeloom.__all__)
def test_a_name_is_there_and_is_called_so(name):
    value = getattr(pipeloom, name)
    assert name in dir(pipeloom)
    own = f"pipeloom.{name}" if isinstance(value, ModuleType) else {"family": "Family"}.get(name, name)
    assert value.__name__ == own


def test_names_are_sorted_and_those_that_type_checkers_see():
    assert pipeloom.__all__ == sorted(pipeloom.__all__)
    source = inspect.getsource(pipeloom).partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    seen = {}
    for line in source.splitlines():
        module, _, names = line.removeprefix("    from ").partition(" import ")
        seen |= dict.fromkeys(names.split(", "), module)
    assert seen.pop("passes") == "pipeloom"
    assert seen == {name: f"pipeloom.{module}" for name, module in pipeloom._MODULE_OF.items()}
    assert {*seen, "passes"} == {*pipeloom.__all__}


def test_no_name_hides_a_package_of_another_meaning():
    for name in {*pipeloom.__all__} - {"passes"}:
        with pytest.raises(ModuleNotFoundError):
            import_module(f"pipeloom.{name}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = pipeloom.simulat


def test_importing_takes_no_time_and_loads_nothing():
    script = "import sys, time; start = time.perf_counter(); import pipeloom; dir(pipeloom)"
    script += "; print(time.perf_counter() - start); import json; print(json.dumps(list(sys.modules)))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    seconds, modules = done.stdout.splitlines()
    assert float(seconds) < LEAST_S
    assert set(HEAVY).isdisjoint(json.loads(modules))


WITHOUT_EXAMPLE = {"passes"}
"""A package, whose functions have their own."""


@pytest.mark.parametrize("name", sorted({*pipeloom.__all__} - WITHOUT_EXAMPLE))
def test_the_docstring_has_an_example_that_runs(name, tmp_path, monkeypatch):
    value = getattr(pipeloom, name)
    finder = doctest.DocTestFinder(recurse=False)
    tests = finder.find(value, name, module=False, globs=vars(import_module(value.__module__)).copy())
    examples = [example for test in tests for example in test.examples]
    assert examples, f"{name} has no example"
    assert "Examples:" in inspect.getdoc(value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FAMILIES, "_values", dict(FAMILIES._values))  # an example adds a family
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL)
        printed = []
        runner.run(test, out=printed.append)
        assert runner.failures == 0, "".join(printed)
