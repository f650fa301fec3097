"""Writing run folders."""

import json

import pytest
from checkpoint_files import write_checkpoint
from run_files import write_run

from pipeloom import run_folder
from pipeloom.config import CheckpointConfig, OutputConfig, RunConfig
from pipeloom.config_file import read_run_file
from pipeloom.errors import UserError
from pipeloom.layout import Coordinates
from pipeloom.run_folder import make_run_folder, other_trace


def config_of(folder, resume=None):
    return RunConfig(checkpoint=CheckpointConfig(resume=resume), output=OutputConfig(folder=folder))


@pytest.mark.parametrize(
    "file", ["config.toml", "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]
)
def test_a_folder_with_a_run_or_its_weights_is_not_written_over(tmp_path, file):
    (tmp_path / file).write_text("mine")
    with pytest.raises(UserError, match="holds a run already; choose another --output.folder"):
        make_run_folder(config_of(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [file]
    write_checkpoint(tmp_path / "other", 3)
    with pytest.raises(UserError, match="holds a run already"):
        make_run_folder(config_of(tmp_path / "other"))


def test_a_run_that_goes_on_takes_the_metrics_until_its_checkpoint(tmp_path):
    run, own = write_run(tmp_path / "run"), tmp_path / "own"
    checkpoint = write_checkpoint(run, 3)
    with (run / run_folder.METRICS).open("a") as lines:
        lines.write('[1]\n{"step": null}\n{"step": 2, "lo')
    before = (run / run_folder.METRICS).read_text()
    own.mkdir()
    (own / "model-mine.safetensors").write_text("mine")
    make_run_folder(config_of(own, checkpoint))
    assert [json.loads(line)["step"] for line in (own / run_folder.METRICS).read_text().splitlines()] == [1, 2, 3]
    assert {path.name for path in own.iterdir()} == {"config.toml", "metrics.jsonl", "model-mine.safetensors"}
    assert (run / run_folder.METRICS).read_text() == before
    assert (run / run_folder.SUMMARY).exists()


def test_a_run_that_goes_on_in_the_same_folder_forgets_its_end(tmp_path):
    run = write_run(tmp_path / "run")
    checkpoint = write_checkpoint(run, 3)
    for name in (
        "model.safetensors",
        "model-mine.safetensors",
        "report.html",
        "timeline.png",
        other_trace(Coordinates(0, 1, 0)),
    ):
        (run / name).write_text("old")
    make_run_folder(config_of(run, checkpoint))
    left = {"config.toml", "metrics.jsonl", "checkpoints", "model-mine.safetensors"}
    assert {path.name for path in run.iterdir()} == left
    assert read_run_file(run / run_folder.CONFIG)[0].checkpoint.resume == checkpoint
    assert len((run / run_folder.METRICS).read_text().splitlines()) == 3


def test_a_checkpoint_that_lies_elsewhere_has_no_metrics(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3).rename(tmp_path / "mine")
    folder = make_run_folder(config_of(tmp_path / "own", checkpoint))
    assert [path.name for path in folder.path.iterdir()] == ["config.toml"]
