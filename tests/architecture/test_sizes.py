"""Modules and functions stay small enough to read."""

import ast
from pathlib import Path

import pytest

import pipeloom

SOURCE = Path(pipeloom.__file__).parent
MODULES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
MOST_LINES = 500
MOST_FUNCTION_LINES = 60


def long_functions(text):
    """Functions of a module's text that are too long, with their number of lines."""
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    return {name: length for name, length in lengths.items() if length > MOST_FUNCTION_LINES}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_and_its_functions_are_short_and_it_says_what_it_is(module):
    text = (SOURCE / module).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert long_functions(text) == {}
    assert not text or ast.get_docstring(ast.parse(text))


def test_the_check_sees_a_long_function():
    assert long_functions("def f():\n" + "    pass\n" * 59) == {}
    assert long_functions("class C:\n  async def f():\n" + "    pass\n" * 60) == {"f": 61}


def test_the_package_was_found():
    assert {"errors.py", "schedule/schedule.py", "cli/schedule.py"} <= {module.replace("\\", "/") for module in MODULES}
