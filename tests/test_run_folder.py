"""Reading run folders."""

import pytest
from run_files import write_run

from pipeloom import run_folder
from pipeloom.errors import UserError
from pipeloom.run_folder import read_run


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


def test_bytes_that_are_no_text_are_no_traceback(tmp_path):
    write_run(tmp_path)
    (tmp_path / run_folder.SAMPLE).write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"cannot read .*sample\.txt"):
        read_run(tmp_path)
