"""The wheel in an empty environment: its files, the README's lines of Python, its commands; ``make dist`` does more."""

import tomllib

import pytest
from distribution import ROOT, build_wheel, content, content_problems, install, readme_lines, try_commands

pytest.importorskip("setuptools", reason="builds the wheel; pip install setuptools")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel):
    assert content_problems(wheel) == []
    assert {"pipeloom/py.typed", "pipeloom/report/page.js", "pipeloom/export/bodies/torchrun.sh"} <= set(content(wheel))


@pytest.mark.timeout(240)  # eight processes, one after the other; a quiet machine takes 20 seconds
def test_the_wheel_works_in_an_empty_folder_without_the_checkout(wheel, tmp_path):
    # make dist compiles the loops, too: a new place of the package has no compiled ones, and these are small questions
    try_commands(install(wheel, tmp_path / "environment"), tmp_path / "empty", NUMBA_DISABLE_JIT="1")


def test_the_readme_has_six_lines_of_python():
    assert len([line for line in readme_lines().splitlines() if line.strip()]) == 6


def test_the_page_on_installing_lists_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert [name for name in extras if f"| `{name}` |" not in page] == []


def test_the_page_on_installing_names_the_tested_build():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert f"| {pins['torch']}, CPU build |" in (ROOT / "docs" / "install.md").read_text()
