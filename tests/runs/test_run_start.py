"""How a run takes its folder: what stays, what is drafted, and what the first step replaces."""

import json
import os
import shutil
from contextlib import suppress

import pytest
from checkpoint_files import write_checkpoint
from run_files import write_run

from pipeloom.checkpoint.checkpoint_folder import FOLDER
from pipeloom.config import CheckpointConfig, OutputConfig, RunConfig
from pipeloom.config.file import read_run_file
from pipeloom.errors import RunError, UserError
from pipeloom.runs import run_folder
from pipeloom.runs.run_folder import DRAFTS, RunFolder, other_trace
from pipeloom.runs.run_start import draft_start, take_run_folder
from pipeloom.system.folder_lock import LOCK, lock_folder
from pipeloom.workload.layout import Coordinates

LINE = {"step": 4, "loss": 2.0, "step_time_s": 0.1}
ENDS = ("model.safetensors", "report.html", "timeline.png", other_trace(Coordinates(0, 1, 0)))


def config_of(folder, resume=None):
    return RunConfig(checkpoint=CheckpointConfig(resume=resume), output=OutputConfig(folder=folder))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / run_folder.METRICS).read_text().splitlines()]


@pytest.fixture
def finished(tmp_path):
    """A finished run of five steps with everything that a run may leave, and its checkpoints after three and five."""
    run = write_run(tmp_path / "run")
    for name in (*ENDS, "model-mine.safetensors", "trace-mine.json"):
        (run / name).write_text("old")
    write_checkpoint(run, 3)
    return run


@pytest.mark.parametrize(
    "inside", ["checkpoints", "checkpoints/mine", "actions/mine", "checkpoints/step-000003", "linked/new/run"]
)
def test_a_run_is_not_written_among_checkpoints(finished, inside):
    (finished / "linked").symlink_to(finished / "checkpoints")
    before = contents(finished)
    refused = pytest.raises(UserError, match=r"output\.folder .* must be outside of .*; choose another folder")
    with refused, take_run_folder(config_of(finished / inside)):
        pass
    assert contents(finished) == before
    with take_run_folder(config_of(finished / "another")):
        pass


@pytest.mark.parametrize(
    "file", ["config.toml", "model.safetensors", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]
)
def test_a_folder_with_a_run_or_its_weights_is_not_written_over(tmp_path, file):
    (tmp_path / file).write_text("mine")
    refused = pytest.raises(UserError, match="another --output.folder, move it away, or add --checkpoint.resume")
    with refused, take_run_folder(config_of(tmp_path)):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [file]
    write_checkpoint(tmp_path / "other", 3)
    with pytest.raises(UserError, match="contains a run already"), take_run_folder(config_of(tmp_path / "other")):
        pass


@pytest.mark.parametrize(
    "name", ["sample.txt", "summary.json", "actions/mine.txt", "trace-replica-001-tensor-0.json", ".starting/mine.txt"]
)
def test_what_a_run_would_replace_in_a_folder_of_somebody_else_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    config, first = config_of(tmp_path), name.split("/")[0]
    with pytest.raises(UserError, match=f"contains {first}, which a run replaces or removes"), take_run_folder(config):
        pass
    assert contents(tmp_path) == {name: b"mine"}


def test_other_files_of_a_folder_stay(tmp_path):
    names = {"notes.txt", ".notes.part", ".video.mkv.part", "trace-replica-notes.json", "model.txt"}
    for name in names:
        (tmp_path / name).write_text("mine")
    config = config_of(tmp_path)
    with take_run_folder(config) as lock:
        folder = draft_start(lock.folder, config)
        folder.add_metrics(LINE)
        folder.close()
    assert {name for name, text in contents(tmp_path).items() if text == b"mine"} == names


def test_a_run_that_was_killed_between_its_first_files_is_no_obstacle(tmp_path):
    config = config_of(tmp_path)
    (tmp_path / DRAFTS).mkdir()
    (tmp_path / DRAFTS / run_folder.CONFIG).write_text("draft")
    (tmp_path / run_folder.METRICS).write_text("its metrics")
    with take_run_folder(config) as lock:
        draft_start(lock.folder, config)


