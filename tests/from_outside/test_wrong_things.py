"""Wrong models, weights, texts, tokenizers and checkpoints: one message with status 2, and nothing is written."""

import shutil

import pytest
from own_things import write_own_things
from thinned import thinned
from wrong_things import GROUPS, change_files

from pipeloom.cli import main

ROWS = [row for group in GROUPS for row in group]


def states(folder):
    """Size and time of change of every file, the cache's included."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (0, 0) if path.is_dir() else (one.st_size, one.st_mtime_ns) for path, one in found.items()}


@pytest.fixture(scope="module")
def correct(tmp_path_factory):
    """A folder with all that is correct, before a row changes it."""
    folder = tmp_path_factory.mktemp("correct")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_own_things(folder)
    shutil.rmtree(folder / "cache")
    return folder


def test_there_are_as_many_rows_as_promised():
    assert len(ROWS) >= 160


def test_what_the_rows_change_is_correct_before(correct, monkeypatch, tmp_path, capsys):
    folder = shutil.copytree(correct, tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert (
        main(["train", "run.toml", "--checkpoint.init", "llama", "--training.steps", "1", "--checkpoint.final", "none"])
        == 0
    )
    assert main(["evaluate", "run", "--batches", "1", "--data.path", "tokens"]) == 0
    assert main(["export", "run", "new", "--format", "hf"]) == 0


@pytest.mark.parametrize(("words", "changes", "parts"), thinned(ROWS, 2), ids=[row[0][:60] for row in ROWS])
def test_a_wrong_thing_gets_one_message_and_writes_nothing(
    correct, words, changes, parts, monkeypatch, tmp_path, capsys
):
    folder = shutil.copytree(correct, tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    change_files(folder, changes)
    before = states(folder)
    status = main(words.split())
    printed = capsys.readouterr()
    whole = printed.out + printed.err
    assert status == 2, whole
    assert [part for part in parts.split("; ") if part not in whole] == [], whole
    assert states(folder) == before
    # launch prints what a program cannot express beside what it wrote for others
    assert printed.err.count(f"pipeloom {words.split()[0]}: ") + printed.out.count("cannot express this run") == 1
    assert "Traceback" not in whole
    assert "Errno" not in whole
    assert "\x1b" not in whole
    assert len(whole.splitlines()) <= 40
