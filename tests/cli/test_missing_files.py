"""A file that is not there is named once, in every command that reads one, without the number of the error."""

import pytest

from pipeloom.cli import main

QUESTION = ["--devices", "1", "--global-batch", "8", "--seq", "64"]
COMMANDS = {
    "a run to train": ["train", "nosuch.toml"],
    "a run to simulate": ["simulate", "nosuch.toml"],
    "a question": ["plan", "nosuch.toml"],
    "a model": ["plan", "--model", "nosuch.json", "--cluster", "laptop", *QUESTION],
    "a model of a run": ["simulate", "--model.file", "nosuch.json"],
    "a cluster": ["plan", "--model", "gpt-6.6b", "--cluster", "nosuch.toml", *QUESTION],
    "a table of measurements": ["validate", "nosuch.csv"],
    "a schedule": ["schedule", "nosuch.txt"],
    "a run to report": ["report", "nosuch"],
    "a checkpoint to export": ["export", "nosuch", "out"],
    "a checkpoint to resume": ["train", "--checkpoint.resume", "nosuch"],
    "a text": ["train", "--data.path", "nosuch.txt"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_not_there_is_named_once(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(COMMANDS[command]) == 2
    err = capsys.readouterr().err
    assert err.count("nosuch") == 1
    assert "Errno" not in err
    assert list(tmp_path.iterdir()) == []
