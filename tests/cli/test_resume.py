"""``pipeloom train --checkpoint.resume``, as a person uses it."""

import json
import shutil
import subprocess
import sys

import pytest
from small_run import write_text

from pipeloom.checkpoint_folder import measure, read_info, write_info
from pipeloom.cli import main

SIZES = ["--model.num-layers", "4", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "8"]
LAYOUT = ["--layout.pp", "2", "--layout.loops", "2", "--layout.num-microbatches", "4"]
pytestmark = pytest.mark.timeout(300)  # the first test also waits for the run that all of them use
OTHER = ["--layout.pp", "1", "--layout.dp", "2", "--layout.shard", "full", "--layout.num-microbatches", "2"]


def words_of(folder, name, *words):
    data = ["--data.path", str(folder / "text.txt"), "--data.cache", str(folder / "cache")]
    brief = ["--training.no-predict", "--training.validation-batches", "1", "--training.sample-tokens", "3"]
    exact = ["--training.dtype", "float64", "--output.folder", str(folder / name), "--output.trace-step", "2"]
    return [*SIZES, *data, *brief, *exact, *words]


def train(folder, name, *words):
    command = [sys.executable, "-m", "pipeloom", "train", *words_of(folder, name, *words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a run of six steps, and checkpoints after the second, the fourth and the last."""
    folder = tmp_path_factory.mktemp("resume")
    write_text(folder)
    done = train(folder, "run", *LAYOUT, "--training.steps", "6", "--checkpoint.every", "2")
    assert done.returncode == 0, done.stderr
    assert f"`--checkpoint.resume {folder / 'run'}` goes on, with any layout" in done.stdout
    return folder


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
    assert (other["steps"], other["tokens"], other["traced_step"]) == (6, one["tokens"], 4)
    assert one["traced_step"] == 2
    assert other["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-11)
    assert [path.name for path in (finished / "other" / "checkpoints").iterdir()] == ["step-000006"]
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()} == before


def test_a_run_goes_on_in_its_own_folder_where_that_is_asked_for(finished):
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


def test_what_another_text_means_for_the_batches_is_said(finished):
    words = ["--training.steps", "3", "--checkpoint.resume", str(finished / "run" / "checkpoints" / "step-000002")]
    done = train(finished, "seed", *LAYOUT, *words, "--training.seed", "7", "--checkpoint.final", "none")
    assert done.returncode == 0, done.stderr
    assert "other batches than its run would have read, since training.seed changed" in done.stdout
    assert not (finished / "seed" / "checkpoints").exists()
    assert not (finished / "seed" / "model.safetensors").exists()


def test_another_model_is_named_whole_before_anything_is_written(finished):
    words = ["--training.steps", "9", "--checkpoint.resume", str(finished / "run")]
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
    assert "has changed since it was written" in found or name == "checkpoint.json"  # text that is no JSON any more
    assert not (finished / "refused").exists()


def test_a_checkpoint_that_would_run_code_is_refused(finished, tmp_path, capsys):
    path = tmp_path / "copy"
    shutil.copytree(finished / "run" / "checkpoints" / "step-000004", path)
    (path / ".metadata").write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "made").encode() + b"\ntR.")
    write_info(path, read_info(path), measure(file for file in path.iterdir() if file.name != "checkpoint.json"))
    assert main(["train", *words_of(finished, "refused", *LAYOUT, "--checkpoint.resume", str(path))]) == 2
    assert ".metadata asks for os.mkdir, which no checkpoint needs" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert not (finished / "refused").exists()


def test_wrong_paths_and_steps_are_reported_with_everything_else(finished):
    done = train(finished, "refused", "--checkpoint.resume", str(finished / "cache"), "--layout.pp", "0")
    assert done.returncode == 2
    assert "layout.pp must be at least 1, found 0" in done.stderr
    assert "checkpoint.resume: expected a run folder or a checkpoint, found no complete checkpoint in" in done.stderr
    resume = ["--checkpoint.resume", str(finished / "run")]
    done = train(finished, "refused", *LAYOUT, *resume, "--training.steps", "6")
    assert done.returncode == 2
    assert "training.steps must be above 6, the steps that" in done.stderr


def test_a_folder_with_checkpoints_of_later_steps_is_not_gone_on_in(finished):
    words = ["--training.steps", "9", "--checkpoint.resume", str(finished / "run" / "checkpoints" / "step-000004")]
    done = train(finished, "run", *LAYOUT, *words)
    assert done.returncode == 2
    assert "has checkpoints of later steps than step-000004; resume from the latest one" in done.stderr
    assert len(metrics(finished / "run")) == 6


def test_a_launcher_saves_and_resumes(finished):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    data = ["--data.path", str(finished / "text.txt"), "--data.cache", str(finished / "cache"), *SIZES, *OTHER]
    words = ["--training.no-predict", "--training.dtype", "float64", "--training.steps", "6"]
    resume = ["--checkpoint.resume", str(finished / "run" / "checkpoints" / "step-000004")]
    command = [*launcher, "pipeloom", "train", *data, *words, *resume, "--output.folder", str(finished / "launched")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert metrics(finished / "launched")[-1]["loss"] == pytest.approx(metrics(finished / "run")[-1]["loss"], rel=1e-11)
    assert (finished / "launched" / "checkpoints" / "step-000006").is_dir()
    assert (finished / "launched" / "model.safetensors").is_file()
