"""``pipeloom train`` that ends early: signals, launchers, full disks; what is safe, and that it goes on from there."""

import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from forked import Forked
from small_run import write_text
from thinned import thinned

from pipeloom.checkpoint.checkpoint_folder import list_checkpoints, read_info
from pipeloom.runs.hang import read_hang
from pipeloom.runs.hang_words import end_of
from pipeloom.system.end_signals import STOPS
from pipeloom.training import run as training_run
from pipeloom.training.checkpoints import checkpoint
from pipeloom.training.checkpoints.saving import Saving
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.trainer import Trainer

MODEL = ["--model.num-layers", "2", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "8"]
LAYOUT = ["--layout.pp", "2", "--layout.num-microbatches", "2"]
BRIEF = ["--training.no-predict", "--training.validation-batches", "1", "--training.sample-tokens", "2"]
STEPS = 6


def words(folder, *more):
    data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache")]
    output = ["--output.folder", str(folder / "run"), "--output.trace-step", "1"]
    return ["train", *MODEL, *LAYOUT, *BRIEF, *data, *output, "--training.steps", str(STEPS), *more]


def trained(folder, prepare=lambda: None, *more):
    """Exit status, standard output and errors of a run with something changed; takes no more than 60 s."""
    run = Forked(folder, words(folder, *more), prepare)
    return run.end(), run.stdout, run.stderr


def metrics(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def curve(folder):
    return [(line["loss"], line["grad_norm"]) for line in metrics(folder)]


def saved(folder):
    """Steps and causes of the checkpoints; no draft of one is left."""
    assert [path.name for path in (folder / "run" / "checkpoints").glob(".*")] == []
    infos = [read_info(path) for path in list_checkpoints(folder / "run")]
    return {info.step: info.cause for info in infos}


def calls_in_step(do):
    """Let each rank call ``do(saving, step)`` when a step has begun; steps are counted from 1."""
    begin_step, num_steps = Saving.begin_step, 0

    def begin(self):
        nonlocal num_steps
        num_steps += 1
        begin_step(self)
        do(self, num_steps)

    Saving.begin_step = begin


def signals(number, at, target=os.getppid):
    """Let the rank and step ``at`` send a signal: to the process that started the ranks, or to another."""

    def do(saving, step):
        if (saving._world.rank, step) == at:
            os.kill(target(), number)
            while saving.signals.number is None:  # until it has come back, so that the step ends behind it
                time.sleep(0.02)

    calls_in_step(do)


def stands_still(owner, name, number, target):
    """Let a function send a signal and then take very long."""

    def stand_still(*_):
        os.kill(target(), number)
        time.sleep(90)

    setattr(owner, name, stand_still)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses and gradient norms of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    status, _, errors = trained(folder, lambda: None, "--checkpoint.final", "none")
    assert status == 0, errors
    assert "warning" not in errors
    assert not (folder / "run" / "checkpoints").exists()
    return curve(folder)


def status_of(number):
    """75 for what schedulers send, which start the run again."""
    return 75 if number in (signal.SIGTERM, signal.SIGUSR1) else 128 + number


@pytest.mark.parametrize(
    ("number", "step"),
    thinned([(signal.SIGINT, STEPS - 1), (signal.SIGHUP, 1), (signal.SIGTERM, 2), (signal.SIGUSR1, 3)], 2),
)
def test_a_signal_ends_a_run_with_a_checkpoint_and_the_printed_command_goes_on_to_the_bit(
    tmp_path, uninterrupted, number, step
):
    status, _, errors = trained(tmp_path, partial(signals, number, (0, step)))
    assert status == status_of(number), errors
    assert saved(tmp_path) == {step: "signal"}
    state = read_hang(tmp_path / "run")
    ended = f"the run has ended in order, after step {step}"
    assert end_of(tmp_path / "run", state) == f"{ended}, with a checkpoint: interrupted by {number.name}"
    *_, first, safe, how = errors.splitlines()
    assert first == f"pipeloom train: interrupted by {number.name}"
    assert safe.startswith(f"{step} of {STEPS} steps are saved, in {tmp_path}/run/checkpoints/step-00000{step}.")
    program, *printed = shlex.split(how.removeprefix("To resume: "))
    assert program == "pipeloom"
    on = Forked(tmp_path, printed)
    assert on.end() == 0, on.stderr
    assert curve(tmp_path) == uninterrupted
    assert saved(tmp_path) == {step: "signal", STEPS: "end"}


def test_a_signal_in_the_last_step_leaves_the_last_checkpoint(tmp_path):
    status, _, errors = trained(tmp_path, partial(signals, signal.SIGTERM, (1, STEPS)))
    assert status == 75
    assert saved(tmp_path) == {STEPS: "end"}
    assert f"{STEPS} of {STEPS} steps are saved" in errors


def test_a_signal_before_the_first_step_ends_at_once(tmp_path):
    status, _, errors = trained(tmp_path, partial(stands_still, Trainer, "_predict", signal.SIGTERM, os.getppid))
    assert status == 75
    assert f"interrupted by SIGTERM\nNo step was done, and nothing was written to {tmp_path}/run.\n" in errors
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("owner", "name", "number", "target"),
    [(Trainer, "_validate", signal.SIGINT, os.getppid), (training_run, "_draw", signal.SIGHUP, os.getpid)],
    ids=["ranks", "parent"],
)
def test_a_signal_after_the_last_step_ends_at_once_and_what_is_saved_stays(tmp_path, owner, name, number, target):
    status, _, errors = trained(tmp_path, partial(stands_still, owner, name, number, target))
    assert status == status_of(number)
    assert saved(tmp_path) == {STEPS: "end"}
    assert f"interrupted by {number.name}\n{STEPS} of {STEPS} steps are saved" in errors


