"""A schedule file through the commands: simulated by predicted seconds, verified, trained, resumed, handed over."""

import json
import re

import pytest
from commands import pipeloom
from small_run import write_text

from pipeloom.cli import main
from pipeloom.trace import from_chrome

RUN = ["--model.num-layers", "8", "--model.hidden-size", "16", "--model.num-heads", "2", "--data.seq-len", "16"]
RUN += ["--layout.pp", "2", "--layout.loops", "2", "--layout.num-microbatches", "8", "--training.dtype", "float32"]
MOVES = ["--schedule.offload", "--schedule.activation-budget", "500KB"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A schedule with moves that lie elsewhere than those of nominal seconds."""
    folder = tmp_path_factory.mktemp("file")
    for name, words in {"nominal": [], "mine": ["--by-seconds"]}.items():
        assert main(["simulate", *RUN, *MOVES, *words, "--schedule-out", str(folder / f"{name}.txt")]) == 0
    texts = [(folder / f"{name}.txt").read_text() for name in ("nominal", "mine")]
    assert texts[0] != texts[1]
    assert "OFFLOAD" in texts[1]
    write_text(folder)
    return folder / "mine.txt"


def train(folder, name, *words):
    data = ["--data.path", str(folder / "text.txt"), "--data.cache", str(folder / "cache")]
    brief = ["--training.steps", "3", "--training.validation-batches", "1", "--training.sample-tokens", "2"]
    output = ["--output.folder", str(folder / name), "--output.trace-step", "3", "--training.no-predict"]
    done = pipeloom(["train", *RUN, *MOVES, *data, *brief, *output, *words])
    return folder / name, done


def test_it_is_verified(file, capsys):
    data = ["--data.path", str(file.with_name("text.txt")), "--data.cache", str(file.with_name("cache"))]
    assert main(["verify", *RUN, *MOVES, *data, "--schedule.file", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "mine.txt (looped) over 2 pipeline ranks" in printed
    assert "EQUAL" in printed


def test_it_is_trained_and_a_checkpoint_goes_on_with_it_and_with_the_run_s_own_schedule(file):
    given, folder = ["--schedule.file", str(file)], file.parent
    whole, done = train(folder, "whole", *given, "--checkpoint.every", "2")
    assert done.returncode == 0, done.stderr
    resume = ["--checkpoint.resume", str(whole / "checkpoints" / "step-000002")]
    losses = [json.loads(line)["loss"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    own = ["--schedule.file", "None"]  # without the flag it has the file of the run that is resumed
    for name, words, expected in (("on", [], file), ("own", own, folder / "nominal.txt")):
        run, done = train(folder, name, *resume, *words)
        assert done.returncode == 0, done.stderr
        assert (run / "schedule.txt").read_text() == expected.read_text()
        assert [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()] == losses
        rows = [line.split() for line in expected.read_text().splitlines() if re.match(r"\d", line)]
        executed = sorted(str(span.action) for span in from_chrome((run / "trace.json").read_text()).spans)
        assert executed == sorted(action for row in rows for action in row)
    _, refused = train(folder, "refused", *resume, *given, "--layout.num-microbatches", "4")
    assert refused.returncode == 2
    assert f"{file}, which does not fit the run, has 1 problem:" in refused.stderr
    assert not (folder / "refused").exists()


def test_it_is_handed_over_by_its_whole_path_to_what_executes_it_and_refused_for_others(file, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert main(["launch", *RUN, *MOVES, "--schedule.file", "mine.txt", "--out", "start"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"schedule.file is {file}, on every node" in printed
    assert f'file = "{file}"' in (file.parent / "start" / "torchrun.toml").read_text()
    assert "schedule.offload: PyTorch's runtime does not move activations to the host" in printed
    assert not (file.parent / "start" / "torch_schedule.csv").exists()


def test_settings_of_moves_that_a_file_without_recipe_does_not_have_are_refused(tmp_path, capsys):
    file = tmp_path / "plain.txt"
    assert main(["simulate", *RUN, "--schedule-out", str(file)]) == 0
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("recipe.")))
    capsys.readouterr()
    assert main(["simulate", *RUN, "--schedule.file", str(file)]) == 0
    assert main(["simulate", *RUN, *MOVES, "--schedule.balance", "--schedule.file", str(file)]) == 2
    refused = capsys.readouterr().err
    for key in ("balance", "offload"):
        assert f"schedule.{key} has no effect with {file}, which moves no activations in this way; leave it" in refused
