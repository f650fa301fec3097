"""``pipeloom train --checkpoint.resume``, as a person uses it."""

import json
import os
import re
import shutil
import signal
import time
import tomllib
from contextlib import contextmanager, suppress

import pytest
from checkpoint_files import without_hashes
from commands import Command, pipeloom
from forked import Forked
from safetensors.numpy import load_file
from small_run import write_text

from pipeloom import load_run
from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint
from pipeloom.checkpoint.checkpoint_folder import measure, read_info, write_info
from pipeloom.cli import main
from pipeloom.runs.traced_step import median_step
from pipeloom.trace import from_chrome

SIZES = ["--model.num-layers", "4", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "8"]
LAYOUT = ["--layout.pp", "2", "--layout.loops", "2", "--layout.num-microbatches", "4"]
pytestmark = pytest.mark.timeout(300)  # the first test also waits for the run that all of them use
STEPS = ["--training.steps", "6", "--checkpoint.every", "2", "--training.validate-every", "3"]
OTHER = ["--layout.pp", "1", "--layout.dp", "2", "--layout.shard", "full", "--layout.num-microbatches", "2"]


def words_of(folder, name, *words):
    data = ["--data.path", str(folder / "text.txt"), "--data.cache", str(folder / "cache")]
    brief = ["--training.no-predict", "--training.validation-batches", "1", "--training.sample-tokens", "3"]
    exact = ["--training.dtype", "float64", "--output.folder", str(folder / name), "--output.trace-step", "2"]
    return [*SIZES, *data, *brief, *exact, *words]


def train(folder, name, *words):
    return pipeloom(["train", *words_of(folder, name, *words)])


@contextmanager
def started(folder, name, *words):
    """A run that goes on until the block ends, with its own temporary folder; then all of its processes are killed."""
    place = folder / "temporary"
    place.mkdir(exist_ok=True)
    run = Command(["train", *words_of(folder, name, *words)], env={**os.environ, "TMPDIR": str(place)})
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            run.kill()
        run.wait()


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def contents(folder):
    """Every file but the lock that a killed process leaves, which the next run takes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def weights(run):
    return {name: tensor.tobytes() for name, tensor in load_file(run / "model.safetensors").items()}


def cut_short(checkpoint):
    file = max(checkpoint.glob("*.distcp"))
    with file.open("r+b") as parts:
        parts.truncate(2000)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run of six steps, and checkpoints after the second, the fourth and the last."""
    folder = tmp_path_factory.mktemp("resume")
    write_text(folder)
    done = train(folder, "run", *LAYOUT, *STEPS)
    assert done.returncode == 0, done.stderr
    assert f"`pipeloom train --checkpoint.resume {folder / 'run'}` resumes with any layout" in done.stdout
    return folder


def test_validation_during_the_run_is_in_the_metrics_and_changes_no_step(finished):
    lines = metrics(finished / "run")
    assert [line["step"] for line in lines if "validation_loss" in line] == [3]
    validation = json.loads((finished / "run" / "summary.json").read_text())["validation_loss"]
    # Weights of step 3 and of step 6 have different losses on the same windows.
    assert 0 < abs(lines[2]["validation_loss"] - validation) < 1


def test_a_trained_model_is_evaluated_under_any_layout_and_every_window_counts_once(finished):
    run = finished / "run"
    before = contents(run)
    validation = json.loads((run / "summary.json").read_text())["validation_loss"]
    done = pipeloom(["evaluate", str(run), "--batches", "1", "--json"])
    assert json.loads(done.stdout)["loss"] == pytest.approx(validation, rel=1e-12), done.stderr

    other = finished / "other.txt"
    other.write_text("".join(chr(97 + number * number % 26) for number in range(300)))
    found = []
    for words in (LAYOUT, [*OTHER[:6], "--layout.num-microbatches", "3"]):
        done = pipeloom(["evaluate", str(run), "--data.path", str(other), "--json", *words])
        found.append(json.loads(done.stdout))
    # 301 tokens in windows of 8 targets, of which the last has 4; 38 windows do not fill batches of 8 or of 12.
    assert found[0]["tokens"] == found[1]["tokens"] == 8 * 37 + 4
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-12)
    assert found[0]["step"] == 6
    assert contents(run) == before


