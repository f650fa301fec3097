"""Finding checkpoints, and the message when there is none."""

import hashlib
import json
import os
from dataclasses import asdict

import pytest
from checkpoint_files import info_of, write_checkpoint

from pipeloom.checkpoint import checkpoint_folder
from pipeloom.checkpoint.checkpoint_folder import (
    FOLDER,
    INFO,
    METADATA,
    among_checkpoints,
    can_be_checked,
    damage,
    draft_of,
    find_checkpoint,
    list_checkpoints,
    name_of,
    read_info,
    run_of,
)
from pipeloom.cli import main
from pipeloom.errors import UserError


def test_a_run_folder_means_its_latest_checkpoint_by_number(tmp_path):
    paths = [write_checkpoint(tmp_path, step) for step in (10, 999_999, 1_000_000, 2)]
    assert [path.name for path in paths] == ["step-000010", "step-999999", "step-1000000", "step-000002"]
    assert find_checkpoint(tmp_path) == paths[2]
    assert list_checkpoints(tmp_path) == [paths[3], paths[0], paths[1], paths[2]]


def test_a_checkpoint_means_itself_wherever_it_lies(tmp_path):
    path = write_checkpoint(tmp_path / "run", 10)
    write_checkpoint(tmp_path / "run", 20)
    assert find_checkpoint(path) == path
    assert run_of(path) == tmp_path / "run"
    moved = path.rename(tmp_path / "mine")
    assert find_checkpoint(moved) == moved
    assert run_of(moved) is None


def test_nothing_else_is_written_among_checkpoints(tmp_path):
    path = write_checkpoint(tmp_path / "run", 10)
    for inside, of in (
        (path, path),
        (path / "new" / "a", path),
        (path.parent, path.parent),
        (path.parent / "a", path.parent),
    ):
        assert (among_checkpoints(inside) or "").startswith(f"{inside} must be outside of {of}, ")
    moved = path.rename(tmp_path / "mine")
    assert "which is a checkpoint" in (among_checkpoints(moved / "new") or "")
    for other in (tmp_path, path.parent / "a", tmp_path / "run", tmp_path / "new"):
        assert among_checkpoints(other) is None


