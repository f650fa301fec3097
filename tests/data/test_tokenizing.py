"""Tokenizing in units: any division gives the same entry, a stopped one goes on; and files of tokens."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from given_tokenizers import folder_of, trained

from pipeloom.cli import main
from pipeloom.config import DataConfig, SourceConfig
from pipeloom.config.tokenizer_files import tokenizer_files
from pipeloom.data import entry, tokenizing
from pipeloom.data.entry import Corpus, write_entry
from pipeloom.data.indexed import read_indexed, write_index
from pipeloom.data.listing import list_sources
from pipeloom.data.summary import Summary
from pipeloom.data.text import load_data
from pipeloom.data.tokenizer import ByteTokenizer, tokenizer_from
from pipeloom.errors import RunError, UserError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Small files, records and a long text, with some that is no text."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text(
            f"file {number}: " + "naïve words 狐. \n" * (3 * number), encoding="utf-8"
        )
    lines = [json.dumps({"text": f"record {number} " + "and more " * (number % 7)}) for number in range(300)]
    lines[100] = json.dumps({"text": "nul \0"})
    lines.insert(120, "")
    (folder / "a.jsonl").write_text("\n".join(lines))
    (folder / "long.txt").write_text(
        "".join(f"line {number}: 狐🦊 naïve\n" for number in range(1500)), encoding="utf-8"
    )
    (folder / "no text.txt").write_bytes(b"words\n" * 5000 + b"\0" + b"words\n" * 3000)
    return folder


def write(folder: Path, text: Path, unit_bytes: int, num_workers: int = 1, tokenizer: Any = None) -> Summary:
    make: Callable[[], Any] = lambda: tokenizer or ByteTokenizer()  # noqa: E731
    corpus = Corpus(list_sources(text).sources, "text", 0.1, make, lambda _: None, unit_bytes=unit_bytes)
    return write_entry(folder, corpus, num_workers, has_bar=False)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("kind", ["bytes", "gpt2"])
def test_units_of_any_size_and_processes_give_the_same_entry(kind: str, texts: Path, tmp_path: Path) -> None:
    tokenizer = None
    if kind != "bytes":
        pytest.importorskip("tokenizers")
        tokenizer = tokenizer_from(tokenizer_files(folder_of(trained(kind), tmp_path / "tokenizer")))
    whole = write(tmp_path / "whole", texts, 1 << 24, tokenizer=tokenizer)
    assert (whole.num_documents, whole.num_skipped) == (12 + 299 + 1, 2)
    found = read_indexed(tmp_path / "whole" / "tokens.bin")
    assert len(found.ends) == whole.num_documents
    end = (tokenizer or ByteTokenizer()).end_of_text
    assert (found.tokens == end).nonzero()[0].tolist() == [one - 1 for one in found.ends]
    # A long text has a fingerprint of its parts.
    same = {name: text for name, text in content(tmp_path / "whole").items() if name != "summary.json"}
    for unit_bytes, num_workers in ((3000, 1), (5000, 2)):
        other = write(tmp_path / f"{unit_bytes}", texts, unit_bytes, num_workers, tokenizer)
        assert replace(other, corpus_sha256=whole.corpus_sha256) == whole
        assert {name: text for name, text in content(tmp_path / f"{unit_bytes}").items() if name in same} == same
    assert not list(tmp_path.glob("*.parts"))


def test_a_file_may_have_a_name_that_is_not_utf_8(texts: Path, tmp_path: Path) -> None:
    before = write(tmp_path / "before", texts, 3000)
    name = os.fsdecode(b"\xff.txt")
    (texts / name).write_text("words of a file")
    whole, other = (write(tmp_path / f"{number}", texts, 3000, number) for number in (1, 2))
    assert whole == other
    assert whole.num_documents == before.num_documents + 1
    (texts / name).rename(texts / os.fsdecode(b"\xfe.txt"))
    assert write(tmp_path / "renamed", texts, 3000).corpus_sha256 != whole.corpus_sha256


def test_a_stopped_process_goes_on(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole", texts, 3000)
    real, done = tokenizing.encode_unit, list[int]()

    def stops(job: Any, pieces: Any, unit: int, tokenizer: Any) -> None:
        if len(done) == 7:
            raise KeyboardInterrupt
        done.append(unit)
        real(job, pieces, unit, tokenizer)

    monkeypatch.setattr(tokenizing, "encode_unit", stops)
    with pytest.raises(KeyboardInterrupt) as caught:
        write(tmp_path / "again", texts, 3000)
    assert "7 of " in caught.value.__notes__[0]
    assert not (tmp_path / "again").exists()
    num_units = len(list((tmp_path / "again.parts").glob("*.npy")))
    assert num_units == 7
    first = list(done)
    done.clear()
    monkeypatch.setattr(tokenizing, "encode_unit", lambda *given: (done.append(given[2]), real(*given))[1])
    write(tmp_path / "again", texts, 3000)
    assert not {*first} & {*done}
    assert content(tmp_path / "again") == content(tmp_path / "whole")
    assert not (tmp_path / "again.parts").exists()


def test_a_wrong_record_is_named_by_its_line_in_any_process(texts: Path, tmp_path: Path) -> None:
    lines = (texts / "a.jsonl").read_text().split("\n")
    lines[250] = '{"title": "b"}'
    (texts / "a.jsonl").write_text("\n".join(lines))
    for num_workers in (1, 2):
        with pytest.raises(UserError, match=r"line 251 of .*a\.jsonl must have a text under 'text'"):
            write(tmp_path / "entry", texts, 3000, num_workers)


def test_a_process_that_dies_is_an_error_and_the_rest_stays(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing.sys, "executable", "/bin/false")
    with pytest.raises(RunError, match=r"a process that tokenizes ended .*the same command resumes where it stopped"):
        write(tmp_path / "entry", texts, 3000, 2)
    assert not (tmp_path / "entry.parts").exists(), "nothing was done"


# Folders and files of tokens


def test_a_folder_of_tokens_trains_as_its_text(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenize", str(texts), str(tmp_path / "tokens"), "--validation-fraction", "0.1"]) == 0
    printed = capsys.readouterr().out
    assert "312 documents (2 skipped, such as a.jsonl/101: " in printed
    assert f"--data.path {tmp_path / 'tokens'} --data.tokenizer bytes" in printed
    config = DataConfig(path=texts, seq_len=16, validation_fraction=0.1, cache=tmp_path / "cache")
    expected = load_data(config, 0)
    with pytest.raises(
        UserError, match=r"data\.validation_fraction has no effect on .*tokens, which has tokens already"
    ):
        load_data(replace(config, path=tmp_path / "tokens", cache=None), 0)
    tokens = replace(config, path=tmp_path / "tokens", validation_fraction=DataConfig.validation_fraction)
    with pytest.raises(UserError, match=r"data\.cache has no effect on .*tokens, which has tokens already"):
        load_data(tokens, 0)
    tokens = replace(tokens, cache=None)
    with pytest.raises(UserError, match=r"data\.field has no effect on"):
        load_data(replace(tokens, field="body"), 0)
    found = load_data(tokens, 0)
    assert np.array_equal(found.train.batch(0, 50), expected.train.batch(0, 50))
    assert np.array_equal(found.validation.batch(0, 50), expected.validation.batch(0, 50))
    assert found.unigram_loss == expected.unigram_loss
    assert main(["tokenize", str(texts), str(tmp_path / "tokens")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "tokens"), str(tmp_path / "more")]) == 2
    assert "has tokens already" in capsys.readouterr().err


def test_tokens_of_another_tokenizer_are_refused(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert (
        main(["tokenize", str(texts), str(tmp_path / "tokens"), "--tokenizer", "bpe", "--bpe-vocab-size", "300"]) == 0
    )
    config = DataConfig(path=tmp_path / "tokens", seq_len=16)
    with pytest.raises(UserError, match=rf"of another tokenizer than data.tokenizer; set .* {tmp_path / 'tokens'}"):
        load_data(config, 0)
    data = load_data(replace(config, tokenizer=tmp_path / "tokens"), 0)
    assert data.tokenizer.vocab_size == 300
    assert "record" in data.tokenizer.decode(data.train.batch(0, 60).ravel())


def test_byte_pair_encoding_is_not_trained_on_tokens(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    assert main(["tokenize", str(texts), str(tmp_path / "tokens")]) == 0
    config = DataConfig(path=tmp_path / "tokens", tokenizer="bpe", bpe_vocab_size=300, seq_len=16)
    for one in (
        config,
        replace(config, path=None, sources=tuple(SourceConfig(path=path) for path in (texts, tmp_path / "tokens"))),
    ):
        with pytest.raises(UserError, match=r"data.tokenizer bpe is trained on text, found tokens in .*tokens; set it"):
            load_data(one, 0)


def indexed(folder: Path, sizes: list[int], dtype: Any = np.uint16, code: int = 8, least: int = 0) -> Path:
    """A file as Megatron-LM's tools/preprocess_data.py writes it, by the layout of its index."""
    tokens = np.concatenate([np.arange(size) % 200 + least for size in sizes] or [np.empty(0)]).astype(dtype)
    tokens.tofile(folder / "data.bin")
    width = np.dtype(dtype).itemsize
    offsets = np.cumsum([0, *sizes])[:-1] * width
    with (folder / "data.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + np.uint64(1).tobytes() + np.uint8(code).tobytes())
        file.write(np.uint64(len(sizes)).tobytes() + np.uint64(len(sizes) + 1).tobytes())
        file.write(np.array(sizes, np.int32).tobytes() + offsets.astype(np.int64).tobytes())
        file.write(np.arange(len(sizes) + 1, dtype=np.int64).tobytes())
    return folder / "data.bin"


@pytest.mark.parametrize(("dtype", "code"), [(np.uint16, 8), (np.int32, 4), (np.int64, 5), (np.uint8, 1)])
def test_files_of_megatron_are_read_where_they_are(dtype: Any, code: int, tmp_path: Path) -> None:
    path = indexed(tmp_path, [70, 10, 900, 300, 60], dtype, code)
    config = DataConfig(path=path, seq_len=8, validation_fraction=0.2, cache=tmp_path / "cache")
    data = load_data(config, 0)
    assert len(data.train.tokens) == 980, "the last documents, up to a fifth of the tokens, are held out"
    assert len(data.validation.tokens) == 360
    assert load_data(replace(config, path=path.with_suffix(".idx")), 0).unigram_loss == data.unigram_loss
    assert not list((tmp_path / "cache").rglob("*.bin"))
    again = write_index(tmp_path / "own.idx", np.array([70, 10, 900, 300, 60]), np.dtype(dtype).itemsize)
    assert again is None
    if code in (8, 4):
        assert (tmp_path / "own.idx").read_bytes() == (tmp_path / "data.idx").read_bytes()


def test_a_document_with_more_tokens_than_a_sequence_may_have_is_several_of_them(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from pipeloom.data import indexed as module

    monkeypatch.setattr(module, "_MOST_TOKENS", 100)
    np.arange(430, dtype=np.uint16).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", np.array([30, 250, 100, 50]), 2)
    assert read_indexed(tmp_path / "a.bin").ends.tolist() == [30, 280, 380, 430]


WRONG: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "another file": (lambda index: b"TNTIDX" + index, "must be an index of Megatron-LM .MMIDIDX., found another file"),
    "version": (lambda index: index[:9] + b"\x02" + index[10:], "found version 2 and type 8"),
    "floats": (lambda index: index[:17] + b"\x06" + index[18:], "found version 1 and type 6"),
    "short": (lambda index: index[:-9], "is damaged: it ends early"),
    "sizes": (lambda index: index[:34] + b"\x09" + index[35:], r"does not fit data\.bin: expected .* bytes of tokens"),
    "negative": (lambda index: index[:37] + b"\xff" + index[38:], r"does not fit data\.bin"),
    "documents": (lambda index: index[:-8] + b"\x09" + index[-7:], "its documents are not in order"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_damaged_index_is_refused(name: str, tmp_path: Path) -> None:
    path = indexed(tmp_path, [70, 10, 900])
    index = path.with_suffix(".idx")
    change, message = WRONG[name]
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(UserError, match=message):
        load_data(DataConfig(path=path, seq_len=8, cache=tmp_path / "cache"), 0)


def test_tokens_that_the_tokenizer_does_not_have_are_refused(tmp_path: Path) -> None:
    path = indexed(tmp_path, [300], least=200)
    with pytest.raises(
        UserError, match=r"must have tokens of data.tokenizer, 0\.\.256, found 200\.\.399; set data.tok"
    ):
        load_data(DataConfig(path=path, seq_len=8, cache=tmp_path / "cache"), 0)
    with pytest.raises(UserError, match=r"data.tokenizer bpe is trained on text, found tokens in"):
        load_data(DataConfig(path=path, tokenizer="bpe", seq_len=8, cache=tmp_path / "cache"), 0)
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_another_process_removes_before_its_lock_is_open_is_made_again(tmp_path, monkeypatch):
    made, mkdir = [], Path.mkdir

    def removed_at_once(path, *args, **kwargs):
        mkdir(path, *args, **kwargs)
        made.append(path)
        if len(made) == 1:
            path.rmdir()

    monkeypatch.setattr(Path, "mkdir", removed_at_once)
    with entry._alone(tmp_path / "cache" / "one.parts"):
        assert (tmp_path / "cache" / "one.parts" / "lock").exists()
    assert len(made) > 1
