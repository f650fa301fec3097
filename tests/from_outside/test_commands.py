"""What a person sees who types a command: the answer and the status, in a process of its own."""

import json
import signal
import time
from pathlib import Path

import pytest
from commands import TRAINS, Command, run_command
from wrong_inputs import LLAMA

PLAN = ("plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--seq", "2048", "--budget-s", "1")
TINY = ("--model.num-layers", "2", "--model.hidden-size", "16", "--model.num-heads", "2", "--layout.pp", "1")
SHORT = ("--layout.loops", "1", "--layout.num-microbatches", "2", "--data.seq-len", "8", "--training.no-predict")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "here"
    path.mkdir()
    return path


def test_a_model_of_others_keeps_its_function_and_another_function_is_refused(folder):
    (folder / "config.json").write_text(LLAMA.replace("10000.0", "500000.0") + "}")
    done, _ = run_command("launch", "--model.file", "config.json", "--layout.pp", "2", "--out", "start", folder=folder)
    assert "rope_theta = 500000.0" in (folder / "start" / "torchrun.toml").read_text(), done.stderr
    (folder / "config.json").write_text(LLAMA + ', "attention_bias": true, "sliding_window": 4}')
    done, _ = run_command("simulate", "--model.file", "config.json", folder=folder)
    assert done.returncode == 2
    assert "attention_bias" in done.stderr
    assert "sliding_window" in done.stderr


def test_a_planned_run_says_what_is_to_be_set_and_does_not_start_without(folder):
    done, _ = run_command(*PLAN, "--devices", "8", "--global-batch", "32", "--out", "planned", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "optimizer.lr_warmup_steps: steps over which the learning rate rises" in done.stdout
    assert "optimizer.lr: from arXiv 2407.21783" in " ".join(done.stdout.split())
    refused, written = run_command("train", "planned/run.toml", folder=folder)
    assert refused.returncode == 2
    for name in ("data.path", "data.tokenizer", "optimizer.lr_warmup_steps", "training.steps"):
        assert name in refused.stderr
    assert "optimizer.lr " not in refused.stderr  # the recipe of the model has it
    assert written == []


def test_a_million_devices_are_answered_within_the_time_limit(folder):
    done, _ = run_command(*PLAN, "--devices", "1000000", "--global-batch", "1000000", folder=folder, timeout_s=20)
    assert not done.is_too_long
    assert done.returncode in (0, 1), done.stderr
    printed = " ".join(done.stdout.split())
    assert "the time limit was reached" in printed or "in that time" in printed


def test_no_column_of_a_plan_is_missing_on_a_narrow_terminal(folder):
    requested = (*PLAN, "--devices", "8", "--global-batch", "32", "--no-explain")
    done, _ = run_command(*requested, folder=folder, COLUMNS="80")
    for column in ("sharded", "tokens/s", "bubble", "exposed", "$/1e9"):
        assert column in done.stdout


def test_a_run_that_does_not_fit_is_predicted_with_status_1(folder):
    words = ("--model.preset", "llama-3-8b", "--machine.cluster", "dgx-h100", "--data.seq-len", "8192")
    done, _ = run_command("simulate", *words, "--layout.pp", "1", "--layout.loops", "1", folder=folder)
    assert done.returncode == 1
    assert "step time" in done.stdout
    assert "bfloat16 (the devices' default)" in " ".join(done.stdout.split())


def test_a_line_break_in_a_name_begins_no_line_of_a_message(folder):
    done, _ = run_command("schedule", "no\npipeloom: all is well.txt", folder=folder)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    (folder / "run.toml").write_text('[output]\nfolder = "a\\npipeloom train: all steps are saved"\n')
    done, _ = run_command("train", "run.toml", folder=folder)
    assert done.returncode == 2
    assert "output.folder must be one line, found" in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_paths_of_a_run_file_are_those_beside_it(folder):
    (folder / "runs").mkdir()
    (folder / "runs" / "run.toml").write_text('[model]\nfile = "config.json"\n[layout]\npp = 2\n')
    (folder / "runs" / "config.json").write_text(LLAMA + "}")
    done, _ = run_command("simulate", "runs/run.toml", "--json", folder=folder)
    assert json.loads(done.stdout)["run"]["shape"]["hidden"] == 64, done.stderr


def test_a_damaged_checkpoint_is_refused_with_the_whole_ones_named_and_its_run_is_exported_from_these(folder):
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    words = (*TINY, *SHORT, "--data.path", "text.txt", "--training.steps", "2", "--checkpoint.every", "1")
    done, _ = run_command("train", *words, "--output.folder", "run", folder=folder, imported=TRAINS)
    assert done.returncode == 0, done.stderr
    damaged = folder / "run" / "checkpoints" / "step-000002" / "__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    refused, written = run_command("export", str(damaged.parent), "weights", folder=folder, imported=TRAINS)
    assert refused.returncode == 2
    assert "__0_0.distcp was changed after it was written" in refused.stderr
    assert "undamaged ones of its run: step-000001" in refused.stderr
    assert written == []
    done, _ = run_command("export", "run", "weights", folder=folder, imported=TRAINS)
    assert done.returncode == 0, done.stderr
    assert "step-000001" in done.stdout.splitlines()[0]
    assert f"not from step-000002: {damaged} was changed after it was written" in done.stderr


def test_a_time_limit_in_the_middle_of_a_command_ends_it_and_the_next_one_gets_its_own_answer():
    def give_up(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    # pytest-timeout uses this timer, too. Again after a second: Python drops an error in a callback of its collector.
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.3, 1.0)
    question = "--model gpt-1t --cluster dgx-a100 --devices 4096 --global-batch 4096 --seq 2048"  # searched for seconds
    started = Command(["plan", *question.split()], imported=())
    with pytest.raises(TimeoutError):
        started.wait()
    signal.setitimer(signal.ITIMER_REAL, left_s)
    signal.signal(signal.SIGALRM, before)
    state = Path(f"/proc/{started.pid}/cmdline")  # which is empty where nobody has waited for a process yet
    deadline = time.monotonic() + 10
    while state.exists() and state.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = Command(["--version"], imported=()).wait()
    assert (done.returncode, done.stdout[:9]) == (0, "pipeloom ")