def test_a_text_that_is_named_is_evaluated_whole_even_if_the_run_has_it_in_its_file(finished, monkeypatch):
    run = finished / "run"
    chosen = []
    monkeypatch.setattr(
        "pipeloom.training.inference.evaluation.evaluate_run", lambda *_, is_whole, **__: chosen.append(is_whole)
    )
    own = tomllib.loads((run / "config.toml").read_text())["data"]["path"]
    for words in ([], ["--data.path", own]):
        assert main(["evaluate", str(run), *words]) == 0
    assert chosen == [False, True]


def test_a_learning_rate_that_changes_is_in_the_output(finished):
    checkpoint = finished / "run" / "checkpoints" / "step-000004"
    before = metrics(finished / "run")[3]["lr"]
    same = train(finished, "as it was", *LAYOUT, *STEPS, "--checkpoint.resume", str(checkpoint))
    longer = [*STEPS, "--training.steps", "7", "--optimizer.lr-warmup-steps", "1"]
    done = train(finished, "longer", *LAYOUT, *longer, "--checkpoint.resume", str(checkpoint))
    assert same.returncode == done.returncode == 0, done.stderr
    after = float(re.search(r"these settings give it (\S+), and continue from there\n", done.stdout)[1])
    assert f"step 4 had a learning rate of {before:.3g}; these" in done.stdout
    assert "a step reads" not in done.stdout
    assert after > metrics(finished / "longer")[4]["lr"] > before
    assert "learning rate" not in same.stdout


def test_without_a_run_file_a_run_goes_on_with_the_settings_of_its_own_and_flags_over_them(finished):
    run, again = finished / "run", finished / "without a file"
    words = ["--checkpoint.resume", str(run), "--training.steps", "7", "--output.folder", str(again)]
    done = pipeloom(["train", *words])
    assert done.returncode == 0, done.stderr
    assert f"config     {run / 'config.toml'}, of the run that is resumed; flags override it\n" in done.stdout
    assert "batches differ" not in done.stdout
    before, after = (tomllib.loads((folder / "config.toml").read_text()) for folder in (run, again))
    assert after["checkpoint"].pop("resume") == str(run / "checkpoints" / "step-000006")
    assert (before["training"].pop("steps"), after["training"].pop("steps")) == (6, 7)
    assert after == before
    given = load_run(run / "config.toml", checkpoint={"resume": run}, training={"steps": 7})
    assert load_run(checkpoint={"resume": str(run)}, training={"steps": 7}) == given


READERS = {
    "evaluate": ("training.inference.trained", []),
    "generate": ("training.inference.trained", ["--prompt", "the", "--max-tokens", "2"]),
    "export": ("cli.export", ["weights"]),
}


@pytest.mark.parametrize("command", READERS)
def test_a_checkpoint_that_its_run_removes_meanwhile_has_a_note(finished, tmp_path, monkeypatch, capsys, command):
    module, words = READERS[command]
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)

    def choose(path):
        chosen = choose_checkpoint(path)
        chosen.path.rename(tmp_path / "removed")
        return chosen

    monkeypatch.setattr(f"pipeloom.{module}.choose_checkpoint", choose)
    monkeypatch.chdir(tmp_path)
    assert main([command, str(run), *words]) == 2
    found = capsys.readouterr().err
    assert f"{run / 'checkpoints' / 'step-000006'} was removed meanwhile" in found
    assert "repeat the command" in found
    assert "Traceback" not in found


def test_a_run_of_its_own_goes_on_with_another_layout_and_the_whole_curve(finished):
    run, checkpoint = finished / "run", finished / "run" / "checkpoints" / "step-000002"
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    done = train(finished, "other", *OTHER, "--training.steps", "6", "--checkpoint.resume", str(checkpoint))
    assert done.returncode == 0, done.stderr
    assert f"resume     {checkpoint}: step 2, 128 tokens\n" in done.stdout
    assert "other batches" not in done.stdout
    expected, found = metrics(run), metrics(finished / "other")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert found[:2] == expected[:2]
    for name in ("loss", "grad_norm", "lr"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-11)
    one, other = (json.loads((finished / name / "summary.json").read_text()) for name in ("run", "other"))
    assert (other["steps"], other["tokens"]) == (6, one["tokens"])
    for folder, summary, candidates in ((run, one, range(2, 7)), (finished / "other", other, range(4, 7))):
        times_s = {line["step"]: line["step_time_s"] for line in metrics(folder)}
        assert summary["traced_step"] == median_step(candidates, times_s)
        trace = from_chrome((folder / "trace.json").read_text())
        assert 0 < trace.end_s - trace.start_s < times_s[summary["traced_step"]]
    assert other["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-11)
    written = sorted(path.name for path in (finished / "other" / "checkpoints").iterdir())
    assert written == ["step-000004", "step-000006"]  # every second step, as the run that it goes on from
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()} == before


