"""Files that people hand in."""

import errno
import json
import math
import os
import re
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, parse_toml, read_text, replaced, strict_json, write_text


def test_text_is_read_without_its_byte_order_mark(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfone \xc3\xa9\n")
    assert read_text(file) == "one é\n"


def test_a_file_of_exactly_the_limit_is_read_and_one_byte_more_is_refused(tmp_path):
    file = tmp_path / "text"
    file.write_text("x" * 100)
    assert len(read_text(file, most_bytes=100)) == 100
    with pytest.raises(UserError, match="expected at most 99 bytes, found more"):
        read_text(file, most_bytes=99)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nothing", "No such file or directory"), ("", "Is a directory"), ("x" * 300, "File name too long"),
     ("zero\0byte", "null byte")],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_the_reason(tmp_path, name, reason):
    with pytest.raises(UserError, match=f"cannot read the table {re.escape(str(tmp_path / name))}: .*{reason}"):
        read_text(tmp_path / name, "the table")


def test_a_device_without_an_end_is_too_large():
    with pytest.raises(UserError, match="expected at most 1,000 bytes"):
        read_text("/dev/zero", most_bytes=1000)


def test_bytes_that_are_no_text_are_named_with_their_place(tmp_path):
    (tmp_path / "text").write_bytes(b"good\xffbad")
    with pytest.raises(UserError, match="expected text in UTF-8, found 0xff at byte 4"):
        read_text(tmp_path / "text")


def test_a_pipe_is_read_to_its_end_and_one_without_a_writer_is_empty(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe") == ""
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(descriptor, b"first ")
    answers = []
    reader = threading.Thread(target=lambda: answers.append(read_text(tmp_path / "pipe")), daemon=True)
    reader.start()
    os.write(descriptor, b"second")
    while not reader.is_alive() and not answers:
        pass
    threading.Timer(0.2, os.close, [descriptor]).start()
    reader.join(timeout=10)
    assert answers == ["first second"]


DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = " + "[" * DEEP, "nested deeper than 64 levels"),
        ("a = " + "{b=" * 70 + "1" + "}" * 70, "nested deeper than 64 levels"),
        (".".join("a" * 200) + " = 1", "nested deeper than 64 levels"),
        ("a = " + "9" * 5000, "digits"),
        ("a = ", "Invalid value"),
    ],
)
def test_what_is_no_toml_is_refused_with_the_reason(text, reason):
    with pytest.raises(UserError, match=f"a file is not TOML: .*{reason}"):
        parse_toml(text, "a file")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * DEEP, "nested deeper than 64 levels"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested deeper than 64 levels"),
        ("9" * 5000, "digits"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json_is_refused_with_the_reason(text, reason):
    with pytest.raises(UserError, match=f"it is not JSON: .*{reason}"):
        parse_json(text)


@pytest.fixture
def full_disk():
    """A block in which no file gets more than 1,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


def test_an_earlier_file_stays_where_the_new_one_cannot_be_written(tmp_path, full_disk):
    file = tmp_path / "trace.json"
    file.write_text("good")
    with full_disk(), pytest.raises(UserError, match=r"cannot write the trace .*trace\.json: File too large"):
        write_text(file, "x" * 5000, "the trace")
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
    assert file.read_text() == "good"


def test_several_files_take_their_places_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "a.sh", tmp_path / "b.sh"
    first.write_text("old")

    def write_the_first_alone():
        with replaced(first, second) as drafts:
            drafts[0].write_text("new")
            (drafts[1] / "inside").write_text("new")

    with pytest.raises(FileNotFoundError):
        write_the_first_alone()
    assert (first.read_text(), second.exists(), len(list(tmp_path.iterdir()))) == ("old", False, 1)
    with replaced(first, second) as drafts:
        for draft in drafts:
            assert draft.suffix == ".sh"
            draft.write_text("new")
    assert first.read_text() == second.read_text() == "new"


def test_a_file_that_is_written_again_keeps_its_mode_and_the_link_to_it(tmp_path):
    (tmp_path / "inner").mkdir()
    file, link = tmp_path / "inner" / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o750)
    link.symlink_to(file)
    write_text(link, "new")
    assert link.is_symlink()
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o750)


def test_what_is_no_regular_file_is_written_itself():
    write_text(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


def test_what_is_nested_as_people_do_it_is_read():
    assert parse_toml("a.b.c = [[1], {d = 2}]", "a file") == {"a": {"b": {"c": [[1], {"d": 2}]}}}
    assert parse_json('{"a": [[1], {"b": null}]}') == {"a": [[1], {"b": None}]}
    assert parse_json("5") == 5


def test_numbers_that_json_cannot_express_become_null():
    text = strict_json({"loss": math.nan, "norm": math.inf, "step": 3, "more": None, "rate": 0.5})
    assert json.loads(text) == {"loss": None, "norm": None, "step": 3, "more": None, "rate": 0.5}
    assert "NaN" not in text


def fill(file, text, **_):
    file.write_bytes(text[:3].encode())
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("before", [b"good", None])
def test_a_full_disk_leaves_the_older_file_and_no_part_of_a_new_one(tmp_path, monkeypatch, before):
    file = tmp_path / "page.html"
    if before is not None:
        file.write_bytes(before)
    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(UserError, match=r"cannot write .*page.html: No space left on device"):
        write_text(file, "a new text")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == ({} if before is None else {file.name: before})


def test_a_file_is_replaced_with_its_mode_and_behind_a_link_and_a_device_is_written(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_text(link, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777, link.is_symlink()) == ("new", 0o640, True)
    write_text(Path("/dev/null"), "gone")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link"]
