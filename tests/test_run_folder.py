"""Reading run folders."""

import json

import pytest
from checkpoint_files import write_checkpoint
from run_files import write_run

from pipeloom import run_folder
from pipeloom.config import CheckpointConfig, OutputConfig, RunConfig
from pipeloom.config_file import read_run_file
from pipeloom.errors import UserError
from pipeloom.layout import Coordinates
from pipeloom.run_folder import make_run_folder, other_trace, read_run


def test_a_finished_run_is_read_whole(tmp_path):
    run = read_run(write_run(tmp_path))
    assert (run.config.layout.pp, run.schedule.num_ranks, run.trace.num_ranks) == (2, 2, 2)
    assert run.predicted is not None
    assert run.trace.end_s == pytest.approx(2 * run.predicted.end_s)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
    assert run.summary["steps"] == 5
    assert run.sample == "def f():\n    return 1 < 2 & 3\n"


def test_prediction_and_sample_may_be_absent(tmp_path):
    run = read_run(write_run(tmp_path, predicted=False, sample=None))
    assert run.predicted is None
    assert run.sample is None


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no run folder .*/nowhere; `pipeloom train` writes one"):
        read_run(tmp_path / "nowhere")


def test_everything_that_a_half_written_run_lacks_is_named_at_once(tmp_path):
    write_run(tmp_path)
    (tmp_path / run_folder.TRACE).unlink()
    (tmp_path / run_folder.SUMMARY).unlink()
    with pytest.raises(
        UserError, match=r"not the folder of a finished run: it lacks trace\.json, summary\.json; a run"
    ):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (run_folder.TRACE, '{"traceEvents": [', "trace.json: this is no trace: it is not JSON"),
        (run_folder.PREDICTED_TRACE, "[]", "predicted_trace.json: this is no trace: expected an object"),
        (run_folder.METRICS, "", "metrics.jsonl: expected a line for each step, found none"),
        (run_folder.METRICS, '{"step": 1, "loss": 2}\n', "it lacks step_time_s"),
        (run_folder.METRICS, '{"step": 1, "lo', "metrics.jsonl: Unterminated string"),
        (run_folder.SUMMARY, "{}", "summary.json: expected an object with num_parameters, "),
        (run_folder.SUMMARY, "7", "it lacks num_parameters, steps, train_loss"),
        (run_folder.SCHEDULE, "0F0 0X0\n", "schedule.txt: row 0, cell 1: '0X0' is no action"),
        (run_folder.CONFIG, "[layout]\npp = 0\nlops = 2\n", "there is no setting 'layout.lops'"),
        (run_folder.CONFIG, "[layout", "config.toml is not TOML"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, name, text, words):
    write_run(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as refused:
        read_run(tmp_path)
    assert words in str(refused.value)


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


def test_bytes_that_are_no_text_are_no_traceback(tmp_path):
    write_run(tmp_path)
    (tmp_path / run_folder.SAMPLE).write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"cannot read .*sample\.txt"):
        read_run(tmp_path)