def test_a_run_resumes_in_its_own_folder_if_that_is_set(finished):
    run = finished / "ended early"
    shutil.copytree(finished / "run", run)
    shutil.rmtree(run / "checkpoints" / "step-000006")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 7, "lo')
    done = train(finished, run.name, *LAYOUT, "--training.steps", "6", "--checkpoint.resume", str(run))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in metrics(run)] == pytest.approx(
        [line["loss"] for line in metrics(finished / "run")], rel=1e-11
    )
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-000002", "step-000004", "step-000006"]


def test_other_batches_and_files_that_cannot_be_checked_are_remarked_on(finished, tmp_path):
    path = tmp_path / "checkpoints" / "old"
    shutil.copytree(finished / "run" / "checkpoints" / "step-000002", path)
    without_hashes(path)
    words = ["--training.steps", "3", "--checkpoint.resume", str(path), "--data.validation-fraction", "0.2"]
    words += ["--data.pack", "stream"]  # as unset, so no change
    words += ["--layout.dp", "2", "--layout.pp", "1", "--training.validation-batches", "100"]
    done = train(finished, "seed", *LAYOUT, *words, "--training.seed", "7", "--checkpoint.final", "none")
    assert done.returncode == 0, done.stderr
    assert (
        "100 validation batches need 1,600 windows, the validation text has 1,119: each is read 1 or 2 times"
        in done.stdout
    )
    assert "written without hashes of its files, so damage cannot be detected" in done.stdout
    lost = f"{tmp_path / 'metrics.jsonl'} is missing, so the metrics of this run lack all steps up to 2\n"
    assert lost in done.stdout
    changed = "data.validation_fraction, training.seed changed"
    assert f"batches differ from those that its run would have read, since {changed}\n" in done.stdout
    assert "a step reads 16 sequences, a step of its run read 8\n" in done.stdout
    assert "validation losses may be too low: its run read text for training that is held out now\n" in done.stdout
    assert not (finished / "seed" / "checkpoints").exists()
    assert not (finished / "seed" / "model.safetensors").exists()


def test_first_weights_are_refused_where_a_run_goes_on_unless_they_are_its_own(finished, tmp_path, capsys):
    run, place = finished / "run", f"checkpoint.resume {finished / 'run'}"
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 9}))
    words = words_of(finished, "refused", *LAYOUT, "--training.steps", "6", "--checkpoint.resume", str(run))
    for first in (folder, run / "checkpoints" / "step-000002"):
        assert main(["train", *words, "--checkpoint.init", str(first)]) == 2
        _, line = capsys.readouterr().err.splitlines()
        begun = f"checkpoint.init has no effect with {place}, whose run began with random weights"
        assert line == f"  - {begun}, found {first}; leave it out"
    assert main(["train", *words, "--adapter.rank", "2", "--adapter.init", "random"]) == 2
    assert (
        f"adapter.init has no effect with {place}, whose run began with zeros, found random" in capsys.readouterr().err
    )
    file = tmp_path / "run" / "config.toml"
    shutil.copytree(run, file.parent)
    file.write_text(file.read_text().replace("[checkpoint]", f"[checkpoint]\ninit = '{tmp_path / 'gone'}'"))
    config = load_run(file, checkpoint={"resume": str(file.parent)})
    assert config.checkpoint.init == tmp_path / "gone"


def test_another_model_is_named_whole_before_anything_is_written(finished):
    # Of a run file of another run: without one, it has the sizes of its own.
    file = finished / "other.toml"
    file.write_text("")
    words = ["--training.steps", "9", "--checkpoint.resume", str(finished / "run"), str(file)]
    done = train(finished, "refused", *LAYOUT, *words, "--model.num-heads", "4", "--model.num-layers", "3")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("  - ")]
    assert lines[:3] == [
        "  - model.num_heads is 4, the checkpoint has 2",
        "  - model.num_kv_heads is 4, the checkpoint has 2",
        "  - model.num_layers is 3, the checkpoint has 4",
    ]
    assert lines[3].startswith("  - nothing here has the name of model.layers.3.attention.key.weight, ")
    assert lines[3].endswith(" and 22 more")
    assert len(lines) == 4
    assert len(done.stderr) < 1500
    assert f"pipeloom train {finished / 'run' / 'config.toml'} --checkpoint.resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (finished / "refused").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "checkpoint.json"])
