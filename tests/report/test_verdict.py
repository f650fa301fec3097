"""The verdict on a step: what it states, and what it leaves to noise."""

import json
from dataclasses import replace
from itertools import cycle

import pytest
from run_files import write_run

from pipeloom.analysis.bubble import BubbleAccount
from pipeloom.report.contents import page_contents, verdict_of
from pipeloom.report.verdict import step_verdict
from pipeloom.runs.run_folder import METRICS, SUMMARY
from pipeloom.runs.run_reading import read_run
from pipeloom.runs.traced_step import BEGINS


def run_of(folder, spread_s=0.001, *, traced_s=0.070, predicted_s=0.045, steps=12):
    """A run of 70 ms a step, of which the third is traced; compute takes 48 ms on each rank, 24 ms predicted."""
    write_run(folder, steps=steps, predicted=predicted_s is not None)
    times = dict(zip(range(1, steps + 1), cycle([0.070 - spread_s, 0.070, 0.070 + spread_s]), strict=False))
    times |= {1: 1.0, 3: traced_s}
    lines = [{"step": step, "loss": 3.0, "step_time_s": time_s} for step, time_s in times.items()]
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = json.loads((folder / SUMMARY).read_text())
    summary |= {"step_time_s": 0.070, "predicted_step_time_s": predicted_s}
    (folder / SUMMARY).write_text(json.dumps(summary))
    return read_run(folder)


def test_a_part_beyond_the_spread_is_a_cause_with_its_seconds_and_a_command(tmp_path):
    run = run_of(tmp_path)
    verdict = verdict_of(run)
    assert verdict.headline == (
        "measured 70.0 ms a step (median), 80% of the steps between 69.0 ms and 71.0 ms; predicted 45.0 ms, 0.64 times "
        "the measured step: slower than predicted"
    )
    part, text = verdict.causes[0]
    assert part == "compute"
    assert text.startswith("48.0 ms, predicted 24.0 ms: ")
    assert f"`pipeloom train {tmp_path / 'config.toml'}`" in text
    assert verdict.note == ""
    assert verdict.lines[-1].startswith("where step 3 went: compute 69%; ")
    assert page_contents(run)["verdict"]["causes"][0] == ("compute", text)


def test_causes_that_cancel_and_processes_that_share_cores_are_noted(tmp_path):
    run = run_of(tmp_path, predicted_s=0.0705)
    assert verdict_of(run).causes
    assert verdict_of(run).note == "in the whole step these differences cancel"
    summary = json.loads((tmp_path / SUMMARY).read_text())
    (tmp_path / SUMMARY).write_text(json.dumps(summary | {"shared_cores": 1}))
    assert verdict_of(read_run(tmp_path)).note == (
        "in the whole step these differences cancel; 2 processes share 1 core, so each part contains times in which a "
        "process waits for a core"
    )


def test_a_link_is_measured_with_as_many_processes_as_the_run_has(tmp_path):
    run, late = run_of(tmp_path), [BubbleAccount(compute_s=0.04, exposed_p2p_s=0.02)] * 2
    found = step_verdict(run, {"measured": late, "predicted": [BubbleAccount(compute_s=0.04)] * 2})
    assert "`pipeloom profile --processes 2`" in dict(found.causes)["exposed communication"]


def test_no_cause_is_stated_below_the_spread_of_the_steps(tmp_path):
    verdict = verdict_of(run_of(tmp_path, spread_s=0.030))
    assert verdict.headline.endswith("within the spread of the steps")
    assert verdict.causes == ()
    assert verdict.note == "no part of step 3 differs from its prediction by more than the spread, 30.0 ms"


def test_steps_of_an_earlier_layout_are_neither_in_the_range_nor_in_the_median(tmp_path):
    slow = [{"step": step, "loss": 3.0, "step_time_s": 9.0} for step in range(1, 21)]
    run = run_of(tmp_path)
    own = [line | {"step": line["step"] + 20} for line in run.metrics]
    own[0] |= {BEGINS: True}
    run = replace(run, metrics=(*slow, *own), summary=None)
    assert verdict_of(run).headline.startswith(
        "measured 70.0 ms a step (median), 80% of the steps between 69.0 ms and 71.0 ms"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"traced_s": 0.2}, "the traced step 3 took 200 ms, outside that range"),
        ({"steps": 5}, "5 steps after the first are needed, found 4"),
        ({"predicted_s": None}, "without a measured and a predicted trace"),
    ],
)
def test_what_hinders_a_comparison_is_printed_instead_of_a_cause(tmp_path, settings, words):
    verdict = verdict_of(run_of(tmp_path, **settings))
    assert verdict.causes == ()
    assert words in verdict.note


def test_a_traced_step_outside_the_range_has_advice_that_the_run_can_follow(tmp_path):
    run = run_of(tmp_path, traced_s=0.2)
    assert "--output.trace-step 4` traces another" in verdict_of(run).note
    run = run_of(tmp_path / "last")
    last = [*run.metrics[:-1], run.metrics[-1] | {"step_time_s": 0.2}]
    run = replace(run, metrics=tuple(last), summary=run.summary | {"traced_step": 12})
    assert "--output.trace-step 7` traces another" in verdict_of(run).note  # a run of 12 steps has no 13th


def test_shares_and_causes_are_means_over_all_replicas(tmp_path):
    one, other = (
        [BubbleAccount(compute_s=0.06, drain_s=0.01)] * 2,
        [BubbleAccount(compute_s=0.02, exposed_p2p_s=0.05)] * 2,
    )
    accounts = {"measured": one, "predicted": [BubbleAccount(compute_s=0.04)] * 2}
    run = run_of(tmp_path)
    assert "exposed communication" not in step_verdict(run, accounts).shares
    found = step_verdict(run, accounts, {"replica 1, tensor rank 0": other})
    assert "exposed communication 36%" in found.shares
    assert dict(found.causes)["exposed communication"].startswith("25.0 ms, predicted 0")
    slow = [BubbleAccount(compute_s=0.04), BubbleAccount(compute_s=0.06)]
    found = step_verdict(run, accounts | {"measured": accounts["predicted"]}, {"replica 1, tensor rank 0": slow})
    assert "compute of rank 1 of replica 1, tensor rank 0, a straggler" in dict(found.causes)


def test_the_verdict_on_unequal_replicas_names_the_one_that_it_is_on(tmp_path):
    run = run_of(tmp_path)
    layout = replace(run.config.layout, dp=2, microbatches=(4, 3), num_microbatches=4)
    config = replace(run.config, layout=layout)
    run = replace(run, config=config, other_traces={"replica 1, tensor rank 0": run.trace})
    assert verdict_of(run).shares.startswith("where step 3 of replica 0 went: ")
    assert "the parts of replica 0" in verdict_of(run).note


def test_a_rank_that_is_slower_than_the_others_is_a_straggler(tmp_path):
    predicted = [BubbleAccount(compute_s=0.04)] * 3
    measured = [BubbleAccount(compute_s=compute_s, drain_s=0.05 - compute_s) for compute_s in (0.04, 0.05, 0.04)]
    found = step_verdict(run_of(tmp_path, traced_s=0.0705), {"measured": measured, "predicted": predicted})
    parts = dict(found.causes)
    assert parts["compute of rank 1, a straggler"].startswith("50.0 ms, predicted 40.0 ms")
    assert not [part for part in parts if "rank 0" in part or "rank 2" in part]
    assert "waiting for other ranks 9%" in found.shares
    assert parts["waiting for other ranks"].startswith("6.67 ms, predicted 0")
