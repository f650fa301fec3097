"""``pipeloom train`` with a budget for the device, as a person runs it."""

import json

import pytest
from commands import pipeloom
from small_run import write_text

SIZES = ["--model.num-layers", "4", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "8"]
LAYOUT = ["--layout.pp", "1", "--layout.loops", "6", "--layout.num-microbatches", "4"]
DEEP = ["--model.num-layers", "12", "--layout.loops", "14"]


def train(folder, name, *words):
    data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache")]
    brief = ["--training.steps", "3", "--training.validation-batches", "1", "--training.sample-tokens", "3"]
    output = ["--output.folder", str(folder / name), "--output.trace-step", "2"]
    return pipeloom(["train", *SIZES, *LAYOUT, *data, *brief, *output, *words])


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_model_of_four_budgets_trains_to_the_same_losses(tmp_path):
    assert train(tmp_path, "plain", *DEEP, "--training.no-predict").returncode == 0
    run = train(tmp_path, "swapped", *DEEP, "--schedule.device-budget", "133 kB")
    assert run.returncode == 0, run.stderr
    assert "stored in memory of the host; at most 133 KB of them on the device" in run.stdout
    assert "on their way in the traced step" in run.stdout
    assert "swapped in (by pipeline rank, in a step)" in run.stdout
    assert metrics(tmp_path / "swapped")[2]["loss"] == metrics(tmp_path / "plain")[2]["loss"]
    summary = json.loads((tmp_path / "swapped" / "summary.json").read_text())
    assert 0 < summary["peak_stage_bytes"] <= 133_000
    assert summary["num_parameters"] * 16 > 4 * 133_000
    assert 0 <= summary["swap_hidden_s"] <= summary["swap_s"]
    assert "0SWAP_IN" in (tmp_path / "swapped" / "schedule.txt").read_text()


def test_a_run_with_a_budget_is_repeated_from_its_configuration_and_goes_on_from_its_checkpoint(tmp_path):
    budget = ["--schedule.device-budget", "190kB", "--checkpoint.every", "2", "--training.no-predict"]
    assert train(tmp_path, "run", *budget).returncode == 0
    config, resume = tmp_path / "run" / "config.toml", tmp_path / "run" / "checkpoints" / "step-000002"
    words = ["train", str(config), "--checkpoint.resume", str(resume), "--output.folder", str(tmp_path / "again")]
    done = pipeloom(words)
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in metrics(tmp_path / "again")] == [
        line["loss"] for line in metrics(tmp_path / "run")
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--layout.pp", "2"], "found layout.pp 2; use layout.pp 1 and more layout.loops, or leave the budget out"),
        (["--layout.dp", "2"], "found layout.dp 2; use layout.dp 1, or leave the budget out"),
        (["--layout.loops", "1"], "needs layout.loops of at least 2, so that there are stages to swap, found 1"),
        (["--schedule.device-budget", "12 parsecs"], "expected a size such as 64MiB or 1.5GB, found '12 parsecs'"),
        (["--schedule.device-budget", "10kB"], "use more loops, a partition with smaller stages there"),
    ],
)
def test_what_cannot_be_swapped_is_reported_with_what_to_change(tmp_path, more, words):
    run = train(tmp_path, "run", "--schedule.device-budget", "190kB", *more)
    assert run.returncode != 0
    assert words in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run").exists()  # refused before any process was started
