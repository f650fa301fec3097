"""The error bars of the catalog are those of the held-out predictions."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from held_out import Held, Split, errors_of, general, main, pooled_cells, programs, write
from pipeloom.accuracy.compare import Outcome, measure
from pipeloom.accuracy.rows import read_rows
from pipeloom.catalog.accuracy import load_accuracy

ROWS = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")


def outcomes(*ratios):
    """Predictions of as many rows, off by these ratios."""
    return [Outcome(replace(ROWS[0], step_time_s=10.0), 10 * ratio, 1e9, filled=0.5) for ratio in ratios]


def test_without_weights_the_errors_are_those_of_validate():
    some = outcomes(1.1, 0.8, 1.0, 1.3)
    found, expected = errors_of([some], [0.0, 0.1, 0.5]), measure(some)
    assert found["mean_abs_error"] == pytest.approx(expected.mean_abs_error)
    assert found["bias"] == pytest.approx(expected.bias)
    assert found["p90_abs_error"] == pytest.approx(0.3)
    assert (found["rows"], found["groups"], found["median_regret"], found["worst_regret"]) == (4, 3, 0.1, 0.5)
    assert "median_regret" not in errors_of([some], [])


def test_weights_make_a_program_with_many_rows_count_as_one_with_few():
    found = errors_of([outcomes(1.5), outcomes(*[1.1] * 9)], [], is_weighted=True)
    assert found["mean_abs_error"] == pytest.approx(0.3)
    assert found["p90_abs_error"] == pytest.approx(0.5)


def pair(ratio, other):
    """Layouts of one group that take 10 and 11 s, with predictions that are off by these ratios."""
    times = ((10.0, ratio), (11.0, other))
    return [Outcome(replace(ROWS[0], step_time_s=took_s), took_s * off, 1e9, filled=0.5) for took_s, off in times]


def test_an_error_that_all_layouts_share_does_not_count_between_two():
    found = errors_of([pair(0.5, 0.5), pair(0.5, 0.6), pair(0.5, 0.4)], [])
    assert found["mean_abs_error"] > 0.4
    # 0, 0.2 and 10 / 8.8 * 1.1 - 1 = 0.25: the third is predicted in the wrong order, with a difference of 13.6 %
    assert found["pair_error"] == pytest.approx(0.2)
    assert (found["pairs"], found["order_below"], found["order_above"]) == (3, 0.5, 1.0)
    assert "pair_error" not in errors_of([pair(0.5, 1.0)], [])  # one is predicted to take more than 1.5 times the other


def test_all_splits_of_a_program_are_one_entry_and_a_row_counts_once():
    one, other = outcomes(1.1, 1.1), outcomes(0.9)
    split = Split("megatron-2021", "a", "b", bool, bool)
    answers = [Held(split, "a100-sxm-80gb", 3, (), tuple(part)) for part in (one, [*other, one[0]])]
    (entry,) = programs(answers)
    assert (entry["program"], entry["predictions"], entry["rows"], entry["splits"]) == (
        "megatron-2021", 4, 3, ["a -> b", "a -> b"],
    )  # fmt: skip
    assert entry["mean_abs_error"] == pytest.approx(0.1)


def test_each_kind_of_split_counts_a_row_once_by_set_and_by_table():
    halves = outcomes(1.1, 1.1), outcomes(0.8)
    names = [("megatron-2021", "a"), ("megatron-2021", "b"), ("megatron-2021", "more"), ("general", "megatron-2021")]
    parts = [*halves, outcomes(1.3), outcomes(0.6)]
    answers = [
        Held(Split(program, "others", held_out, bool, bool), "a100-sxm-80gb", 3, (), tuple(part))
        for (program, held_out), part in zip(names, parts, strict=True)
    ]
    device = replace(answers[-1], split=Split("general", "all others", "a100-sxm-80gb", bool, bool))
    rows = [outcome.row for part in parts for outcome in part]
    lines = list(pooled_cells([*answers, device], {"some.csv": rows}))
    each = ["13.3%", "3", "30.0%", "1", "40.0%", "1"]
    assert lines == [[name, *each] for name in (f"set {rows[0].set_name}", "some.csv", "some.csv, that ran")]


def test_what_is_written_is_what_the_catalog_reads(tmp_path, monkeypatch):
    (entry,) = general(ROWS)
    assert (entry["device"], entry["rows"]) == ("a100-sxm-80gb", 6)
    assert set(entry["mean_abs_error_of"]) == {"megatron-2021"}
    split = Split("megatron-2021", "a", "b", bool, bool)
    file = tmp_path / "accuracy.toml"
    write(Path("some.csv"), ROWS, [Held(split, "a100-sxm-80gb", 3, (), tuple(outcomes(1.1, 0.8)))], file=file)
    monkeypatch.setattr("pipeloom.catalog.accuracy.files", lambda package: tmp_path)
    load_accuracy.cache_clear()
    known = load_accuracy()
    load_accuracy.cache_clear()
    assert known.table == "some.csv"
    assert known.by_program["megatron-2021", "a100-sxm-80gb"].mean_abs_error == pytest.approx(0.15)
    assert known.by_device["a100-sxm-80gb"].rows == 6
    assert tomllib.loads(file.read_text(encoding="utf-8"))["provenance"]["by"].endswith("some.csv --write")


def test_disturbed_runs_are_in_no_error_bar():
    good, odd = outcomes(1.1, 2.0)
    split = Split("megatron-2021", "a", "b", bool, bool)
    (entry,) = programs([Held(split, "a100-sxm-80gb", 3, (), (good, odd))], {id(odd.row)})
    assert (entry["rows"], entry["mean_abs_error"]) == (1, pytest.approx(0.1))
    assert general(ROWS, (), {id(ROWS[0])})[0]["rows"] == len(ROWS) - 1


def test_part_of_the_table_is_not_written():
    with pytest.raises(SystemExit, match="leave out nanotron"):
        main(["some.csv", "nanotron", "--write"])


def test_tables_that_are_missing_are_named(tmp_path):
    missing = [str(tmp_path / name) for name in ("one.csv", "other.csv")]
    with pytest.raises(SystemExit, match="none at .*one.csv, .*other.csv"):
        main(missing)