def test_a_checkpoint_with_a_changed_bit_is_refused_by_name_before_anything_is_written(
    finished, tmp_path, capsys, name
):
    path = tmp_path / "copy"
    shutil.copytree(finished / "run" / "checkpoints" / "step-000004", path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 3] ^= 4
    (path / name).write_bytes(content)
    assert main(["train", *words_of(finished, "refused", *LAYOUT, "--checkpoint.resume", str(path))]) == 2
    found = capsys.readouterr().err
    assert f"{path / name}" in found
    assert "was changed after it was written" in found or name == "checkpoint.json"  # text that is no JSON any more
    assert not (finished / "refused").exists()


def test_a_checkpoint_that_would_run_code_is_refused(finished, tmp_path, capsys):
    path = tmp_path / "copy"
    shutil.copytree(finished / "run" / "checkpoints" / "step-000004", path)
    (path / ".metadata").write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "made").encode() + b"\ntR.")
    write_info(path, read_info(path), measure(file for file in path.iterdir() if file.name != "checkpoint.json"))
    assert main(["train", *words_of(finished, "refused", *LAYOUT, "--checkpoint.resume", str(path))]) == 2
    assert ".metadata refers to os.mkdir, which no checkpoint needs" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert not (finished / "refused").exists()


def test_wrong_paths_and_steps_are_reported_with_everything_else(finished):
    done = train(finished, "refused", "--checkpoint.resume", str(finished / "cache"), "--layout.pp", "0")
    assert done.returncode == 2
    assert "layout.pp must be at least 1, found 0" in done.stderr
    assert "checkpoint.resume: expected a run folder or a checkpoint, found no complete checkpoint in" in done.stderr
    resume = ["--checkpoint.resume", str(finished / "run")]
    done = train(finished, "refused", *LAYOUT, *resume, "--training.steps", "5")
    assert done.returncode == 2
    assert not (finished / "refused").exists()
    assert "training.steps must be at least 6, the step of" in done.stderr


def test_a_folder_with_checkpoints_of_later_steps_is_not_gone_on_in(finished):
    words = ["--training.steps", "9", "--checkpoint.resume", str(finished / "run" / "checkpoints" / "step-000004")]
    done = train(finished, "run", *LAYOUT, *words)
    assert done.returncode == 2
    assert "has checkpoints of later steps than step-000004; resume from the latest one" in done.stderr
    assert len(metrics(finished / "run")) == 6


