"""What is printed goes through one place: no other module makes a console of its own or writes markup."""

import re
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "src" / "pipeloom"
FILES = sorted(SOURCES.rglob("*.py"))


@pytest.mark.parametrize(
    ("words", "only_in"),
    [
        (r"\bConsole\(", None),
        (r"_PrintableConsole\(", "terminal/console.py"),
        (r"\brich\.print\(|\bProgress\(|\brich\.live", "terminal/progress.py"),
        (r"\[[a-z ]+\][^\n]*\[/[a-z ]*\]", None),
        (r"suppress\(OSError\)[^\n]*\n(?: {8}.*\n){0,3} {8,}print\(", "terminal/guard.py"),
        (r"\bsys\.__std(?:out|err)__|os\.write\([12]", None),
    ],
)
def test_only_one_module_reaches_the_terminal_itself(words, only_in):
    found = [str(file.relative_to(SOURCES)) for file in FILES if re.search(words, file.read_text(encoding="utf-8"))]
    assert found == ([only_in] if only_in else [])


def test_only_one_module_quotes_words_for_a_shell():
    found = [file.relative_to(SOURCES).as_posix() for file in FILES if "import shlex" in file.read_text("utf-8")]
    assert found == ["terminal/words.py"]
