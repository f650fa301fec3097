"""A measured run that disagrees with its neighbors is disturbed; predictions do not matter."""

from dataclasses import replace
from itertools import product
from pathlib import Path

from pipeloom.accuracy.compare import Comparison, Outcome
from pipeloom.accuracy.disturbed import disturbed
from pipeloom.accuracy.rows import read_rows

ROW = read_rows(Path(__file__).parents[2] / "examples" / "measured.csv")[0]


def table(factors=()):
    """32 layouts of one model whose time follows from their sizes; ``factors``: number of a row -> factor."""
    rows = []
    for number, (dp, tp, micro, batch) in enumerate(product((2, 4, 8, 16), (1, 2), (1, 2), (64, 128))):
        took_s = batch / dp / tp * (1 + 0.05 * tp) * (1 + 0.1 / micro) * (1 + 0.002 * (number % 3))
        run = replace(ROW.run, dp=dp, tp=tp, pp=1, loops=1, micro_batch=micro, global_batch=batch)
        rows.append(replace(ROW, run=run, schedule="none", step_time_s=took_s * dict(factors).get(number, 1.0)))
    return rows


def test_a_run_that_takes_longer_than_its_neighbors_imply_is_disturbed():
    rows = table([(10, 1.4), (21, 0.8)])
    assert disturbed(rows) == {id(rows[10]), id(rows[21])}
    assert not disturbed(table())
    assert not disturbed(table([(10, 1.08)]))


def test_a_run_without_neighbors_is_not_judged():
    rows = table()
    far = replace(rows[0], run=replace(rows[0].run, tp=8), step_time_s=500.0)
    assert not disturbed([*rows, far])
    assert not disturbed([rows[0], replace(rows[1], step_time_s=500.0)])
    assert not disturbed([replace(row, is_ok=False) for row in table([(3, 2.0)])])


def test_errors_are_given_with_and_without_disturbed_runs():
    rows = table([(10, 2.0)])
    outcomes = tuple(
        Outcome(row, row.step_time_s * (0.5 if n == 10 else 1.0), 1e9, filled=0.5) for n, row in enumerate(rows)
    )
    answer = Comparison(outcomes, {})
    assert answer.num_disturbed == 1
    tree = answer.to_json()
    assert (tree["summary"]["rows"], tree["undisturbed"]["rows"]) == (32, 31)
    assert tree["summary"]["mean_abs_error"] > tree["undisturbed"]["mean_abs_error"] == 0
    assert tree["undisturbed_sets"][ROW.set_name]["rows"] == 31
