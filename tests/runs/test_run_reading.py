"""Reading run folders, at whatever point their runs are."""

import pytest
from run_files import without_its_end, write_run

from pipeloom.errors import UserError
from pipeloom.runs import run_folder
from pipeloom.runs.run_reading import read_run

LINE = '{"step": 1, "loss": 2, "step_time_s": 1}'


def test_a_finished_run_is_read_whole(tmp_path):
    run = read_run(write_run(tmp_path))
    assert (run.config.layout.pp, run.schedule.num_ranks, run.trace.num_ranks) == (2, 2, 2)
    assert run.predicted is not None
    assert run.trace.end_s == pytest.approx(2 * run.predicted.end_s)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
    assert run.summary["steps"] == 5
    assert run.sample.continuation == "def f():\n    return 1 < 2 & 3\n"


def test_prediction_and_sample_may_be_absent(tmp_path):
    run = read_run(write_run(tmp_path, predicted=False, sample=None))
    assert run.predicted is None
    assert run.sample is None


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no run folder .*/nowhere; `pipeloom train` writes one"):
        read_run(tmp_path / "nowhere")


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    write_run(tmp_path)
    (tmp_path / run_folder.CONFIG).unlink()
    with pytest.raises(UserError, match=r"not the folder of a run: it has no config\.toml, which `pipeloom"):
        read_run(tmp_path)


def test_a_run_before_its_first_step_says_so(tmp_path):
    (tmp_path / run_folder.DRAFTS).mkdir()
    with pytest.raises(UserError, match="has not completed its first step, so there is nothing to show; try later"):
        read_run(tmp_path)


def test_a_run_without_an_end_is_read_as_far_as_it_is(tmp_path):
    run = read_run(without_its_end(write_run(tmp_path), run_folder.TRACE, steps=2))
    assert (run.summary, run.trace, run.sample) == (None, None, None)
    assert run.predicted is not None
    assert [line["step"] for line in run.metrics] == [1, 2]


def test_a_run_that_has_only_begun_is_read(tmp_path):
    names = (run_folder.TRACE, run_folder.PREDICTED_TRACE, run_folder.SCHEDULE, run_folder.METRICS)
    run = read_run(without_its_end(write_run(tmp_path), *names))
    assert (run.schedule, run.metrics, run.checkpoints) == (None, (), ())


@pytest.mark.parametrize("length", [1, 20, 40])
def test_a_last_line_that_is_half_written_does_not_count(tmp_path, length):
    folder = without_its_end(write_run(tmp_path))
    lines = (folder / run_folder.METRICS).read_text().splitlines(keepends=True)
    (folder / run_folder.METRICS).write_text("".join(lines[:2]) + lines[2][:length])
    assert [line["step"] for line in read_run(folder).metrics] == [1, 2]
    (folder / run_folder.METRICS).write_text("".join(lines[:2]) + lines[2].rstrip("\n"))
    assert [line["step"] for line in read_run(folder).metrics] == [1, 2, 3]


def test_a_broken_line_before_the_last_is_named(tmp_path):
    folder = without_its_end(write_run(tmp_path))
    (folder / run_folder.METRICS).write_text('{"step": 1, "lo\n{"step": 2, "loss": 1, "step_time_s": 1}\n')
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (run_folder.TRACE, '{"traceEvents": [', "trace.json: this is not a trace: it is not JSON"),
        (run_folder.PREDICTED_TRACE, "[]", "predicted_trace.json: this is not a trace: expected an object"),
        (run_folder.METRICS, "", "metrics.jsonl: expected a line for each step, found none"),
        (
            run_folder.METRICS,
            f"{LINE}\n{LINE}\ngarbage\n{LINE}\n",
            "metrics.jsonl: line 3: Expecting value; remove the",
        ),
        (run_folder.METRICS, '{"step": 1, "loss": 2}\n', "it lacks step_time_s"),
        (run_folder.METRICS, '{"step": 1, "lo', "metrics.jsonl: expected a line for each step, found none"),
        (
            run_folder.METRICS,
            '{"step": 1, "lo\n',
            "metrics.jsonl: line 1: Unterminated string starting at; remove the line to read the other steps",
        ),
        (run_folder.SUMMARY, "{}", "summary.json: expected an object with num_parameters, "),
        (run_folder.METRICS, '{"step": "x", "loss": [2], "step_time_s": 1}\n', "found step 'x', loss [2]"),
        (run_folder.TRACE, "[" * 100_000, "nested deeper than 64 levels"),
        (run_folder.SUMMARY, "[" * 100_000, "recursion"),
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