def test_a_launcher_saves_and_resumes_from_the_checkpoint_that_rank_0_chooses(finished):
    run = finished / "for a launcher"
    shutil.copytree(finished / "run", run)
    cut_short(run / "checkpoints" / "step-000006")
    words = words_of(finished, "launched", *OTHER, "--training.steps", "6", "--checkpoint.resume", str(run))
    ranks = Forked.ranks(finished, ["train", *words], 2)
    assert [rank.end(100) for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [rank.stdout.count("not from step-000006: ") for rank in ranks] == [1, 0]
    assert metrics(finished / "launched")[-1]["loss"] == pytest.approx(metrics(finished / "run")[-1]["loss"], rel=1e-11)
    assert (finished / "launched" / "checkpoints" / "step-000006").is_dir()
    assert (finished / "launched" / "model.safetensors").is_file()


def test_a_damaged_checkpoint_is_refused_and_everything_of_the_run_stays(finished):
    run = finished / "damaged"
    shutil.copytree(finished / "run", run)
    checkpoint = run / "checkpoints" / "step-000006"
    cut_short(checkpoint)
    before = contents(run)
    words = [*LAYOUT, "--training.steps", "8", "--checkpoint.final", "checkpoint"]
    done = train(finished, run.name, *words, "--checkpoint.resume", str(checkpoint))
    assert done.returncode == 2
    assert "truncated: 2,000 bytes" in done.stderr
    assert "undamaged ones of its run: step-000002, step-000004" in done.stderr
    assert contents(run) == before

    done = train(finished, run.name, *words, "--checkpoint.resume", str(run))
    assert done.returncode == 0, done.stderr
    assert f"resume     {run / 'checkpoints' / 'step-000004'}: step 4, 256 tokens\n" in done.stdout
    assert "not from step-000006: " in done.stdout
    assert "after the first step, step-000006 will be called *.damaged" in done.stdout
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    names = ["step-000002", "step-000004", "step-000006", "step-000006.damaged", "step-000008"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names


def test_a_run_that_dies_before_its_first_step_leaves_the_one_before_it_as_it_was(finished):
    """The damage is one that no hash shows: the checkpoint is of the format without hashes."""
    run = finished / "unreadable"
    shutil.copytree(finished / "run", run)
    checkpoint = run / "checkpoints" / "step-000006"
    without_hashes(checkpoint)
    with max(checkpoint.glob("*.distcp")).open("r+b") as parts:
        parts.write(bytes(2000))
    before = contents(run)
    done = train(finished, run.name, *LAYOUT, "--training.steps", "8", "--checkpoint.resume", str(run))
    assert done.returncode == 2
    assert "starting   2 processes" in done.stdout
    assert f"No step was done, and nothing was written to {run}." in done.stderr
    assert contents(run) == before
    assert not (run / ".lock").exists()


def test_a_run_is_killed_while_it_starts_and_while_it_trains_and_the_next_one_goes_on(finished):
    run = finished / "killed"
    shutil.copytree(finished / "run", run)
    before, place = contents(run), finished / "temporary"
    words = [*LAYOUT, "--training.steps", "100000", "--checkpoint.every", "100000", "--checkpoint.final", "none"]
    words += ["--checkpoint.resume", str(run)]
    with started(finished, run.name, *words):
        wait_until((run / ".starting" / "schedule.txt").exists)
    killed = contents(run)
    if "summary.json" in killed:  # the first step, which removes it before anything else, may be faster than the kill
        assert {name: killed[name] for name in before} == before
    (left,) = place.glob("pipeloom-*")

    with started(finished, run.name, *words) as first:
        wait_until(lambda: len(metrics(run)) > 7)
        assert not left.exists()
        assert not (run / ".starting").exists()
        assert not (run / "summary.json").exists()
        second = train(finished, run.name, *words)
        assert second.returncode == 2
        assert f"the run folder {run} is in use by process {first.pid} on host " in second.stderr
        assert first.poll() is None
        os.kill(first.pid, signal.SIGKILL)  # its workers end with it, and their lock with them
        first.wait()
        done = train(finished, run.name, *LAYOUT, "--training.steps", "8", "--checkpoint.resume", str(run))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not (run / ".lock").exists()


def test_a_run_killed_after_its_last_step_is_finished_by_going_on(finished):
    run = finished / "without end"
    shutil.copytree(finished / "run", run)
    ends = ("summary.json", "sample.txt", "report.html", "model.safetensors", "timeline.png", "timeline.svg")
    for name in ends:
        (run / name).unlink()
    (run / ".summary.json.part").touch()
    words = [*LAYOUT, *STEPS, "--checkpoint.resume"]
    done = train(finished, run.name, *words, str(run))
    assert done.returncode == 0, done.stderr
    assert "all steps are done, only validation, sample and report are left" in done.stdout
    expected, found = contents(finished / "run"), contents(run)
    assert found.keys() == expected.keys()
    assert weights(run) == weights(finished / "run")
    for name in ("sample.txt", "config.toml", "metrics.jsonl", "trace.json", "schedule.txt"):
        assert found[name] == expected[name]
    one, other = json.loads(expected["summary.json"]), json.loads(found["summary.json"])
    assert other.pop("live_bytes") == []  # counted in the traced step, which this process did not do
    assert one.pop("live_bytes") != []
    assert other == pytest.approx(one)

    done = train(
        finished,
        "end only",
        str(run / "config.toml"),
        *LAYOUT,
        *STEPS[:4],
        "--checkpoint.resume",
        str(run),
        "--training.validate-every",
        "None",
        "--training.validation-batches",
        "0",
    )
    assert done.returncode == 0, done.stderr
    assert "step time         not measured" in done.stdout
    summary = json.loads((finished / "end only" / "summary.json").read_text())
    measured = ("step_time_s", "tokens_per_s", "traced_step", "bubble_fraction", "validation_loss")
    assert {summary[name] for name in measured} == {None}
    assert summary["train_loss"] == one["train_loss"]
    assert (finished / "end only" / "checkpoints" / "step-000006").is_dir()
    assert (
        "All steps of this run were completed by an earlier run" in (finished / "end only" / "report.html").read_text()
    )
    assert weights(finished / "end only") == weights(finished / "run")
