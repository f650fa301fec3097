"""What stands in the page: the numbers, and nothing that could load or run."""

import json
import os
import re
import shlex
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_files import write_checkpoint
from run_files import without_its_end, write_run

from pipeloom.analysis.bubble import account_bubble
from pipeloom.config import OptimizerConfig
from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.report import format_page, write_report
from pipeloom.report.contents import CAUSES, page_contents
from pipeloom.runs.run_folder import CONFIG, METRICS, PREDICTED_TRACE, SAMPLE, SCHEDULE, SUMMARY, TRACE, other_trace
from pipeloom.runs.run_reading import read_run
from pipeloom.runs.sample import Sample, format_sample
from pipeloom.simulation import simulate
from pipeloom.system.folder_lock import lock_folder
from pipeloom.trace import to_chrome
from pipeloom.workload.layout import Coordinates


def contents_of(page):
    (text,) = re.findall(r'<script type="application/json" id="contents">(.*?)</script>', page, flags=re.S)
    return json.loads(text)


def test_the_page_holds_its_contents_and_needs_nothing_else(tmp_path):
    run = read_run(write_run(tmp_path))
    page = format_page(run)
    assert contents_of(page) == json.loads(json.dumps(page_contents(run)))
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:link|img|iframe)|\bsrc=|@import|url\(|fetch\(|import\(", page)
    assert page.count("<script") == page.count("</script>") == 2
    assert len(page) < 100_000


def test_without_javascript_the_page_has_its_verdict_and_figures(tmp_path):
    page = format_page(read_run(write_run(tmp_path)))
    (text,) = re.findall(r"<noscript>(.*?)</noscript>", page, flags=re.S)
    assert "It needs JavaScript" in text
    assert "<h1>breadth-first: 2 ranks x 2 loops, 4 micro-batches</h1>" in text
    assert "<p>measured 120 ms a step (median)" in text
    assert "<tr><th>validation loss</th><td>2.2500</td></tr>" in text
    assert "<tr><th>step time, predicted</th><td>90.0 ms</td></tr>" in text
    assert text.count("<tr>") == text.count("</tr>") == text.count("<td>")


def test_measured_numbers_are_next_to_predicted_ones(tmp_path):
    run = read_run(write_run(tmp_path))
    contents = page_contents(run)
    assert contents["title"] == "breadth-first: 2 ranks x 2 loops, 4 micro-batches"
    step, pipeline, bubble = contents["headline"]
    assert (step["measured"], step["predicted"], step["ratio"]) == ("120.0 ms", "90.0 ms", "0.75")
    assert (pipeline["measured"], pipeline["predicted"], pipeline["ratio"]) == ("56.0 ms", "28.0 ms", "0.50")
    assert bubble["measured"] == bubble["predicted"]
    assert bubble["ratio"] == "1.00"
    names = ["step time", "pipeline time", "bubble fraction"]
    assert [card["ratio_of"] for card in (step, pipeline, bubble)] == [f"predicted / measured {name}" for name in names]
    facts = dict(contents["facts"])
    assert facts["parameters"] == "3,640,896"
    assert facts["tokens seen"] == f"{5 * 8 * 128:,}"
    assert facts["validation loss"] == "2.2500"


def test_the_timeline_has_a_box_for_every_span(tmp_path):
    run = read_run(write_run(tmp_path))
    timeline = page_contents(run)["timeline"]
    for panel, trace in zip(timeline["panels"], (run.trace, run.predicted), strict=True):
        found = [
            (rank["label"], lane["label"], f"{stage}{timeline['kinds'][kind][0]}{microbatch}", start, duration)
            for rank in panel["ranks"]
            for lane in rank["lanes"]
            for kind, stage, microbatch, _, start, duration, _ in lane["boxes"]
        ]
        expected = [
            (f"rank {s.rank}", str(s.lane), str(s.action), round(s.start_s * 1e9), round((s.end_s - s.start_s) * 1e9))
            for s in trace.spans
        ]
        assert sorted(found) == sorted(expected)
    assert timeline["boxes"] == 2 * 2 * 4 * 4
    assert timeline["end"] == round(run.trace.end_s * 1e9)
    assert [(name, is_compute) for name, _, is_compute in timeline["legend"]] == [
        ("forward", True),
        ("backward", True),
        ("message", False),
    ]
    assert [name for name, *_ in timeline["tones"]] == ["stages 0 to 1", "stages 2 to 3"]


def test_the_bars_and_the_table_of_the_account_are_the_accounts(tmp_path):
    run = read_run(write_run(tmp_path))
    bubble = page_contents(run)["bubble"]
    names = [cause["name"] for cause in bubble["causes"]]
    assert names == ["start-up", "compute", "imbalance", "exposed p2p", "drain"]
    for rank, account in enumerate(account_bubble(run.schedule, run.trace)):
        row = bubble["rows"][rank]
        assert row[0] == f"rank {rank}"
        seconds = [getattr(account, cause) for cause, (name, *_) in CAUSES.items() if name in names]
        assert row[1::2] == [f"{value * 1e3:,.1f}" for value in seconds]
        measured, predicted = bubble["groups"][rank]["bars"]
        assert sum(share for share, _ in measured) == pytest.approx(1, abs=1e-4)
        assert sum(share for share, _ in predicted) == pytest.approx(0.5, abs=1e-4)
    bars = [group["bars"] for group in bubble["groups"]]
    for trace, bar in enumerate(bubble["total"]["bars"]):  # on the scale of the ranks'
        for cause, (share, _) in enumerate(bar):
            assert share == pytest.approx(np.mean([bars[rank][trace][cause][0] for rank in range(2)]), abs=1e-4)
    assert bubble["total"]["label"] == "mean of ranks"
    assert [row[0] for row in bubble["rows"][2:]] == ["all ranks", "share of all ranks"]


def test_communication_has_a_row_for_each_lane_and_a_total(tmp_path):
    table = page_contents(read_run(write_run(tmp_path)))["communication"]
    assert [row[:3] for row in table["rows"]] == [
        ["rank 0", "recv from 1", "12"],
        ["rank 1", "recv from 0", "12"],
    ]
    assert table["total"][2] == "24"
    assert table["total"][3] == "24.0"  # each of 1 ms
    assert all(len(row) == 3 + 2 * 4 for row in [*table["rows"], table["total"]])


def test_several_pipelines_are_shown_side_by_side(tmp_path):
    folder = write_run(tmp_path)
    assert page_contents(read_run(folder))["pipelines"] == []
    slower = simulate(read_run(folder).schedule, Costs(0.004, 0.008, 0.001))
    (folder / other_trace(Coordinates(0, 1, 0))).write_text(to_chrome(slower, "measured"))
    first, second = page_contents(read_run(folder))["pipelines"]
    assert [first[0], second[0]] == ["replica 0, tensor rank 0", "replica 1, tensor rank 0"]
    assert (first[2], second[2]) == ("96.0", "192.0")  # 2 stages x 2 ranks x 4 micro-batches, forward and backward
    assert (first[3], second[3]) == ("24.0", "24.0")
    assert first[6:] == ["0.0"] * 3


def test_stage_inputs_and_loss_are_curves(tmp_path):
    contents = page_contents(read_run(write_run(tmp_path)))
    inputs, memory = contents["over_time"]
    assert inputs["labels"] == ["measured", "predicted"]
    assert inputs["most"] == 8
    assert [rank["peak"] for rank in inputs["ranks"]] == ["peak 8", "peak 8"]
    assert memory["title"] == "Memory, MB"
    assert memory["labels"] == ["cost model, at measured times", "cost model, at predicted times"]
    assert all(rank["peak"].endswith("MB by the cost model, 312 MB measured") for rank in memory["ranks"])
    assert "Measured: the peak since the start of the run, resident memory of the process" in memory["note"]
    for rank in memory["ranks"]:
        for curve in rank["curves"]:
            held = [size for _, size in curve]
            assert held[0] <= max(held) <= memory["most"]
            assert min(held) > 0
    loss, rate, norm, tokens, times = contents["curves"]
    assert rate["points"] == [[step, pytest.approx(1e-3 * step)] for step in range(1, 6)]
    assert norm["points"] == [[step, pytest.approx(1.5 / step, rel=1e-5)] for step in range(1, 6)]
    assert [value for _, value in tokens["points"]] == [
        pytest.approx(1024 / (0.1 + step / 100), rel=1e-5) for step in range(1, 6)
    ]
    assert (loss["title"], tokens["title"], tokens["levels"][0]["name"]) == (
        "Loss",
        "Tokens per second",
        "median 12,346",
    )
    assert loss["points"] == [[step, 3 - step / 8] for step in range(1, 6)]
    assert [level["name"] for level in loss["levels"]] == ["unigram model 3.0957"]
    assert loss["marks"] == [{"name": "validation 2.2500", "at": [5, 2.25]}]
    assert [level["value"] for level in times["levels"]] == [120, 90]


def test_the_configuration_is_complete(tmp_path):
    run = read_run(write_run(tmp_path))
    blocks = page_contents(run)["config"]
    assert tomllib.loads("\n\n".join(blocks)) == {
        name: settings for name, settings in tomllib.loads(run.config_text).items() if settings
    }
    assert all("\n" in block for block in blocks)


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "depth-first", "hybrid", "breadth-first"])
def test_every_family_has_a_page(tmp_path, family):
    loops = 1 if family in ("gpipe", "1f1b") else 2
    run = read_run(write_run(tmp_path, family=family, loops=loops))
    assert contents_of(format_page(run))["timeline"]["boxes"] == 2 * 2 * loops * 4 * 2


def test_a_bare_run_has_a_page(tmp_path):
    contents = page_contents(read_run(bare(tmp_path)))
    assert contents["unfinished"] is None
    assert [row["predicted"] for row in contents["headline"]] == [None] * 3
    assert [row["ratio"] for row in contents["headline"]] == [None] * 3
    assert contents["bubble"]["traces"] == ["measured"]
    assert contents["communication"]["rows"] == []
    assert contents["sample"] is None
    assert "validation loss" not in dict(contents["facts"])


def bare(folder):
    return write_run(folder, pp=1, predicted=False, validation_loss=None, sample=None, steps=1)


def test_a_run_without_an_end_says_so_on_top_and_shows_what_there_is(tmp_path):
    run = without_its_end(write_run(tmp_path), TRACE, steps=2)
    write_checkpoint(run, 2)
    contents = page_contents(read_run(run))
    top = contents["unfinished"]
    assert top["headline"] == "This run has not finished"
    assert top["state"] == "It is not running any more. 2 of 5 steps are done."
    assert dict(top["missing"]) == {
        "trace.json: measured timeline and bubble": "one of the steps 3 to 5 is traced",
        "summary.json: validation loss, unigram loss, predicted step time": "it is written at the end",
        "sample.txt": "it is written at the end",
    }
    assert top["checkpoints"] == ["step-000002"]
    assert top["resume"] == f"pipeloom train {run}/config.toml --checkpoint.resume {run} --output.folder {run}"
    assert dict(contents["facts"]) == {
        "steps": "2 of 5",
        "tokens seen": f"{2 * 8 * 128:,}",
        "tokens/s": f"{1024 / 0.12:,.0f}",
        "training loss": "2.7500",
    }
    config = (run / CONFIG).read_text(encoding="utf-8")
    (run / CONFIG).write_text(config.replace("steps = 5\n", ""), encoding="utf-8")
    assert dict(page_contents(read_run(run))["facts"])["steps"] == "2 of 200"  # the default
    step, pipeline, _ = contents["headline"]
    assert (step["measured"], step["predicted"]) == ("120.0 ms", None)
    assert (pipeline["measured"], pipeline["predicted"], pipeline["ratio"]) == (None, "28.0 ms", None)
    assert contents["bubble"]["traces"] == ["predicted"]
    assert [len(curve["points"]) for curve in contents["curves"]] == [2] * 5


def test_a_run_whose_folder_is_locked_still_runs(tmp_path, monkeypatch):
    run = without_its_end(write_run(tmp_path))
    lock = lock_folder(run)
    assert page_contents(read_run(run))["unfinished"]["state"] == "It is still running. 5 of 5 steps are done."
    monkeypatch.setattr("pipeloom.report.unfinished.is_locked", lambda _: None)
    assert page_contents(read_run(run))["unfinished"]["state"].startswith("It may still be running.")
    lock.release()


@pytest.mark.parametrize("names", [[SCHEDULE, TRACE, PREDICTED_TRACE, METRICS], [TRACE, PREDICTED_TRACE], [SCHEDULE]])
def test_sections_without_their_files_are_left_out(tmp_path, names):
    page = format_page(read_run(without_its_end(write_run(tmp_path), *names)))
    contents = contents_of(page)
    assert contents["timeline"] is contents["bubble"] is contents["communication"] is None
    assert {what.split(":")[0] for what, _ in contents["unfinished"]["missing"]} == {*names, SUMMARY, SAMPLE}
    assert (contents["curves"] == []) == (METRICS in names)


def test_a_finished_run_that_has_lost_a_file_says_which(tmp_path):
    folder = write_run(tmp_path)
    assert page_contents(read_run(folder))["unfinished"] is None
    (folder / TRACE).unlink()
    top = page_contents(read_run(folder))["unfinished"]
    assert (top["headline"], top["state"]) == ("Files of this run are missing", "")
    assert top["missing"] == [["trace.json: measured timeline and bubble", "step 3 is traced; the file is missing"]]


def test_a_run_that_diverged_has_a_page(tmp_path):
    page = format_page(read_run(write_run(tmp_path, loss=float("nan"), validation_loss=float("inf"))))
    contents = contents_of(page)
    assert [value for _, value in contents["curves"][0]["points"]] == [None] * 5
    assert dict(contents["facts"])["validation loss"] == dict(contents["facts"])["training loss"] == "not finite"


def test_what_a_run_wrote_cannot_become_markup(tmp_path):
    folder = tmp_path / "<b>&run"
    text = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)>"
    page = format_page(read_run(write_run(folder, sample=text)))
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "<!--" not in page
    assert contents_of(page)["sample"] == {"prompt": "", "continuation": text}
    assert contents_of(page)["folder"] == "<b>&run"


