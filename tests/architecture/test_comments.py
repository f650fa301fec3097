"""Comments that state why: the source has at least so many lines of them."""

import io
import re
import tokenize
from pathlib import Path

import pipeloom

SOURCE = Path(pipeloom.__file__).parent
LEAST = 980
"""Less than the source has, so that a module can be removed with its comments; raise it when there are more."""
DIRECTIVE = re.compile(r"#\s*(noqa|ruff:|type:|pyrefly:|pragma:|fmt:)")


def comment_lines(text):
    """Lines of a module with a comment that is more than an instruction to a tool."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.start[0] for token in tokens if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string)]


def test_lines_are_explained_where_they_stand(capsys):
    found = {file: len(comment_lines(file.read_text(encoding="utf-8"))) for file in SOURCE.rglob("*.py")}
    with capsys.disabled():
        print(f"\n{sum(found.values())} comment lines in {len(found)} modules", end=" ")  # noqa: T201
    assert sum(found.values()) >= LEAST


def test_directives_and_strings_are_no_comments():
    text = 'x = 1  # noqa: F401\n# type: ignore\n# ruff: noqa\ny = "# none"\nz = 2  # since zero divides\n# two\n'
    assert comment_lines(text) == [5, 6]
