"""``pipeloom validate``: tables, JSON, pictures, refusals, and the project's own accuracy."""

import json
from pathlib import Path

import pytest

from pipeloom.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "measured.csv")
MEASURED = ROOT.parent / "shared" / "data" / "measured.csv"
KEYS = {
    "rows",
    "mean_abs_error",
    "median_abs_error",
    "p90_abs_error",
    "bias",
    "rank_correlation",
    "mean_top1_regret",
    "oom_agreement",
}

needs_data = pytest.mark.skipif(not MEASURED.exists(), reason="the published measurements are not here")


def answer(capsys, *words):
    assert main(["validate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_example_is_predicted_within_ten_percent(capsys):
    found = answer(capsys, EXAMPLE)
    assert set(found["summary"]) >= KEYS
    assert found["summary"]["rows"] == 6
    assert found["summary"]["mean_abs_error"] < 0.1
    assert set(found["sets"]) >= {"megatron-2104.04473-table1", "korthikanti-2205.05198-table5/gpt-22b"}
    assert all(set(part) >= KEYS for part in found["sets"].values())


def test_the_table_for_people_has_a_line_for_each_set_and_model(capsys, tmp_path):
    picture = tmp_path / "accuracy.png"
    assert main(["validate", EXAMPLE, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "megatron-2104.04473-table1/gpt-18b" in out
    assert out.splitlines()[0].split() == [
        *("rows", "timed", "mean", "median", "p90", "bias", "ranks", "regret", "oom", "memory")
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sets_models_cluster_and_program_can_be_chosen(capsys):
    assert answer(capsys, EXAMPLE, "--sets", "korthikanti")["summary"]["rows"] == 2
    assert answer(capsys, EXAMPLE, "--models", "gpt-18b", "gpt-7.5b")["summary"]["rows"] == 2
    faster = answer(capsys, EXAMPLE, "--cluster", "dgx-h100", "--software", "nanotron")
    assert faster["summary"]["bias"] < -0.2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one table"),
        ([EXAMPLE, "--stage-times", EXAMPLE], "expected one table"),
        (["nowhere.csv"], "cannot read the table"),
        ([EXAMPLE, "--sets", "unknown"], "no row of"),
        ([EXAMPLE, "--cluster", "unknown"], "there is no cluster 'unknown'"),
        ([EXAMPLE, "--plot", "picture.txt"], "cannot draw to picture.txt"),
        (["--stage-times", EXAMPLE], "lacks the columns pp"[:9]),
    ],
)
def test_wrong_input_gets_one_clear_message(capsys, words, message):
    assert main(["validate", *words]) == 2
    assert message in capsys.readouterr().err


def test_stage_times_test_the_simulation_alone(capsys, tmp_path):
    table = tmp_path / "stages.csv"
    header = "schedule,pp,num_microbatches,measured_step_time_s,forward_s_by_stage,backward_s_by_stage,note\n"
    table.write_text(header + "1f1b,2,8,27.0108,1 1,2 2,\n", encoding="utf-8")
    found = answer(capsys, "--stage-times", str(table))
    assert found["summary"]["rows"] == 1
    assert found["summary"]["max_abs_error"] < 0.001
    table.write_text(header + "1f1b,2,8,27,1 1 1,2 2,\n1f1b,x,8,27,1,2,\n", encoding="utf-8")
    assert main(["validate", "--stage-times", str(table)]) == 2
    err = capsys.readouterr().err
    assert "line 2: expected seconds of each of 2 stages" in err
    assert "line 3" in err


@needs_data
def test_measured_stage_times_give_the_measured_step_within_one_and_a_half_percent(capsys):
    found = answer(capsys, "--stage-times", str(MEASURED.with_name("stage_times.csv")))
    assert found["summary"]["max_abs_error"] < 0.015


@needs_data
@pytest.mark.parametrize(("name", "error"), [("zero-bubble", 0.04), ("nanotron", 0.08), ("layouts", 0.06)])
def test_published_measurements_are_met(capsys, name, error):
    assert answer(capsys, str(MEASURED), "--sets", name)["summary"]["mean_abs_error"] < error