@pytest.mark.parametrize(
    "words",
    [
        ["tokenize", "text.txt", "PATH"],
        ["plan", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--devices", "8", "--out", "PATH"],
        ["simulate", "--plot", "PATH.svg"],
        ["profile", "--output", "PATH"],
    ],
    ids=lambda words: words[0],
)
def test_no_command_writes_among_checkpoints(tmp_path, capsys, words):
    """A run removes old checkpoints with all that is in them."""
    inside = write_checkpoint(tmp_path / "run", 10) / "more"
    assert main([word.replace("PATH", str(inside)) for word in words]) == 2
    assert "which is a checkpoint; choose another folder" in capsys.readouterr().err
    assert not inside.exists()


@pytest.mark.parametrize("lost", [INFO, METADATA])
def test_one_that_lacks_a_file_is_not_complete_and_not_the_latest(tmp_path, lost):
    whole, broken = write_checkpoint(tmp_path, 10), write_checkpoint(tmp_path, 20)
    (broken / lost).unlink()
    assert find_checkpoint(tmp_path) == whole
    with pytest.raises(UserError, match=f"step-000020 is not complete: it lacks {lost}; use another one"):
        find_checkpoint(broken)


def test_what_was_only_begun_is_named_and_not_used(tmp_path):
    draft = draft_of(tmp_path / FOLDER / name_of(30))
    write_checkpoint(tmp_path, 30).rename(draft)
    with pytest.raises(
        UserError, match=r"found no complete checkpoint in .*, only \.step-000030\.part, which was not completed"
    ):
        find_checkpoint(tmp_path)
    whole = write_checkpoint(tmp_path, 10)
    assert find_checkpoint(tmp_path) == whole


def test_a_path_that_is_none_is_named(tmp_path):
    with pytest.raises(UserError, match="expected a run folder or a checkpoint, found nothing at .*/nowhere"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="expected a run folder or a checkpoint, found a file at .*/file"):
        find_checkpoint(tmp_path / "file")
    with pytest.raises(UserError, match="found no complete checkpoint in"):
        find_checkpoint(tmp_path)


def test_other_names_among_checkpoints_are_left_alone(tmp_path):
    write_checkpoint(tmp_path, 10).rename(tmp_path / FOLDER / "step-best")
    assert list_checkpoints(tmp_path) == []


def test_what_a_checkpoint_says_is_read_back(tmp_path):
    assert read_info(write_checkpoint(tmp_path, 10)) == info_of(10)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format": 1, "st', "Unterminated string"),
        ("7", "expected a checkpoint of format 1 or 2"),
        ('{"format": 3, "step": 3}', "expected a checkpoint of format 1 or 2"),
        ('{"format": 2, "step": 3}', "it was changed after it was written"),
        ('{"format": 1, "step": 3}', "missing 6 required positional arguments: 'sequences'"),
        (json.dumps({"format": 1, **asdict(info_of(1)), "more": 1}), "unexpected keyword argument 'more'"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_reason(tmp_path, text, words):
    path = write_checkpoint(tmp_path, 10)
    (path / INFO).write_text(text)
    with pytest.raises(UserError, match=r"cannot read .*checkpoint\.json: ") as refused:
        read_info(path)
    assert words in str(refused.value)


def test_a_whole_checkpoint_has_no_damage(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    assert can_be_checked(path)
    assert damage(path) == []


def test_any_flipped_byte_of_any_file_is_damage_of_that_file(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
            (problem,) = damage(path)
            assert str(file) in problem
        file.write_bytes(whole)
    assert damage(path) == []


def test_missing_and_cut_files_are_named_all_at_once(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    (path / METADATA).unlink()
    (path / "__0_0.distcp").write_bytes(b"short")
    (path / "__1_0.distcp").write_bytes(bytes(30))
    assert damage(path) == [
        f"{path / METADATA} is missing",
        f"{path / '__0_0.distcp'} is truncated: 5 bytes, 21 were written",
        f"{path / '__1_0.distcp'} is too long: 30 bytes, 22 were written",
    ]


def test_several_processes_share_the_reading_out(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    names = sorted(file.name for file in path.iterdir() if file.name != INFO)
    for name in names:
        (path / name).write_bytes(bytes((path / name).stat().st_size))
    shares = [damage(path, share, 2) for share in range(2)]
    assert sorted(len(problems) for problems in shares) == [1, 2]
    assert sorted(problem.split(" was changed")[0] for problems in shares for problem in problems) == [
        str(path / name) for name in names
    ]


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    hashed = []
    honest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: hashed.append(file.name) or honest(file, name))
    monkeypatch.setattr(checkpoint_folder, "_SETTLED_S", -60.0)  # every file counts as written long ago
    path = write_checkpoint(tmp_path, 10)
    hashed.clear()
    assert damage(path) == []
    assert len(hashed) == 3
    assert damage(path) == []
    assert len(hashed) == 3
    file = path / "__0_0.distcp"
    os.utime(file, ns=(1, 1))
    assert damage(path) == []
    assert hashed[3:] == [str(file)]


def test_a_file_that_was_just_written_is_hashed_again(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    file = path / "__0_0.distcp"
    whole = file.read_bytes()
    for place in range(20):  # within one tick of the clock of the file system
        assert damage(path) == []
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert len(damage(path)) == 1
        file.write_bytes(whole)


def test_a_checkpoint_without_hashes_is_read_and_reported_as_one_that_cannot_be_checked(tmp_path):
    path = write_checkpoint(tmp_path, 10)
    (path / INFO).write_text(json.dumps({"format": 1, **asdict(info_of(10))}))
    (path / "__0_0.distcp").write_bytes(b"")
    assert read_info(path) == info_of(10)
    assert not can_be_checked(path)
    assert damage(path) == []