def test_a_run_that_never_begins_leaves_neither_files_nor_folders(tmp_path):
    config = config_of(tmp_path / "new" / "folder")
    for _ in range(2):  # and does not stand in the way of the same command
        with suppress(RunError), take_run_folder(config) as lock:
            draft_start(lock.folder, config)
            RunFolder(lock.folder).write(run_folder.SCHEDULE, "0F0\n")
            (lock.folder / ".tokenizer.json.part").touch()  # a rank was killed while it wrote
            assert list(tmp_path.iterdir()) == [tmp_path / "new"]
            raise RunError("the workers did not start")
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    with take_run_folder(config_of(tmp_path / "mine")):
        pass
    assert (tmp_path / "mine").is_dir()


def test_a_run_without_a_folder_of_its_own_that_never_begins_leaves_no_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with take_run_folder(config_of(None)) as lock:
        assert lock.folder.parent.name == "outputs"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "outputs").mkdir()
    with take_run_folder(config_of(None)):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"]


def test_nothing_of_a_finished_run_changes_before_the_first_step_of_the_next(finished):
    before = contents(finished)
    config = config_of(finished, finished / FOLDER / "step-000003")
    with suppress(RunError), take_run_folder(config) as lock:
        folder = draft_start(lock.folder, config)
        folder.write(run_folder.SCHEDULE, "0F0\n")
        folder.write(run_folder.PREDICTED_TRACE, "new")
        kept = contents(finished)
        raise RunError("a worker died before the first step")
    assert {name: kept[name] for name in before} == before
    assert contents(finished) == before


def test_the_first_step_replaces_what_the_run_before_wrote(finished):
    config = config_of(finished, finished / FOLDER / "step-000003")
    with take_run_folder(config) as lock:
        folder = draft_start(lock.folder, config)
        folder.write(run_folder.SCHEDULE, "0F0\n")
        folder.add_metrics(LINE)
        folder.close()
        assert not folder.is_starting
        folder.write(run_folder.SUMMARY, "{}")
    names = {"config.toml", "metrics.jsonl", "schedule.txt", "summary.json", "checkpoints"}
    assert {path.name for path in finished.iterdir()} == names | {"model-mine.safetensors", "trace-mine.json"}
    assert (finished / run_folder.SCHEDULE).read_text() == "0F0\n"
    assert steps(finished) == [1, 2, 3, 4]
    written, problems = read_run_file(finished / run_folder.CONFIG)
    assert (written.checkpoint.resume, written.output.folder, problems) == (config.checkpoint.resume, None, [])


def test_a_run_killed_at_any_moment_of_the_replacing_leaves_one_run_or_the_other(finished, tmp_path, monkeypatch):
    """Each file of the folder is at every moment the old one, the new one or absent, and never of both runs."""
    old_config, old_schedule = ((finished / name).read_text() for name in (run_folder.CONFIG, run_folder.SCHEDULE))
    ends = 0
    for deadly in range(100):
        run = tmp_path / str(deadly)
        shutil.copytree(finished, run)
        config = config_of(run, run / FOLDER / "step-000003")
        with take_run_folder(config) as lock:
            folder = draft_start(lock.folder, config)
            folder.write(run_folder.SCHEDULE, "0F0\n")
            with monkeypatch.context() as patched:
                _kill_at(patched, deadly)
                try:
                    folder.add_metrics(LINE)
                    ends += 1
                except _KilledError:
                    pass
                finally:
                    folder.close()
        is_old = (run / run_folder.CONFIG).read_text() == old_config
        assert steps(run) in ([1, 2, 3, 4, 5], [1, 2, 3]) if is_old else ([1, 2, 3], [1, 2, 3, 4])
        schedule = run / run_folder.SCHEDULE
        assert not schedule.exists() or schedule.read_text() == (old_schedule if is_old else "0F0\n")
        assert is_old or not (run / run_folder.SUMMARY).exists()
        if (run / run_folder.SUMMARY).exists():
            assert contents(run) == contents(finished)
        with take_run_folder(config) as lock:  # and the next start is not in its way
            draft_start(lock.folder, config)
        if ends:
            break
    assert ends == 1
    assert deadly > len(ENDS) + 5


class _KilledError(BaseException):
    pass


def _kill_at(patched, number):
    """Let this many removals and renames pass; the next one ends the process instead."""
    left = [number]

    def counted(real):
        def call(*words, **more):
            if left[0] == 0:
                raise _KilledError
            left[0] -= 1
            return real(*words, **more)

        return call

    for name in ("unlink", "replace", "rename", "rmdir"):
        patched.setattr(os, name, counted(getattr(os, name)))


