"""What the README shows works as it stands."""

import re
import shlex
from pathlib import Path

import pytest

from pipeloom.analysis.summary import summarize
from pipeloom.cli import main
from pipeloom.config.file import read_run_file
from pipeloom.cost.costs import UniformCosts
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import lower
from pipeloom.simulate import simulate

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


@pytest.mark.parametrize("pp", [1, 4])
def test_the_family_in_the_readme_is_a_family(pp):
    code = re.search(r"```python\n(.*?)```", README, flags=re.S)
    assert code is not None
    installed = FAMILIES.pop("eager", None)  # whoever followed the README has it
    try:
        exec(compile(code[1], "README.md", "exec"), {})
        schedule = make_schedule("eager", pp=pp, loops=2, num_microbatches=8)
        trace = simulate(lower(schedule), UniformCosts(1, 2))
        assert summarize(trace).makespan_s < 64
        if pp > 1:
            assert schedule.peak_stage_inputs[-1] == 9
    finally:
        FAMILIES.pop("eager", None)
        if installed is not None:
            FAMILIES["eager"] = installed


def test_the_numbers_in_the_readme_are_those_of_its_commands():
    numbers = {}
    for family, loops, costs in (("1f1b", 1, (4, 8)), ("breadth-first", 4, (1, 2))):
        schedule = make_schedule(family, pp=4, loops=loops, num_microbatches=8)
        summary = summarize(simulate(schedule, UniformCosts(*costs)))
        numbers[family] = summary.bubble_overhead, max(schedule.peak_stage_inputs)
    assert f"{numbers['1f1b'][0]:.3f}" in README
    assert f"{numbers['breadth-first'][0]:.3f}" in README
    assert f"{numbers['breadth-first'][1]} instead of at most {4 * numbers['1f1b'][1]}" in README


def test_the_example_of_a_run_file_is_right():
    config, problems = read_run_file(Path(__file__).parents[1] / "examples" / "run.toml")
    assert problems + config.problems() == []
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
