"""What thinks about schedules starts without torch and without matplotlib."""

import json
import os
import subprocess
import sys

import pytest

LIGHT = [
    "pipeloom.schedule",
    "pipeloom.families",
    "pipeloom.simulation",
    "pipeloom.config",
    "pipeloom.config.file",
    "pipeloom.checkpoint.checkpoint_folder",
    "pipeloom.analysis.summary",
    "pipeloom.analysis.bubble",
    "pipeloom.runs.run_folder",
    "pipeloom.report",
    "pipeloom.plotting.timelines",
    "pipeloom.cli",
    "pipeloom.catalog",
    "pipeloom.predict.describe",
    "pipeloom.predict.step",
    "pipeloom.analysis.memory",
    "pipeloom.accuracy.compare",
    "pipeloom.accuracy.fit",
    "pipeloom.cli.schedule",
    "pipeloom.cli.simulate",
    "pipeloom.cli.simulate_text",
    "pipeloom.cli.validate",
    "pipeloom.cli.report",
    "pipeloom.cli.export",
    "pipeloom.export",
    "pipeloom.cli.launch",
    "pipeloom.catalog.cluster_files",
    "pipeloom.cli.profile",
]
HEAVY = {"torch", "matplotlib"}


def heavy_after_import(modules, *folders):
    """Which heavy packages a fresh interpreter has loaded after importing ``modules``."""
    script = f"import sys, json, {', '.join(modules)}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(*folders),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return HEAVY.intersection(json.loads(done.stdout))


def environment(*folders):
    """This process's environment, whose search path begins with the folders."""
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_all_light_modules_together_load_nothing_heavy():
    assert heavy_after_import(LIGHT) == set()


@pytest.mark.parametrize("heavy", sorted(HEAVY))
def test_the_check_sees_a_module_that_loads_something_heavy(tmp_path, heavy):
    (tmp_path / "offender.py").write_text("import innocent\n", encoding="utf-8")
    (tmp_path / "innocent.py").write_text(f"import {heavy}\n", encoding="utf-8")
    (tmp_path / f"{heavy}.py").write_text("# stands for the real package\n", encoding="utf-8")
    assert heavy_after_import(["offender"], tmp_path) == {heavy}


def test_pipeloom_schedule_works_where_torch_cannot_be_imported(tmp_path):
    for heavy in HEAVY:
        (tmp_path / f"{heavy}.py").write_text("raise ImportError('blocked by the test')\n", encoding="utf-8")
    blocked = environment(tmp_path)
    probe = subprocess.run(
        [sys.executable, "-c", "import torch"], env=blocked, capture_output=True, text=True, check=False
    )
    assert "blocked by the test" in probe.stderr
    command = [
        sys.executable,
        "-m",
        "pipeloom",
        "schedule",
        "breadth-first",
        "--loops",
        "2",
        "--communication",
        "--json",
    ]
    done = subprocess.run(command, env=blocked, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["level"] == "communication"
