"""No command sends a control character of foreign text to the terminal: names, values, notes, schedules, samples."""

import csv
import json
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from commands import pipeloom

from pipeloom.catalog import load_cluster
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.cli import main

ROOT = Path(__file__).parents[2]
ESCAPE = "\x1b]0;mine\x07\u202e"
SHOWN = r"\x1b]0;mine\x07\u202e"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printed(capsys, *words, status):
    """What a command prints, on both streams."""
    try:
        found = main([str(word) for word in words])
    except SystemExit as end:  # of an unknown flag
        found = end.code
    assert found == status
    both = "".join(capsys.readouterr())
    assert not CONTROL.search(both)
    return both


@pytest.mark.parametrize(
    "words",
    [
        [ESCAPE],
        ["train", ESCAPE],
        ["train", f"--lay{ESCAPE}", "3"],
        ["train", "--schedule.family", ESCAPE],
        ["train", "--model.preset", ESCAPE],
        ["report", ESCAPE],
        ["export", ESCAPE, "nowhere"],
        ["schedule", ESCAPE],
        ["validate", ESCAPE],
        ["simulate", "--machine.cluster", ESCAPE],
        ["plan", "--model", ESCAPE, "--cluster", ESCAPE, "--seq", "128", "--global-batch", "8"],
    ],
    ids=lambda words: words[0] if len(words) == 1 else " ".join(words[:2]).replace(ESCAPE, "ESC"),
)
def test_words_of_the_command_line_are_shown(capsys, words):
    assert "]0;mine" in printed(capsys, *words, status=2)


def test_a_name_that_is_no_text_is_no_traceback(capsys):
    assert r"there is no run folder no\udcff;" in printed(capsys, "report", os.fsdecode(b"no\xff"), status=2)


def test_a_path_that_no_run_file_can_contain_is_refused_before_a_run_begins(capsys, tmp_path):
    folder = tmp_path / os.fsdecode(b"no\xff")
    folder.mkdir()
    (folder / "a.txt").write_text("words " * 9000)
    words = ["train", "--data.path", folder, "--data.cache", folder / "cache", "--output.folder", tmp_path / "run"]
    found = printed(capsys, *words, status=2)
    assert "has 2 problems" in found
    for path in (folder, folder / "cache"):
        shown = str(path).replace("\udcff", r"\udcff")
        assert f"the paths of a run must be UTF-8, so that its run file can contain them, found {shown};" in found
    assert not (tmp_path / "run").exists()


def test_a_schedule_is_quoted_with_its_control_characters_shown(capsys, tmp_path):
    (tmp_path / "bad.txt").write_text(f"0F0 {ESCAPE}0X0\n", encoding="utf-8")
    assert f"'{SHOWN}0X0' is no action" in printed(capsys, "schedule", tmp_path / "bad.txt", status=2)


def test_a_cluster_has_a_name_with_control_characters_and_markup(capsys, tmp_path):
    name = f"{ESCAPE}[red]mine[/nothing]:smile:"
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_to_toml(replace(load_cluster("dgx-a100"), name=name)), encoding="utf-8")
    assert tomllib.loads(file.read_text(encoding="utf-8"))["name"] == name
    run = ["--model.preset", "llama-3-8b", "--layout.tp", "8", "--training.dtype", "bfloat16"]
    assert f"{SHOWN}[red]mine[/nothing]:smile:" in printed(
        capsys, "simulate", *run, "--machine.cluster", file, status=0
    )


def test_a_table_of_measurements_names_its_sets(capsys, tmp_path):
    with (ROOT / "examples" / "measured.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with (tmp_path / "table.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "set": row["set"] + ESCAPE} for row in rows)
    assert SHOWN in printed(capsys, "validate", tmp_path / "table.csv", status=0)


def test_a_configuration_is_quoted_with_its_control_characters_shown(capsys, tmp_path):
    (tmp_path / "run.toml").write_text(f"layout.{json.dumps(ESCAPE)} = 3\nschedule.family = {json.dumps(ESCAPE)}\n")
    assert printed(capsys, "train", tmp_path / "run.toml", status=2).count(SHOWN) >= 2


def test_the_sample_at_the_end_of_a_run_is_shown_and_kept_as_it_is(tmp_path):
    text = "\x1b]0;mine\x07\x0e\x0b\u202e" * 2000
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    words = ["--model.num-layers", "2", "--model.hidden-size", "8", "--model.num-heads", "1", "--layout.pp", "1"]
    words += ["--layout.num-microbatches", "1", "--layout.loops", "1", "--data.path", str(tmp_path / "text.txt")]
    words += ["--data.cache", str(tmp_path / "cache"), "--data.seq-len", "64", "--output.folder", str(tmp_path / "run")]
    words += ["--training.steps", "1", "--training.sample-tokens", "2", "--checkpoint.final", "none"]
    words += ["--training.validation-batches", "0", "--training.no-predict", "--output.trace-step", "1"]
    done = pipeloom(["train", *words])
    assert done.returncode == 0, done.stderr
    assert not CONTROL.search(done.stdout + done.stderr)
    _, prompt, model = re.split(r"^(?:prompt \(validation text\)|model)$", done.stdout, flags=re.M)
    assert prompt.startswith("\n  | ")
    assert model.startswith("\n  | ")
    assert r"\x1b]0;mine\x07\x0e\x0b\u202e" in done.stdout
    assert "\x1b]0;mine\x07\x0e\x0b\u202e" in (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
