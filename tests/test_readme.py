"""What the README shows works as it stands."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

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

README = (Path(__file__).parents[1] / "README.md").read_text()
COMMANDS = re.findall(r"^    pipeloom (schedule .*)$", README, flags=re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_schedule_command_runs(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    assert "makespan" in capsys.readouterr().out
    assert list(tmp_path.iterdir())


def test_there_are_schedule_commands():
    assert len(COMMANDS) >= 2


@pytest.fixture
def with_family(tmp_path):
    """The path of Python with what somebody has who followed the README: the file and its entry point."""
    code, project = (re.search(rf"```{kind}\n(.*?)```", README, flags=re.S)[1] for kind in ("python", "toml"))
    ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
    write_plugin(tmp_path / "site", points["eager"], code, {group: "eager"})
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}


def test_the_family_of_the_readme_is_there_in_every_command(with_family, tmp_path):
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


def test_tests_of_what_there_is_pass_with_the_family_of_the_readme(with_family):
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
        numbers[family] = summary.bubble_overhead, max(schedule.peak_stage_inputs)
    assert f"{numbers['1f1b'][0]:.3f}" in README
    assert f"{numbers['breadth-first'][0]:.3f}" in README
    assert f"{numbers['breadth-first'][1]} instead of at most {4 * numbers['1f1b'][1]}" in README


def test_the_example_of_a_run_file_is_right():
    config, problems = read_run_file(Path(__file__).parents[1] / "examples" / "run.toml")
    assert problems + find_problems(config) == []
    assert config.layout.num_stages == config.model.num_layers + 2


def test_every_link_to_a_file_leads_somewhere():
    root = Path(__file__).parents[1]
    for page in [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_what_the_readme_shows_of_a_simulated_step_is_what_the_command_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["simulate", str(Path(__file__).parents[1] / "examples" / "gpt-52b-64-v100.toml")]) == 0
    said = capsys.readouterr().out.split("\nCommunication beside")[0].rstrip()
    block = "\n".join(f"    {line}".rstrip() for line in said.splitlines())
    assert block in README