def test_a_run_ends_with_a_checkpoint_before_its_time_limit_and_goes_on(tmp_path, uninterrupted):
    def slow(saving, step):
        if step == 3:
            saving._begun_s -= 1000 - 6  # 6 s are left, of which 5 are kept for the first checkpoint
            time.sleep(0.8)

    status, _, errors = trained(tmp_path, partial(calls_in_step, slow), "--checkpoint.time-limit-s", "1000")
    assert status == 75, errors
    assert saved(tmp_path) == {3: "signal"}
    assert "pipeloom train: the next step may exceed checkpoint.time_limit_s 1000\n3 of 6 steps are saved" in errors
    again = Forked(tmp_path, words(tmp_path, "--checkpoint.resume", str(tmp_path / "run")))
    assert again.end() == 0, again.stderr
    assert curve(tmp_path) == uninterrupted


def ends_in_validation(is_late):
    """Let a signal arrive, or the time limit come near, in the third forward of a long validation."""
    evaluate, num_calls, found = Pipeline.evaluate, 0, []

    def one(self, batch):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3 and found[0]._world.rank == 0:
            if is_late:
                found[0]._begun_s -= 1000
            else:
                os.kill(os.getppid(), signal.SIGTERM)
        return evaluate(self, batch)

    calls_in_step(lambda saving, _: found.append(saving))
    Pipeline.evaluate = one


@pytest.mark.parametrize("is_late", [False, True], ids=["signal", "time limit"])
def test_a_run_that_ends_gives_up_a_validation_and_writes_its_checkpoint(tmp_path, uninterrupted, is_late):
    long = ["--training.validate-every", "2", "--training.validation-batches", "1000000"]
    limits = ["--checkpoint.grace-s", "15", "--checkpoint.time-limit-s", "1000"]
    status, _, errors = trained(tmp_path, partial(ends_in_validation, is_late), *long, *limits)
    assert status == 75, errors
    assert saved(tmp_path) == {2: "signal"}
    assert ("may exceed checkpoint.time_limit_s 1000" in errors) == is_late
    assert ["validation_loss" in line for line in metrics(tmp_path)] == [False, False]
    again = Forked(tmp_path, words(tmp_path, "--checkpoint.resume", str(tmp_path / "run")))
    assert again.end() == 0, again.stderr
    assert curve(tmp_path) == uninterrupted


