"""``pipeloom train`` as a person runs it: in a process of its own, with workers of its own."""

import json
import math
import os
import signal
import sys
import time
import tomllib
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from commands import Command, pipeloom
from small_run import write_text
from thinned import thinned

from pipeloom.analysis.memory import memory_over_time
from pipeloom.planner.run_step import predict_step
from pipeloom.report.contents import verdict_of
from pipeloom.report.over_time import held_bytes_of
from pipeloom.runs.run_reading import read_run
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import TIED_KINDS
from pipeloom.trace import from_chrome

MODEL = ["--model.num-layers", "4", "--model.hidden-size", "16", "--model.num-heads", "2"]
LAYOUT = ["--layout.pp", "2", "--layout.loops", "2", "--layout.num-microbatches", "4"]
EXACT = ["--training.dtype", "float64", "--optimizer.clip-grad-norm", "0.5"]


def arguments(folder, *more):
    data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache"), "--data.seq-len", "8"]
    output = ["--output.folder", str(folder / "run"), "--output.trace-step", "2"]
    steps = ["--training.steps", "3", "--training.validation-batches", "1", "--training.sample-tokens", "5"]
    return ["train", *MODEL, *LAYOUT, *data, *output, *steps, *more]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run):
    """What a layout must not change: losses, gradient norms and the validation loss; parameters and the sample."""
    summary = json.loads((run / "summary.json").read_text())
    # What the report and the simulator count is what the ranks held.
    found = read_run(run)
    assert verdict_of(found).headline.startswith("measured ")
    held = held_bytes_of(found, found.schedule)
    assert (held is None) == (found.config.training.dtype == "float64")  # for which there are no closed forms
    if held is not None:
        curves = memory_over_time(found.schedule, found.trace, held)
        assert [curve.peak_parts["stage inputs"] for curve in curves] == pytest.approx(summary["live_bytes"], rel=1e-6)
        step = predict_step(found.config)
        assert [memory.activations_bytes for memory in step.prediction.memory_by_rank] == summary["live_bytes"]
    curve = [line[key] for line in metrics(run) for key in ("loss", "grad_norm")]
    return [*curve, summary["validation_loss"]], summary["num_parameters"], (run / "sample.txt").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a run with some flags, once for all tests; returns its folder and what the command did."""

    @cache
    def train(*words):
        folder = tmp_path_factory.mktemp("trained")
        done = pipeloom([word.removeprefix(f"{folder}/") for word in arguments(folder, *words)], cwd=folder)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
        return folder / "run", done

    return train


def test_narrow_weights_that_are_sharded_and_recomputed_train_and_are_predicted(trained):
    layout = ["--layout.pp", "1", "--layout.dp", "2", "--layout.shard", "full", "--layout.recompute", "full"]
    larger = ["--model.vocab-size", "300"]  # than the tokenizer's
    narrow = ["--training.dtype", "bfloat16", "--optimizer.lr-warmup-steps", "0"]
    run, done = trained(*layout, *larger, *narrow, "--schedule.offload", "--schedule.activation-budget", "1GB")
    assert "; predicted " in done.stdout
    assert "moves      nothing (by pipeline rank, in a step)" in done.stdout
    first, _, last = [line["loss"] for line in metrics(run)]
    assert first == pytest.approx(math.log(300), rel=0.01)  # of small first weights, which know nothing
    assert last < first


def test_a_run_leaves_everything_behind_and_can_be_repeated_from_its_configuration(trained, tmp_path):
    run, done = trained()
    expected = {"config.toml", "metrics.jsonl", "schedule.txt", "summary.json", "sample.txt"}
    pictures = {"timeline.png", "timeline.svg", "trace.json", "predicted_trace.json", "report.html"}
    weights = {"actions", "checkpoints", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in run.iterdir()} == expected | pictures | weights
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert "validation loss" in done.stdout
    assert "unigram loss" in done.stdout
    headline, *more = verdict_of(read_run(run)).lines
    assert f"verdict           {headline}\n                  {more[0]}\n" in done.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 0 < summary["bubble_fraction"] < 1
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["model"]["vocab_size"] == 257
    assert config["data"]["cache"] == str(run.with_name("cache"))
    assert "folder" not in config["output"]  # it would be refused as the folder of a run
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")

    there, elsewhere = os.path.relpath(run / "config.toml", tmp_path), tmp_path / "again"
    again = pipeloom(["train", there, "--output.folder", "again", "--training.no-predict"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert numbers(elsewhere) == numbers(run)
    refused = pipeloom(["train", there, "--output.folder", "again"], cwd=tmp_path)
    assert refused.returncode == 2
    assert "contains a run already" in refused.stderr


def test_the_trace_has_a_track_for_each_lane_and_an_arrow_for_each_message(trained):
    run, _ = trained()
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert (0, "compute") in names
    assert (0, "send to 1") in names
    assert (1, "recv from 0") in names
    num_messages = 2 * 4 * 3  # forward and backward, 4 micro-batches, 3 boundaries between ranks
    assert len({e["id"] for e in events if e["ph"] == "s"}) == num_messages
    assert sum(e["ph"] == "f" for e in events) == num_messages
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * 4 * 4 + 2 * num_messages
    begin, end = ({e["id"]: e["ts"] for e in events if e["ph"] == phase} for phase in "sf")
    assert all(begin[message] <= end[message] for message in begin)


SHARDED = ("--layout.dp", "2", "--layout.shard", "full", "--layout.num-microbatches", "2")
TENSOR = ("--layout.pp", "1", "--layout.tp", "2", "--layout.sequence-parallel", *SHARDED)
LAYOUTS = {
    "one rank": ("--layout.pp", "1", "--layout.loops", "1"),
    "v": ("--schedule.placement", "v"),
    "slices": ("--layout.token-slices", "5", "3"),
    "chosen slices": ("--schedule.family", "depth-first", "--layout.token-slices", "auto"),
    "replicas": ("--layout.dp", "2", "--layout.num-microbatches", "2"),
    "full": SHARDED,
    "hybrid": ("--layout.pp", "1", "--layout.dp", "4", "--layout.shard", "gradients", "--layout.replicate", "2",
               "--schedule.gradient-buffers", "1", "--layout.num-microbatches", "1"),
    "tensor": ("--layout.tp", "2"),
    "tensor and sequence": TENSOR,
}  # fmt: skip


@pytest.mark.parametrize("layout", thinned([(words,) for words in LAYOUTS.values()], 2), ids=LAYOUTS)
def test_the_layout_does_not_change_the_training(trained, layout):
    plain, _ = trained(*EXACT, "--training.no-predict")
    run, _ = trained(*EXACT, "--training.no-predict", *layout)
    (expected, *rest), (found, *same) = numbers(plain), numbers(run)
    assert found == pytest.approx(expected, rel=1e-12)
    assert same == rest


def test_lengths_of_slices_that_are_measured_are_announced_and_trained(trained):
    run, done = trained(*EXACT, "--training.no-predict", *LAYOUTS["chosen slices"])
    assert "in slices of measured lengths" in done.stdout
    assert "starting   2 processes; measuring token slices may take minutes" in done.stdout
    assert sum(read_run(run).config.layout.token_slices) == 8


def test_predicting_a_step_changes_nothing_of_the_training(trained):
    (with_it, _), (without, _) = trained(*EXACT), trained(*EXACT, "--training.no-predict")
    assert numbers(with_it) == numbers(without)
    for run, is_predicted in ((with_it, True), (without, False)):
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["predicted_step_time_s"] is not None) == is_predicted
        assert (run / "predicted_trace.json").exists() == is_predicted


def test_the_report_has_every_pipeline_of_the_layout(trained):
    folder, _ = trained(*EXACT, "--training.no-predict", *TENSOR)
    run = read_run(folder)
    names = ["replica 0, tensor rank 1", "replica 1, tensor rank 0", "replica 1, tensor rank 1"]
    assert sorted(run.other_traces) == names
    kinds = [[span.action for span in trace.spans if span.rank == 0] for trace in run.other_traces.values()]
    assert {len(found) for found in kinds} == {sum(span.rank == 0 for span in run.trace.spans)}
    assert 0 < run.summary["exchange_s"] < sum(line["step_time_s"] for line in metrics(folder))


def test_a_tied_model_is_trained_evaluated_and_sampled_the_same_everywhere(trained):
    alone, _ = trained(*EXACT, "--model.tied", *LAYOUTS["one rank"])
    sharded, _ = trained(*EXACT, "--model.tied", *SHARDED)
    (expected, *rest), (found, *same) = numbers(alone), numbers(sharded)
    assert found == pytest.approx(expected, rel=1e-12)
    assert same == rest
    assert rest[0] == 4 * (4 * 16 * 16 + 3 * 16 * 64 + 2 * 16) + 257 * 16 + 16
    collectives = {Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}
    for run, kinds in ((alone, set()), (sharded, TIED_KINDS | collectives)):
        for trace in ("trace.json", "predicted_trace.json"):
            spans = from_chrome((run / trace).read_text()).spans
            moved = [span for span in spans if span.action.kind in TIED_KINDS | collectives]
            assert {span.action.kind for span in moved} == kinds
            assert all((s.lane.name == "data-parallel") == (s.action.kind in collectives) for s in moved)
            # Not the tied receives: what has arrived before its receiver waits for it takes no time.
            taking = kinds & {Kind.UNSHARD, Kind.REDUCE_GRAD}
            longest = {kind: max(s.end_s - s.start_s for s in moved if s.action.kind is kind) for kind in taking}
            assert not [kind for kind, seconds in longest.items() if seconds <= 0]


def test_a_launcher_with_another_number_of_processes_is_refused(tmp_path):
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = pipeloom(arguments(tmp_path), env=environment)
    assert done.returncode == 2
    assert "needs 2 processes, the launcher started 3" in done.stderr


def test_a_run_folder_that_goes_away_ends_the_run_with_one_message(tmp_path):
    with long_run(tmp_path) as (process, workers):
        (tmp_path / "run").rename(tmp_path / "gone")
        done = process.wait(30)
    assert done.returncode == 1
    assert "cannot write to the run folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(map(is_alive, workers))
    steps = [line["step"] for line in metrics(tmp_path / "gone")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_budget_that_cannot_be_kept_is_refused_before_anything_runs(tmp_path):
    done = pipeloom(arguments(tmp_path, "--schedule.offload", "--schedule.activation-budget", "1KB"))
    assert done.returncode != 0
    assert "the budget cannot be kept by moving what backwards need: pipeline rank 0 still holds" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path):
    done = pipeloom(arguments(tmp_path, "--optimizer.lr", "1e30", "--training.no-predict"))
    assert done.returncode == 1
    assert "try a lower --optimizer.lr" in done.stderr
    assert "Traceback" not in done.stderr


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def long_run(folder):
    """A run that would take minutes, once it has done a few steps; its process and its workers."""
    words = arguments(folder, "--training.steps", "100000", "--training.no-predict")
    process = Command(words)
    try:
        deadline = time.monotonic() + 200
        while not (folder / "run" / "metrics.jsonl").exists() or len(metrics(folder / "run")) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.wait()
            time.sleep(0.1)
        yield process, children_of(process.pid)
    finally:  # if it did not end as it should, it is not left to run
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def is_alive(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["killed worker", "interrupt", "terminate", "killed parent"])
def test_whatever_ends_a_run_ends_all_of_it_and_keeps_what_was_written(tmp_path, how):
    with long_run(tmp_path) as (process, workers):
        assert len(workers) == 2
        if how == "killed worker":
            os.kill(workers[1], signal.SIGKILL)
        elif how == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        elif how == "terminate":
            os.kill(process.pid, signal.SIGTERM)
        else:
            os.kill(process.pid, signal.SIGKILL)
        done, deadline = process.wait(60), time.monotonic() + 60
        while any(map(is_alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_alive, workers))
    if how == "killed worker":
        assert done.returncode == 1
        assert "rank 1 was killed by signal 9 (SIGKILL)" in done.stderr
    if how in ("interrupt", "terminate"):
        number = signal.SIGINT if how == "interrupt" else signal.SIGTERM
        # A scheduler's signal means: start it again.
        assert done.returncode == (128 + number if how == "interrupt" else 75)
        assert f"interrupted by {number.name}" in done.stderr
    assert "Traceback" not in done.stderr
    if how != "killed parent":
        assert "What the run wrote until then is in" in done.stderr
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / "run" / "config.toml").exists()
