"""Files of records: each format gives the same documents, and damaged files are refused by name."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeloom.config import DataConfig
from pipeloom.data.corpus import documents
from pipeloom.data.listing import list_sources
from pipeloom.data.records import dataset_files
from pipeloom.data.text import load_data
from pipeloom.errors import UserError
from pipeloom.system.files import MOST_BYTES

TEXTS = [f"document {number}: naïve 狐\n" + "words and more words. " * (3 + number) for number in range(30)]


def lines() -> bytes:
    records = [json.dumps({"number": number, "text": text}) for number, text in enumerate(TEXTS)]
    return "\n\n".join(records).encode()  # with blank lines, without a line break at the end


def write(path: Path, field: str = "text") -> Path:
    """Write the texts in the format of the file's name."""
    if path.name.endswith((".jsonl", ".gz")):
        path.write_bytes(gzip.compress(lines()) if path.suffix == ".gz" else lines())
        return path
    arrow = pytest.importorskip("pyarrow")
    if path.suffix == ".zst":
        # Two frames, as the concatenation of two files has.
        half = len(lines()) // 2
        path.write_bytes(
            b"".join(arrow.Codec("zstd").compress(part, asbytes=True) for part in (lines()[:half], lines()[half:]))
        )
        return path
    table = arrow.table({"number": range(30), field: TEXTS})
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=7)
        return path
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)
    return path


def read(path: Path, field: str = "text") -> list[str]:
    return [content.decode() for _, content, _ in documents(list_sources(path).sources, field, 1 << 20)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_every_format_gives_each_record_once_in_its_order(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    assert read(path) == TEXTS
    assert [one for one, _, _ in documents(list_sources(path).sources, "text", 1 << 20)][11] == f"{name}/12"


def test_records_train_like_files_with_the_same_text(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    config = DataConfig(path=tmp_path / "a.jsonl", seq_len=16, validation_fraction=0.1, cache=tmp_path / "cache")
    data = load_data(config, 0)
    both = np.concatenate([data.train.tokens, data.validation.tokens])
    found = "".join(chr(token) if token < 128 else "\0" if token == 256 else "?" for token in both).split("\0")
    assert sorted(text.split(":")[0] for text in found if text) == sorted(text.split(":")[0] for text in TEXTS)
    assert len(both) == sum(len(text.encode()) + 1 for text in TEXTS)
    assert "30 documents" in data.description


def test_a_folder_of_datasets_gives_the_files_that_it_lists(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    write(folder / "data-00000-of-00001.arrow", "body")
    (folder / "cache-1234.arrow").write_bytes(b"of an earlier map()")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read(folder, "body") == read(tmp_path, "body") == TEXTS


@pytest.mark.parametrize("listed", [["../secret.arrow"], ["/etc/passwd"], [7], "data.arrow"])
def test_a_folder_of_datasets_cannot_name_other_files(tmp_path: Path, listed: Any) -> None:
    files = [{"filename": name} for name in listed] if isinstance(listed, list) else listed
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    with pytest.raises(UserError, match="must list Arrow files of its folder"):
        list_sources(tmp_path)


def test_a_state_of_a_folder_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "state.json").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    assert dataset_files(tmp_path) is None


def test_empty_and_broken_texts_are_counted(tmp_path: Path) -> None:
    records = [{"text": "first"}, {"text": ""}, {"text": "\ud800 half"}, {"text": "nul \0"}, {"text": "last"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = list(documents(list_sources(tmp_path / "a.jsonl").sources, "text", 1 << 20))
    data = load_data(
        DataConfig(path=tmp_path / "a.jsonl", seq_len=1, validation_fraction=0.3, cache=tmp_path / "cache"), 0
    )
    assert found == [("a.jsonl/1", b"first", 5), ("a.jsonl/5", b"last", 4)]
    assert "2 documents (3 skipped, such as a.jsonl/2: empty, not UTF-8, or with NUL)" in data.description


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"text": "a"}\n{"title": "b"}',
            r"line 2 of .* must have a text under 'text', found the keys title; set data.f",
        ),
        (b"plain text", r"line 1 of .* must be a JSON object, found an error at character 1: Expecting value"),
        (b"[1, 2]", r"line 1 .* found a value of type list"),
        (b'{"text": null}', r"line 1 .* found None"),
        (b"\xff\xfe", r"line 1 .* must be a JSON object"),
        (b"[" * 100_000, r"line 1 .* must be a JSON object"),
    ],
)
def test_wrong_lines_are_refused_by_number(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_other_wrong_records_behind_the_first_are_counted(tmp_path: Path, name: str) -> None:
    path, wrong = tmp_path / name, {4, 7, *range(20, 31), 999, 1004, 1005}
    rows = [{"text": None if number in wrong else f"text {number}"} for number in range(1, 2001)]
    if name == "a.parquet":
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    unit = "row" if name == "a.parquet" else "line"
    with pytest.raises(UserError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{unit} 4 of {path} must have a text under 'text', found None; set data.field or change the record; 14 more "
        f"of the 1,000 {unit}s behind it are wrong: 7, 20, 21, 22, 23, 24, 25, 26, 27, 28, ..."
    )


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no such file " * 99):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=name) as caught:
            read(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_missing_column_is_refused_with_those_that_there_are(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="must have a column 'text', found number, body; set data.field"):
        read(write(tmp_path / name, "body"))


def test_without_pyarrow_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'pipeloom\[data\]'"):
        read(tmp_path / "a.parquet")


def test_a_field_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    with pytest.raises(UserError, match="data.field has no effect without files of records"):
        load_data(DataConfig(path=tmp_path / "a.txt", field="body", cache=tmp_path / "cache"), 0)
