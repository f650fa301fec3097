"""Installed families and strategies that raise or break a rule: left out with one line, and refused where named."""

import json
import os
import sys

import pytest
from commands import THINKS, run_command
from plugins import write_plugin
from thinned import thinned

EARLY = """
from pipeloom import Rows, backward, family, forward

@family("early", is_looped=False)
def early(request):
    "Backwards first."
    rows = [[step(rank, m) for m in range(request.num_microbatches) for step in (backward, forward)]
            for rank in range(request.placement.num_ranks)]
    return Rows(rows, max_stage_inputs=[1] * len(rows))
"""
RAISER = """
from pipeloom.planner.strategies import STRATEGIES, Strategy

def {where}(_):
    return 1 / 0

functions = {{"applies": lambda state: (), "estimate": lambda leaf: 1.0, "build": lambda leaf: None,
             "is_in": lambda step: False}} | {{"{where}": {where}}}
STRATEGIES.add("raiser", Strategy(summary="raise", without="nothing", programs=("pipeloom",), **functions))
"""
COPY = """
from pipeloom.families import FAMILIES, family

BASE = FAMILIES["1f1b"]

@family("copy", is_looped=False)
def copy(request):
    "1F1B under another name."
    return BASE.rule(request)
"""
NAMES_ONE = ("pipeloom.cli.schedule", "pipeloom.cli.simulate")
"""Commands that list no names; to validate, every family is listed."""
GROUPS = ("families", "models", "optimizers", "strategies", "clusters")
QUESTION = "--model gpt-6.6b --cluster dgx-a100 --devices 8 --global-batch 16 --seq 512 --pp 4 --no-explain --json"
PLAN = ("plan", *QUESTION.split(), "--shards", "none", "optimizer", "--recompute", "none")
LLAMA = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 64, "vocab_size": 257, "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
LEFT_OUT = (
    "the schedule 'early' of early 1.0 is left out: schedule breaks rule 'forward-before-backward' at rank 0, slot 0"
)


@pytest.fixture
def run(tmp_path):
    def run(*words, imported=THINKS):
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done, _ = run_command(*words, folder=tmp_path, imported=imported, PYTHONPATH=path)
        assert "Traceback" not in done.stderr
        return done

    return run


def lines(done, words):
    return [line for line in done.stderr.splitlines() if words in line]


def test_a_family_that_breaks_a_rule_is_left_out_of_tables_and_plans(run, tmp_path):
    file = write_plugin(tmp_path, "early", EARLY, {"pipeloom.families": "early"})
    done = run("families", "--json")
    names = {row["name"] for row in json.loads(done.stdout)}
    assert {"1f1b", "zb-h1"} <= names
    assert "early" not in names
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"pipeloom families: {LEFT_OUT}")
    assert line.endswith(f"the rows are those of the family 'early' ({file}, line 4)")
    # The best layout of each family is compared, so that one of this family is simulated.
    done = run(*(word for word in PLAN if word != "--no-explain"), "--loops", "1", "--tp", "1")
    assert done.returncode == 0
    assert json.loads(done.stdout)["layouts"]
    assert len(lines(done, LEFT_OUT)) == 1


def test_a_wrong_family_that_is_named_is_refused(run, tmp_path):
    write_plugin(tmp_path, "early", EARLY, {"pipeloom.families": "early"})
    done = run(*PLAN, "--families", "early", "1f1b")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the rows are those of the family 'early'" in done.stderr


def test_a_family_whose_name_is_taken_is_left_out_and_another_one_finds_those_of_the_package(run, tmp_path):
    write_plugin(tmp_path, "early", EARLY.replace("early", "gpipe"), {"pipeloom.families": "gpipe"})
    write_plugin(tmp_path, "copy_of_it", COPY, {"pipeloom.families": "copy"})
    done = run("schedule", "1f1b", "--pp", "2", "--format", "text", imported=NAMES_ONE)
    assert (done.returncode, done.stderr) == (0, "")
    again = run("schedule", "copy", "--pp", "2", "--format", "text", imported=NAMES_ONE)
    taken = "pipeloom schedule: the schedule 'gpipe' of early 1.0 is left out: there is a schedule 'gpipe' already"
    assert (again.returncode, again.stderr.splitlines()) == (0, [taken])
    assert again.stdout.splitlines()[1:] == done.stdout.splitlines()[1:]


def test_names_of_the_package_import_no_plug_in(run, tmp_path):
    for group in GROUPS:
        write_plugin(tmp_path, f"{group}_of_others", "raise AssertionError\n", {f"pipeloom.{group}": "new"})
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    small = ("--data.seq-len", "8", "--layout.pp", "2", "--layout.loops", "1", "--optimizer.name", "sgd")
    for words in (
        ("schedule", "1f1b", "--pp", "2"),
        ("simulate", "--model.file", "config.json", "--machine.cluster", "dgx-a100", *small),
        ("simulate", "--model.file", "gpt-6.6b", "--machine.cluster", "laptop"),
    ):
        done = run(*words, imported=NAMES_ONE)
        assert (done.stderr, bool(done.stdout)) == ("", True)
    assert len(lines(run("schedule", "new", imported=NAMES_ONE), "is left out: AssertionError")) == 1


@pytest.mark.parametrize("where", thinned(["applies", "is_in"], 2))
def test_a_strategy_that_raises_is_left_out_and_refused_where_it_is_named(run, tmp_path, where):
    file = write_plugin(tmp_path, "raiser", RAISER.format(where=where), {"pipeloom.strategies": "raiser"})
    wrong = f"the strategy 'raiser' raised ZeroDivisionError: division by zero, in {file}, line 5: return 1 / 0"
    done = run(*PLAN, "--families", "1f1b")
    assert done.returncode == 0
    assert json.loads(done.stdout)["layouts"]
    assert len(lines(done, f"the strategy 'raiser' of raiser 1.0 is left out: {wrong}")) == 1
    done = run(*PLAN, "--families", "1f1b", "--strategies", "none", "raiser")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(lines(done, f"pipeloom plan: {wrong}")) == 1
