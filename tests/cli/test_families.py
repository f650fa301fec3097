"""``pipeloom families``: every family side by side."""

import json

import pytest

from pipeloom.cli import main
from pipeloom.cli.families import COLUMNS, by_rank
from pipeloom.families import FAMILIES


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((4.0, 3.0, 2.0, 1.0), "4…1"),
        ((8.0, 8.0, 8.0), "8x3"),
        ((4.0, 4.0, 3.5, 2.5), "4 4 3.5 2.5"),
        ((5.0, 5.0, 5.0, 4.0, 3.0), "5x3 4 3"),
        ((1.0,), "1"),
        ((2.0, 1.0), "2 1"),
    ],
)
def test_evenly_spaced_values_are_printed_by_their_ends(values, text):
    assert by_rank(values) == text


def test_all_families_that_train_are_there_with_their_numbers(capsys):
    assert main(["families", "--pp", "4", "--num-microbatches", "8", "--json"]) == 0
    found = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    for name, family in FAMILIES.items():
        assert any(label.startswith(name) for label in found) == family.has_backward
    assert found["1f1b"]["memory"] == [4, 3, 2, 1]
    assert found["1f1b"]["bubble_overhead"] == 3 / 8
    assert found["breadth-first"]["gathers"] == 3  # 2 V - 1
    assert found["breadth-first"]["messages"] == 2 * 8 * 7  # there and back, over seven borders


def test_the_table_is_for_people(capsys):
    assert main(["families", "--pp", "2", "--num-microbatches", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 pipeline ranks, 2 micro-batches" in shown
    assert "breadth-first" in shown


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_column_is_dropped_on_a_narrow_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["families", "--pp", "4", "--num-microbatches", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    heads = [line.split() for line in lines if line.startswith("family ")]
    assert [word for words in heads for word in words if word != "family"] == " ".join(
        title for title, _ in COLUMNS.values()
    ).split()
    assert len([line for line in lines if line.startswith("zb-2p ")]) == len(heads)


def test_all_wrong_sizes_are_reported_at_once(capsys):
    assert main(["families", "--pp", "0", "--loops", "0", "--num-microbatches", "0"]) == 2
    error = capsys.readouterr().err
    assert "3 problems" in error
    assert "loops must be at least 1, found 0" in error


@pytest.mark.parametrize("loops", [1, 3])
def test_families_that_take_one_number_of_loops_alone_take_theirs(loops, capsys):
    assert main(["families", "--pp", "2", "--num-microbatches", "2", "--loops", str(loops), "--json"]) == 0
    found = {line["name"]: line["loops"] for line in json.loads(capsys.readouterr().out)}
    assert (found["breadth-first"], found["zb-v"], found["1f1b"]) == (loops, 2, 1)


def test_sizes_that_would_take_minutes_are_refused_with_their_limit(capsys):
    assert main(["families", "--pp", "3000", "--loops", "400"]) == 2
    error = capsys.readouterr().err
    assert "the product of --pp, --num-microbatches and --loops must be at most 100,000, found 9,600,000" in error
    assert "`pipeloom schedule FAMILY`" in error


def test_the_bubble_overhead_has_its_name(capsys):
    assert main(["families", "--pp", "2", "--num-microbatches", "2"]) == 0
    shown = capsys.readouterr().out
    assert " overhead " in shown.splitlines()[1]
    assert "bubble overhead, which is idle time / ideal time" in " ".join(shown.split())
