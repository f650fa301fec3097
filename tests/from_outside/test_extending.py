"""The examples of docs/extending.md, installed as distributions of their own, work in every command."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
from commands import run_command
from plugins import write_plugin

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```toml\n(.*?)```", PAGE, flags=re.S)
QUESTION = ("--model", "gpt-6.6b", "--devices", "8", "--global-batch", "16", "--seq", "512", "--no-explain", "--json")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the distributions of all examples."""
    folder = tmp_path_factory.mktemp("site")
    for code, project in EXAMPLES:
        ((group, points),) = tomllib.loads(project)["project"]["entry-points"].items()
        ((name, module),) = points.items()
        write_plugin(folder, module, code, {group: name})
    return folder


@pytest.fixture
def answer(site, tmp_path):
    """What a command prints with the examples installed; JSON is read."""
    folder = tmp_path / "here"
    folder.mkdir()

    def run(*words):
        path = os.pathsep.join([str(site), *sys.path])
        done = run_command(*words, folder=folder, PYTHONPATH=path)
        assert (done.status, done.stderr) == (0, ""), done.stderr
        return json.loads(done.stdout) if "--json" in words else done.stdout

    return run


def test_a_cluster(answer):
    planned = answer("plan", "--cluster", "XPU_farm", *QUESTION, "--pp", "8", "--best", "1")
    assert planned["question"]["cluster"] == "xpu-farm"
    assert planned["layouts"][0]["step_time_s"] > 0
    assert answer("simulate", "--machine.cluster", "xpu-farm", "--json")["step_time_s"] > 0
    assert "xpu-farm" in answer("launch", "--machine.cluster", "xpu-farm", "--out", "start")
