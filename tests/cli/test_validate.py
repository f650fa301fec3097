"""``pipeloom validate``: tables, JSON, pictures, refusals, and the project's own accuracy."""

import csv
import json
import tomllib
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
        *("rows", "timed", "mean", "median", "p90", "bias", "ranks", "regret", "of", "3", "oom", "memory")
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
        ([EXAMPLE, "--stage-times", EXAMPLE], "expected one table"),
        ([EXAMPLE, "--models", "gpt-18b", "nope", "--sets", "megatron", "a", "b"], "measured.csv has --sets a b"),
        ([EXAMPLE, "--models", "gpt-18b", "nope", "--sets", "megatron", "a", "b"], "measured.csv has --models nope"),
        ([EXAMPLE, "--attentions", "flash2"], "measured.csv has --attentions flash2"),
        ([EXAMPLE, "--sets", "kor", "--models", "gpt-18b"], "check --sets, --models and --attentions"),
        ([EXAMPLE, "--fit", "nowhere/program.toml", "--parameters", "matmul"], "cannot write nowhere/program.toml"),
        ([EXAMPLE, "--fit", "program.toml", "--parameters", "luck"], "cannot fit luck; known: matmul"),
        ([EXAMPLE, "--cluster", "unknown"], "there is no cluster 'unknown'"),
        ([EXAMPLE, "--plot", "picture.txt"], "cannot draw to picture.txt"),
        (["--stage-times", EXAMPLE], "lacks the columns pp"[:9]),
    ],
)
def test_wrong_input_gets_one_clear_message(capsys, words, message):
    assert main(["validate", *words]) == 2
    assert message in capsys.readouterr().err


def with_changed(tmp_path, **cells):
    """The example with cells of every row changed."""
    with Path(EXAMPLE).open(encoding="utf-8", newline="") as file:
        rows = [row | cells for row in csv.DictReader(file)]
    table = tmp_path / "table.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(table)


def test_a_table_of_unknown_sets_and_models_is_predicted_by_its_columns(capsys, tmp_path):
    known = answer(capsys, EXAMPLE)["summary"]
    found = answer(capsys, with_changed(tmp_path, set="my runs", model="mine"))
    # The general program takes the place of the one that was fitted to these rows.
    assert found["summary"]["rows"] == known["rows"]
    assert known["mean_abs_error"] < found["summary"]["mean_abs_error"] < 0.25
    assert set(found["sets"]) == {"my runs", "my runs/mine"}
    assert found["skipped"] == {}


def test_a_table_of_an_unknown_device_says_so_and_takes_a_cluster(capsys, tmp_path):
    table = with_changed(tmp_path, device="abacus")
    assert main(["validate", table]) == 2
    assert "no cluster of the catalog has the device 'abacus': give --cluster" in capsys.readouterr().err
    assert answer(capsys, table, "--cluster", "dgx-a100")["summary"]["rows"] == 6


def test_calibrate_on_some_models_and_predict_the_others_with_the_file(capsys, tmp_path):
    pytest.importorskip("scipy")
    program = tmp_path / "program.toml"
    words = [EXAMPLE, "--models", "gpt-1.7b", "gpt-3.6b", "gpt-7.5b"]
    assert main(["validate", *words, "--fit", str(program), "--parameters", "matmul", "memory", "tensor_bus"]) == 0
    out = capsys.readouterr().out
    assert "megatron-2021 on dgx-a100: 3 rows, mean absolute error" in out
    provenance = tomllib.loads(program.read_text(encoding="utf-8"))["provenance"]
    assert provenance["models"] == ["gpt-1.7b", "gpt-3.6b", "gpt-7.5b"]
    assert provenance["mean_abs_error_after"] < provenance["mean_abs_error_before"]
    others = answer(capsys, EXAMPLE, "--models", "gpt-18b", "gpt-22b", "--software", str(program))
    assert others["summary"]["rows"] == 3
    assert others["summary"]["mean_abs_error"] < 0.06


def test_rows_of_several_programs_are_not_fitted_as_one(capsys, tmp_path):
    table = with_changed(tmp_path, set="layouts-mine")
    text = Path(table).read_text(encoding="utf-8")
    Path(table).write_text(text.replace("fused-softmax", "flash2", 1), encoding="utf-8")
    assert main(["validate", table, "--fit", str(tmp_path / "program.toml")]) == 2
    assert "several programs (scaling-2023b, scaling-2023a)" in capsys.readouterr().err


def test_a_fit_is_printed_as_json(capsys, tmp_path):
    program = tmp_path / "program.toml"
    found = answer(capsys, EXAMPLE, "--models", "gpt-18b", "--fit", str(program), "--parameters", "matmul")
    assert set(found) == {
        *("program", "cluster", "rows", "error_before", "error_after", "file", "efficiencies", "skipped")
    }
    assert found["error_after"] < found["error_before"]
    fitted = tomllib.loads(program.read_text(encoding="utf-8"))["efficiency"]["matmul"]
    assert found["efficiencies"]["matmul"]["after"] == pytest.approx(fitted, rel=1e-3)
    assert found["efficiencies"]["matmul"]["is_at_bound"] is False


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


def test_groups_are_listed_with_the_layout_that_was_ranked_first(capsys):
    assert main(["validate", EXAMPLE, "--groups"]) == 0
    out = capsys.readouterr().out
    assert "gpt-22b, 2048 tokens, 8 devices, batch 4, fused-softmax, fused norm, fp16: 2 layouts, regret 0.0%" in out
    assert "first    1.100 s: tp 8 pp 1 dp 1" in out
    assert "(1 group)" in out


@needs_data
@pytest.mark.parametrize(
    ("sets", "most_devices", "num_groups", "regret"), [("layouts", 128, 11, 0.01), ("nanotron", 16, 2, 0.03)]
)
def test_the_layout_ranked_first_is_nearly_the_fastest_measured(capsys, sets, most_devices, num_groups, regret):
    groups = answer(capsys, str(MEASURED), "--sets", sets)["groups"]
    regrets = [group["regret"] for group in groups if group["devices"] <= most_devices]
    assert len(regrets) == num_groups
    assert sum(regrets) / len(regrets) <= regret


@needs_data
def test_measured_stage_times_give_the_measured_step_within_one_and_a_half_percent(capsys):
    found = answer(capsys, "--stage-times", str(MEASURED.with_name("stage_times.csv")))
    assert found["summary"]["max_abs_error"] < 0.015


@needs_data
@pytest.mark.parametrize(("name", "error"), [("zero-bubble", 0.03), ("nanotron", 0.08), ("layouts", 0.04)])
def test_published_measurements_are_met(capsys, name, error):
    assert answer(capsys, str(MEASURED), "--sets", name)["summary"]["mean_abs_error"] < error
