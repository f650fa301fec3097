"""What the README shows works as it stands."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import median

import pytest
from commands import run_command
from plugins import write_plugin

from pipeloom.analysis.summary import summarize
from pipeloom.cli import main
from pipeloom.config import find_problems
from pipeloom.config.file import read_run_file
from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.simulation import simulate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WRITE = (ROOT / "docs" / "how-to" / "write-a-schedule.md").read_text()


def test_the_readme_is_one_screen():
    assert len(README.split()) <= 700


@pytest.fixture
def with_family(tmp_path):
    """The path of Python with what somebody has who followed the how-to page: the file and its entry point."""
    code, project = (re.search(rf"```{kind}\n(.*?)```", WRITE, flags=re.S)[1] for kind in ("python", "toml"))
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    write_plugin(tmp_path / "site", points["eager"], code, {group: "eager"})
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}


def test_the_family_of_the_how_to_page_is_there_in_every_command(with_family, tmp_path):
    def answer(*words):
        done, _ = run_command(*words, folder=folder, **with_family)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return json.loads(done.stdout) if "--json" in words else done.stdout

    folder = tmp_path / "here"
    folder.mkdir()
    found = answer("schedule", "eager", "--pp", "4", "--loops", "2", "--json")
    assert found["makespan"] < 64
    assert found["peak_stage_inputs"][-1] == 9
    assert "eager" in {line["name"] for line in answer("families", "--json")}
    run = ("--schedule.family", "eager", "--layout.pp", "2", "--model.num-layers", "2", "--model.hidden-size", "16")
    run = (*run, "--model.num-heads", "2", "--data.seq-len", "8")
    assert "EQUAL" in answer("verify", *run)
    assert answer("simulate", *run, "--json")["step_time_s"] > 0
    question = ("--model", "gpt-6.6b", "--cluster", "dgx-a100", "--devices", "8", "--global-batch", "8", "--seq", "512")
    planned = answer("plan", *question, "--families", "eager", "--pp", "4", "--no-explain", "--json")
    assert {layout["family"] for layout in planned["layouts"]} == {"eager"}


@pytest.mark.long
def test_tests_of_what_there_is_pass_with_the_family_of_the_how_to_page(with_family):
    root = Path(__file__).parents[1]
    tests = ["tests/test_schedule_pages.py::test_a_table_is_computed_again"]
    tests += ["tests/test_schedule_pages.py::test_every_family_that_trains_has_a_page", "tests/schedule/test_text.py"]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    env = os.environ | with_family
    done = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout


def test_the_numbers_in_the_readme_are_those_of_its_commands():
    numbers = {}
    for family, loops, costs in (("1f1b", 1, (4, 8)), ("breadth-first", 4, (1, 2))):
        schedule = make_schedule(family, pp=4, loops=loops, num_microbatches=8)
        summary = summarize(simulate(schedule, Costs(*costs)))
        numbers[family] = summary.bubble_fraction, max(schedule.peak_stage_inputs)
    (looped, held), (whole, few) = numbers["breadth-first"], numbers["1f1b"]
    assert f"bubble {100 * looped:.1f} % of the ranks' time, 1F1B {100 * whole:.1f} %" in README
    assert f"inputs of {held} layers, 1F1B at most {4 * few}" in README  # whose stages have 4 layers


def test_the_errors_in_the_readme_are_those_of_the_table_of_predictions():
    page = (ROOT / "docs" / "accuracy.md").read_text().partition("## How to compute it")[0]
    rows = [row.split("|") for row in re.findall(r"^\| `[a-z].*$", page, re.M)]
    held, left = (
        [float(one) for row in rows for one in re.findall(r"\d+\.\d", " ".join(row[of]))]
        for of in (slice(4, 6), slice(6, 7))
    )
    assert len(held) >= 15
    assert f"within {min(held)} to {max(held)} % on average, median {median(held):.1f} %" in README
    assert f"{min(left)} to {max(left)} % without" in README


def test_the_ratios_in_the_readme_are_those_of_the_benchmarks():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for ratio in re.findall(
        r"(?<!\d)\d\.\d\d(?!\d)", README.partition("## Measured")[2].partition("of the simulator's")[0]
    ):
        assert ratio in page


def test_the_example_of_a_run_file_is_right():
    config, problems = read_run_file(Path(__file__).parents[1] / "examples" / "run.toml")
    assert problems + find_problems(config) == []
    assert config.layout.num_stages == config.model.num_layers + 2


def test_what_the_page_shows_of_a_simulated_step_is_what_the_command_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", str(Path(__file__).parents[1] / "examples" / "gpt-52b-64-v100.toml")]) == 0
    printed = capsys.readouterr().out.split("\nCommunication beside")[0].rstrip()
    block = "\n".join(line.rstrip() for line in printed.splitlines())
    assert block in (ROOT / "docs" / "simulate.md").read_text()
