"""``pipeloom train`` as a person runs it: in a process of its own, with workers of its own."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commands import Command, pipeloom
from small_run import write_text

from pipeloom.runs.run_reading import read_run
from pipeloom.schedule import Kind
from pipeloom.schedule.kinds import TIED_KINDS, TIED_RECEIVE_KINDS
from pipeloom.trace import from_chrome

MODEL = ["--model.num-layers", "4", "--model.hidden-size", "16", "--model.num-heads", "2"]
LAYOUT = ["--layout.pp", "2", "--layout.loops", "2", "--layout.num-microbatches", "4"]


def arguments(folder, *more):
    data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache"), "--data.seq-len", "8"]
    output = ["--output.folder", str(folder / "run"), "--output.trace-step", "2"]
    steps = ["--training.steps", "3", "--training.validation-batches", "1", "--training.sample-tokens", "5"]
    return ["train", *MODEL, *LAYOUT, *data, *output, *steps, *more]


def metrics(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_narrow_weights_that_are_sharded_and_recomputed_train_and_are_predicted(tmp_path):
    layout = ["--layout.pp", "1", "--layout.dp", "2", "--layout.shard", "full", "--layout.recompute", "full"]
    run = pipeloom(arguments(tmp_path, *layout, "--training.dtype", "bfloat16", "--optimizer.lr-warmup-steps", "0"))
    assert run.returncode == 0, run.stderr
    assert "before the first step" in run.stdout
    first, _, last = [line["loss"] for line in metrics(tmp_path)]
    assert first == pytest.approx(math.log(257), rel=0.01)  # of small first weights, which know nothing
    assert last < first


def test_a_run_leaves_everything_behind_and_can_be_repeated_from_its_configuration(tmp_path):
    words = [word.removeprefix(f"{tmp_path}/") for word in arguments(tmp_path)]
    first = pipeloom(words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    expected = {"config.toml", "metrics.jsonl", "schedule.txt", "summary.json", "sample.txt"}
    pictures = {"timeline.png", "timeline.svg", "trace.json", "predicted_trace.json", "report.html"}
    weights = {"checkpoints", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in run.iterdir()} == expected | pictures | weights
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert "validation loss" in first.stdout
    assert "unigram loss" in first.stdout
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert 0 < summary["bubble_fraction"] < 1
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["model"]["vocab_size"] == 257
    assert config["data"]["cache"] == str(tmp_path / "cache")
    assert "folder" not in config["output"]
    assert "folder" not in config["output"]  # it would be refused as the folder of a run
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")

    again = pipeloom(["train", "../run/config.toml", "--output.folder", "../again"], cwd=elsewhere)
    assert again.returncode == 0, again.stderr
    repeated = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["loss"], line["grad_norm"]) for line in repeated] == [
        (line["loss"], line["grad_norm"]) for line in metrics(tmp_path)
    ]


def test_the_trace_has_a_track_for_each_lane_and_an_arrow_for_each_message(tmp_path):
    assert pipeloom(arguments(tmp_path)).returncode == 0
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
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


@pytest.mark.parametrize(
    "layouts",
    [
        (["--layout.pp", "1", "--layout.loops", "1"], ["--schedule.placement", "v"], []),
        (["--layout.token-slices", "5", "3"], ["--schedule.family", "depth-first", "--layout.token-slices", "auto"]),
    ],
    ids=["placements", "slices"],
)
def test_the_layout_does_not_change_the_training(tmp_path, layouts):
    losses = []
    for number, layout in enumerate(layouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = pipeloom(arguments(folder, "--training.dtype", "float64", "--training.no-predict", *layout))
        assert done.returncode == 0, done.stderr
        losses.append([line["loss"] for line in metrics(folder)])
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-12)


DATA_PARALLEL = {
    "none": ["--layout.dp", "2"],
    "full": ["--layout.dp", "2", "--layout.shard", "full"],
    "hybrid": ["--layout.pp", "1", "--layout.dp", "4", "--layout.shard", "gradients", "--layout.replicate", "2",
               "--schedule.gradient-buffers", "1", "--layout.num-microbatches", "1"],
    "tensor": ["--layout.tp", "2", "--layout.num-microbatches", "4"],
    "tensor and sequence": ["--layout.pp", "1", "--layout.tp", "2", "--layout.sequence-parallel", "--layout.dp", "2",
                            "--layout.shard", "full"],
}  # fmt: skip


@pytest.mark.parametrize("names", [("none", "full", "hybrid"), ("tensor", "tensor and sequence")])
def test_replicas_shards_and_slices_do_not_change_the_training(tmp_path, names):
    found = {}
    for name, layout in {"plain": [], **{name: DATA_PARALLEL[name] for name in names}}.items():
        folder = tmp_path / name
        folder.mkdir()
        sizes = ["--layout.num-microbatches", "4" if name == "plain" else "2", "--training.dtype", "float64"]
        clipped = ["--optimizer.clip-grad-norm", "0.5", "--training.sample-tokens", "5", "--training.no-predict"]
        done = pipeloom(arguments(folder, *sizes, *clipped, *layout))
        assert done.returncode == 0, done.stderr
        summary = json.loads((folder / "run" / "summary.json").read_text())
        numbers = [line[key] for line in metrics(folder) for key in ("loss", "grad_norm")]
        found[name] = (
            [*numbers, summary["validation_loss"]],
            summary["num_parameters"],
            (folder / "run" / "sample.txt").read_text(),
        )
        assert "Warning" not in done.stderr
    losses, *rest = found.pop("plain")
    for others, *same in found.values():
        assert others == pytest.approx(losses, rel=1e-12)
        assert same == rest


def test_the_report_has_every_pipeline_of_the_layout(tmp_path):
    assert pipeloom(arguments(tmp_path, *DATA_PARALLEL["tensor and sequence"])).returncode == 0
    run = read_run(tmp_path / "run")
    names = ["replica 0, tensor rank 1", "replica 1, tensor rank 0", "replica 1, tensor rank 1"]
    assert sorted(run.other_traces) == names
    kinds = [[span.action for span in trace.spans if span.rank == 0] for trace in run.other_traces.values()]
    assert {len(found) for found in kinds} == {sum(span.rank == 0 for span in run.trace.spans)}
    assert 0 < run.summary["exchange_s"] < sum(line["step_time_s"] for line in metrics(tmp_path))


TIED = {
    "one process": ["--layout.pp", "1", "--layout.loops", "1"],
    "full": DATA_PARALLEL["full"] + ["--layout.num-microbatches", "2"],
}


def test_a_tied_model_is_trained_evaluated_and_sampled_the_same_everywhere(tmp_path):
    found = {}
    for name, layout in TIED.items():
        folder = tmp_path / name
        folder.mkdir()
        words = ["--model.tied", "--training.dtype", "float64", "--optimizer.clip-grad-norm", "0.5"]
        done = pipeloom(arguments(folder, *words, *layout))
        assert done.returncode == 0, done.stderr
        summary = json.loads((folder / "run" / "summary.json").read_text())
        numbers = [line[key] for line in metrics(folder) for key in ("loss", "grad_norm")]
        found[name] = [*numbers, summary["validation_loss"]]
        assert summary["num_parameters"] == 4 * (4 * 16 * 16 + 3 * 16 * 64 + 2 * 16) + 257 * 16 + 16
        assert (folder / "run" / "sample.txt").read_text() == (tmp_path / "one process" / "run/sample.txt").read_text()
    for numbers in found.values():
        assert numbers == pytest.approx(found["one process"], rel=1e-12)
    for name, kinds in (("one process", set()), ("full", set(TIED_KINDS))):
        for trace in ("trace.json", "predicted_trace.json"):
            spans = from_chrome((tmp_path / name / "run" / trace).read_text()).spans
            moved = [span for span in spans if span.action.kind in TIED_KINDS]
            assert {span.action.kind for span in moved} == kinds
            assert all(s.end_s > s.start_s for s in moved if s.action.kind in TIED_RECEIVE_KINDS)


def test_collectives_are_in_the_measured_and_in_the_predicted_trace(tmp_path):
    assert pipeloom(arguments(tmp_path, *DATA_PARALLEL["full"])).returncode == 0
    for name in ("trace.json", "predicted_trace.json"):
        trace = from_chrome((tmp_path / "run" / name).read_text())
        assert trace.num_ranks == 2
        spans = [span for span in trace.spans if span.lane.name == "data-parallel"]
        assert {span.action.kind.value for span in spans} == {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
        longest = {kind: max(s.end_s - s.start_s for s in spans if s.action.kind == kind) for kind in Kind
                   if kind.value in ("UNSHARD", "REDUCE_GRAD")}  # fmt: skip
        assert all(seconds > 0 for seconds in longest.values())


def test_torchrun_runs_the_same(tmp_path):
    words = ["--training.dtype", "float64", "--training.no-predict"]
    own = pipeloom(arguments(tmp_path, *words))
    assert own.returncode == 0, own.stderr
    other = tmp_path / "other"
    other.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pipeloom"]
    command = [sys.executable, *launcher, *arguments(other, *words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in metrics(other)] == [line["loss"] for line in metrics(tmp_path)]


def test_a_launcher_with_another_number_of_processes_is_refused(tmp_path):
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = pipeloom(arguments(tmp_path), env=environment)
    assert done.returncode == 2
    assert "needs 2 processes, the launcher started 3" in done.stderr


def test_five_mistakes_are_reported_at_once(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[model]\nhiden_size = 64\nnum_heads = 'six'\n[layout]\npp = 0\n"
        "[schedule]\nfamily = 'bredth-first'\n[training]\nsteps = -5\n"
    )
    done = pipeloom(["train", str(file)])
    assert done.returncode == 2
    assert "has 5 problems" in done.stderr
    for words in (
        "did you mean 'model.hidden_size'?",
        "model.num_heads must be a whole number, found 'six'",
        "pp must be at least 1, found 0",
        "did you mean 'breadth-first'?",
        "training.steps must be at least 1, found -5",
    ):
        assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flag_that_does_not_exist_gets_a_suggestion():
    done = pipeloom(["train", "--layout.loop", "2"])
    assert done.returncode == 2
    assert "--layout.loops" in done.stderr + done.stdout


def test_a_run_folder_that_goes_away_ends_the_run_with_one_message(tmp_path):
    with long_run(tmp_path) as (process, workers):
        (tmp_path / "run").rename(tmp_path / "gone")
        done = process.wait(30)
    assert done.returncode == 1
    assert "cannot write to the run folder" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(map(is_alive, workers))
    lines = (tmp_path / "gone" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))


def test_what_moves_is_told_and_a_budget_that_cannot_be_kept_is_refused_before_anything_runs(tmp_path):
    words = arguments(tmp_path, "--training.no-predict", "--schedule.offload", "--schedule.activation-budget")
    done = pipeloom([*words, "1KB"])
    assert done.returncode != 0
    assert "the budget cannot be kept by moving what backwards need: pipeline rank 0 still holds" in done.stderr
    assert not (tmp_path / "run").exists()
    assert "moves      nothing (by pipeline rank, in a step)" in pipeloom([*words, "1GB"]).stdout


def test_lengths_of_slices_that_are_measured_are_announced_and_trained(tmp_path):
    words = arguments(tmp_path, "--layout.token-slices", "auto")
    done = pipeloom(words)
    assert done.returncode == 0, done.stderr
    assert "in slices that suit this machine" in done.stdout
    assert "starting   2 processes; measuring token slices may take minutes" in done.stdout
    assert sum(read_run(tmp_path / "run").config.layout.token_slices) == 8


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    done = pipeloom(arguments(tmp_path, "--model.vocab-size", "100"))
    assert done.returncode == 2
    assert "model.vocab_size must be at least 257" in done.stderr


def test_a_vocabulary_larger_than_the_tokenizers_is_used(tmp_path):
    assert pipeloom(arguments(tmp_path, "--model.vocab-size", "300", "--training.no-predict")).returncode == 0


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path):
    done = pipeloom(arguments(tmp_path, "--optimizer.lr", "1e30", "--training.no-predict"))
    assert done.returncode == 1
    assert "try a lower --optimizer.lr" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unwritable_run_folder_is_one_clear_message(tmp_path):
    (tmp_path / "file").write_text("")
    done = pipeloom([*arguments(tmp_path), "--output.folder", str(tmp_path / "file" / "run")])
    assert done.returncode == 2
    assert "cannot write the run folder" in done.stderr
    assert "choose another --output.folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("mine")
    done = pipeloom(arguments(tmp_path))
    assert done.returncode == 2
    assert "holds a run already" in done.stderr
    assert (tmp_path / "run" / "config.toml").read_text() == "mine"


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextmanager
def long_run(folder):
    """A run that would take minutes, once it has done a few steps; its process and its workers."""
    words = arguments(folder, "--training.steps", "100000", "--training.no-predict")
    process = Command(words)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "run" / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
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
        begin = time.monotonic()
        if how == "killed worker":
            os.kill(workers[1], signal.SIGKILL)
        elif how == "interrupt":
            os.killpg(process.pid, signal.SIGINT)
        elif how == "terminate":
            os.kill(process.pid, signal.SIGTERM)
        else:
            os.kill(process.pid, signal.SIGKILL)
        done = process.wait(30)
        while any(map(is_alive, workers)) and time.monotonic() < begin + 15:
            time.sleep(0.05)
        assert time.monotonic() < begin + 15
        assert not any(map(is_alive, workers))
    if how == "killed worker":
        assert done.returncode == 1
        assert "rank 1 was killed by signal 9 (SIGKILL)" in done.stderr
    if how in ("interrupt", "terminate"):
        number = signal.SIGINT if how == "interrupt" else signal.SIGTERM
        assert done.returncode == 128 + number
        assert f"interrupted by {number.name}" in done.stderr
    assert "Traceback" not in done.stderr
    if how != "killed parent":
        assert "What the run wrote until then is in" in done.stderr
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, len(metrics(tmp_path)) + 1))
    assert (tmp_path / "run" / "config.toml").exists()


def test_predicting_a_step_changes_nothing_of_the_training(tmp_path):
    losses = []
    for flag in ("--training.predict", "--training.no-predict"):
        folder = tmp_path / flag
        folder.mkdir()
        assert pipeloom(arguments(folder, "--training.dtype", "float64", flag)).returncode == 0
        losses.append([(line["loss"], line["grad_norm"]) for line in metrics(folder)])
        summary = json.loads((folder / "run" / "summary.json").read_text())
        predicted = summary["predicted_step_time_s"]
        assert (predicted is None) == flag.endswith("no-predict")
        assert (folder / "run" / "predicted_trace.json").exists() != flag.endswith("no-predict")
    assert losses[0] == losses[1]