def test_a_run_in_a_folder_of_its_own_takes_the_metrics_until_its_checkpoint(finished, tmp_path):
    with (finished / run_folder.METRICS).open("a") as lines:
        lines.write('[1]\n{"step": null}\n{"step": 2, "lo')
    before, own = contents(finished), tmp_path / "own"
    config = config_of(own, finished / FOLDER / "step-000003")
    with take_run_folder(config) as lock:
        folder = draft_start(lock.folder, config)
        folder.add_metrics(LINE)
        folder.close()
    assert steps(own) == [1, 2, 3, 4]
    assert {path.name for path in own.iterdir()} == {"config.toml", "metrics.jsonl"}
    assert contents(finished) == before


SO_DOES = ", and so do the metrics of this run"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("1 2 3 4 5", ""),
        ("1 2 3 4 half", ""),  # of a run that was killed
        ("2 3 4 5", ""),  # of a run that began from a checkpoint without metrics
        ("1 garbage 3 4 5", f" lacks step 2 (line 2 is damaged){SO_DOES}"),
        ("garbage garbage 3", f" lacks 2 steps, the first is step 1 (line 1 is damaged){SO_DOES}"),
        ("1 2", f" lacks step 3{SO_DOES}"),
        (None, " is missing, so the metrics of this run lack all steps up to 3"),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_names_the_lines_that_are_lost(finished, tmp_path, lines, words):
    file = finished / run_folder.METRICS
    if lines is None:
        file.unlink()
    else:
        texts = [json.dumps(LINE | {"step": int(one)}) if one.isdigit() else one for one in lines.split()]
        file.write_text("".join(f"{one}\n" for one in texts).removesuffix("half\n") + "half" * ("half" in lines))
    config = config_of(tmp_path / "own", finished / FOLDER / "step-000003")
    with take_run_folder(config) as lock:
        assert draft_start(lock.folder, config).lost == (words and f"{file}{words}")


def test_a_checkpoint_that_lies_elsewhere_has_no_metrics(tmp_path):
    checkpoint = write_checkpoint(tmp_path, 3).rename(tmp_path / "mine")
    config = config_of(tmp_path / "own", checkpoint)
    with take_run_folder(config) as lock:
        folder = draft_start(lock.folder, config)
        folder.add_metrics(LINE)
        folder.close()
    assert steps(tmp_path / "own") == [4]


def test_a_run_folder_below_one_with_the_name_of_checkpoints_goes_on_in_place(tmp_path):
    run = write_run(tmp_path / FOLDER / "run")
    write_checkpoint(run, 5)
    with take_run_folder(config_of(run, run)) as lock:
        assert lock.folder == run


def test_drafts_of_killed_runs_are_removed_under_the_lock(finished):
    config = config_of(finished, finished)
    before = contents(finished)
    for name in (
        ".summary.json.part",
        ".0123456789abcdef.part.html",
        f"{DRAFTS}/config.toml",
        f"{FOLDER}/.step-000004.part/__0_0.distcp",
    ):
        (finished / name).parent.mkdir(exist_ok=True)
        (finished / name).write_text("half")
    (finished / FOLDER / ".step-000001.old").mkdir()
    drafted = contents(finished)
    held = lock_folder(finished)
    with pytest.raises(UserError, match="is in use by process"), take_run_folder(config):
        pass
    held.release()
    assert contents(finished) == drafted
    with take_run_folder(config):
        assert contents(finished).keys() == before.keys() | {LOCK}
    assert [path.name for path in (finished / FOLDER).iterdir()] == ["step-000003"]


def test_damaged_checkpoints_of_later_steps_are_put_aside_by_the_first_step(finished):
    for step in (4, 5):
        write_checkpoint(finished, step)
    (finished / FOLDER / "step-000005.damaged").mkdir()
    config = config_of(finished, finished / FOLDER / "step-000003")
    with take_run_folder(config) as lock:
        folder = draft_start(lock.folder, config)
        assert folder.damaged == ("step-000004", "step-000005")
        folder.add_metrics(LINE)
        folder.close()
    names = ["step-000003", "step-000004.damaged", "step-000005.damaged", "step-000005.damaged-1"]
    assert sorted(path.name for path in (finished / FOLDER).iterdir()) == names


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    refused = pytest.raises(UserError, match=r"cannot write the run folder .*/file/run: .*choose another --output")
    with refused, take_run_folder(config_of(tmp_path / "file" / "run")):
        pass