@pytest.mark.parametrize(
    "text", ["\u2028\u2029\x00\x1b[31m\u202e", "]]></script ><svg onload=alert(1)>", "\\u003c/script>"]
)
def test_foreign_text_of_any_kind_comes_back_from_the_page_as_it_is(tmp_path, text):
    folder = without_its_end(write_run(tmp_path / os.fsdecode(b"run\xff$(x)")))
    write_checkpoint(folder, 2)
    (folder / SAMPLE).write_text(format_sample(Sample(text, text)), encoding="utf-8")
    page = write_report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    contents = contents_of(page)
    assert contents["sample"] == {"prompt": text, "continuation": text}
    assert contents["folder"] == os.fsdecode(b"run\xff$(x)")
    assert shlex.split(contents["unfinished"]["resume"])[-1] == str(folder)
    assert page.count("<script") == 2


def test_a_trace_of_another_run_is_refused(tmp_path):
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other", num_microbatches=6)
    (run / TRACE).write_text((other / TRACE).read_text())
    with pytest.raises(UserError, match="the trace does not belong to this schedule"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_page_that_cannot_be_written_is_one_clear_message(tmp_path):
    with pytest.raises(UserError, match="cannot write the report .*; choose another --output"):
        write_report(write_run(tmp_path), tmp_path / "nowhere" / "page.html")


def test_a_run_of_an_optimizer_that_is_not_installed_has_a_page_without_its_memory(tmp_path):
    run = read_run(write_run(tmp_path))
    whole = page_contents(run)
    contents = page_contents(replace(run, config=replace(run.config, optimizer=OptimizerConfig(name="lion"))))
    assert [chart["title"] for chart in whole["over_time"]] == ["Stage inputs held", "Memory, MB"]
    assert [chart["title"] for chart in contents["over_time"]] == ["Stage inputs held"]
    assert contents["headline"] == whole["headline"]