def test_a_signal_while_text_is_read_has_the_status_of_a_later_one(tmp_path):
    def read(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(90)

    status, _, errors = trained(tmp_path, partial(setattr, training_run, "load_text", read))
    assert status == 75
    assert "interrupted by SIGTERM" in errors
    assert not (tmp_path / "run").exists()


def test_a_second_interrupt_ends_a_run_at_once(tmp_path):
    def stand_still(_, step):
        if step == 2:
            (tmp_path / "is in step 2").touch()
            time.sleep(90)

    run = Forked(tmp_path, words(tmp_path), partial(calls_in_step, stand_still))
    while run.is_running and not (tmp_path / "is in step 2").exists():
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    while run.is_running and "the run ends after this step, with a checkpoint" not in run.stderr:
        time.sleep(0.05)
    time.sleep(0.7)  # within half a second it would be the first one again, from a terminal
    run.send_signal(signal.SIGINT)
    assert run.end() == 130  # within a minute, less than the step takes
    assert "No checkpoint was written" in run.stderr


def test_a_signal_to_one_rank_of_a_launcher_ends_all_of_them_in_order(tmp_path, uninterrupted):
    ranks = Forked.ranks(tmp_path, words(tmp_path), 2, partial(signals, signal.SIGTERM, (1, 3), os.getpid))
    assert [rank.end() for rank in ranks] == [75, 75], [rank.stderr for rank in ranks]
    assert saved(tmp_path) == {3: "signal"}
    assert curve(tmp_path) == uninterrupted[:3]
    assert f"pipeloom train: interrupted by SIGTERM\n3 of {STEPS} steps are saved" in ranks[0].stderr
    assert "To resume, with the same launcher: pipeloom train" in ranks[0].stderr
    assert "interrupted" not in ranks[1].stderr


def fills_disks(no_room, too_large=()):
    """Rank 0 finds the disk full at the end of some checkpoints; rank 1 may not write large files at others."""
    write, write_info = checkpoint.Checkpoints._write, checkpoint.write_info
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = (1 << 40, most)  # a limit from the start: ranks whose files are limited do not send through shared memory
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def all_or_not(self, info, held):
        if info.step in too_large and not self._is_writer:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
        try:
            write(self, info, held)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def write_or_not(draft, info, files):
        if info.step in no_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_info(draft, info, files)

    checkpoint.Checkpoints._write, checkpoint.write_info = all_or_not, write_or_not


def test_a_checkpoint_that_one_rank_cannot_write_is_a_warning_and_the_next_one_is_written(tmp_path, uninterrupted):
    prepare = partial(fills_disks, no_room=[4], too_large=[2])
    status, printed, errors = trained(tmp_path, prepare, "--checkpoint.every", "1")
    assert status == 0, errors
    assert saved(tmp_path) == {1: "steps", 3: "steps", 5: "steps", STEPS: "end"}
    lines = [line for line in errors.splitlines() if "warning" in line]
    assert len(lines) == 2
    assert "warning: step 2: cannot write the checkpoint" in lines[0]
    assert "rank 1: " in lines[0]
    assert "File too large" in lines[0]
    assert "rank 0: [Errno 28] No space left on device" in lines[1]
    assert "are free on its disk without it); the run continues without this checkpoint" in lines[1]
    noted = (tmp_path / "run" / "warnings.txt").read_text().splitlines()
    assert [line.partition("  ")[2] for line in noted] == [line.partition("warning: ")[2] for line in lines]
    assert "warnings.txt" in printed
    assert curve(tmp_path) == uninterrupted


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_that_says_what_is_safe(tmp_path):
    status, _, errors = trained(tmp_path, partial(fills_disks, no_room=[STEPS]), "--checkpoint.every", "3")
    assert status == 1
    assert saved(tmp_path) == {3: "steps"}
    assert "No space left on device" in errors
    assert f"3 of {STEPS} steps are saved" in errors
    assert "Traceback" not in errors


def test_the_clock_writes_checkpoints_of_which_only_the_newest_stay(tmp_path):
    clock = ["--checkpoint.every-s", "1e-9", "--checkpoint.every", "2", "--checkpoint.no-background"]
    status, _, errors = trained(tmp_path, lambda: None, *clock)
    assert status == 0, errors
    assert saved(tmp_path) == {2: "steps", 4: "steps", 5: "clock", 6: "end"}


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_while_the_process_ends_does_not_change_its_status(number):
    program = (
        f"import atexit, os, sys; atexit.register(os.kill, os.getpid(), {int(number)}); sys.argv = ['', 'train', '--a']"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; from pipeloom.cli import main; sys.exit(main())"], check=False
    )
    assert done.returncode == 2
