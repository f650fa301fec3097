"""The text: tokenizers, the split, windows in order, the cache, and what is refused."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER
from pipeloom.config import DataConfig
from pipeloom.data import entry as entry_module
from pipeloom.data import prepared as prepared_module
from pipeloom.data import tokenizing
from pipeloom.data.corpus import documents, held_out, key_of
from pipeloom.data.listing import list_sources
from pipeloom.data.prepared import tokenize_text
from pipeloom.data.summary import write_summary
from pipeloom.data.text import Data, load_data, load_whole, token_shares, unigram_loss
from pipeloom.data.tokenizer import ByteTokenizer, LibraryTokenizer, token_dtype
from pipeloom.data.windows import TokenWindows
from pipeloom.errors import UserError

TEXT = "The quick brown fox, naïve, 狐 🦊, jumps.\r\n\tOver <|endoftext|> the lazy dog.  \n\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of 40 small documents."""
    root = tmp_path / "corpus"
    for number in range(40):
        path = root / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {number}: " + "some words and more words. " * (5 + number), encoding="utf-8")
    return root


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(path=folder, seq_len=16, validation_fraction=0.1, cache=tmp_path / "cache")


@pytest.fixture(scope="module")
def default_data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return load_data(DataConfig(cache=tmp_path_factory.mktemp("cache")), seed=0)


# Tokenizers


@given(st.text())
@settings(max_examples=50)
def test_bytes_survive_a_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())
    assert all(ids < tokenizer.end_of_text)


def test_bytes_leave_out_the_end_of_text_and_mark_broken_characters() -> None:
    assert ByteTokenizer().decode([104, 256, 105, 0xFF]) == "hi\N{REPLACEMENT CHARACTER}"


def test_bpe_survives_a_round_trip() -> None:
    pytest.importorskip("tokenizers")
    text = TEXT * 2000  # several blocks
    trained = LibraryTokenizer.train([text.encode()], 300)
    for tokenizer in (trained, LibraryTokenizer.from_files(trained.files())):
        ids = tokenizer.encode(text.encode())
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.end_of_text, *ids[:5]]) == tokenizer.decode(ids[:5])
        assert tokenizer.vocab_size == 300
        assert ids.max() < 300
        assert ids.dtype == np.uint16
        assert tokenizer.end_of_text not in ids, "text that spells the token is text"
        assert len(ids) < len(text.encode())
        assert len(tokenizer.encode(b"")) == 0


@given(st.binary(max_size=60))
@settings(max_examples=50)
def test_the_file_of_the_bytes_tokenizer_encodes_and_decodes_in_its_library_as_here(text: bytes) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    own = ByteTokenizer()
    found = tokenizers.Tokenizer.from_str(own.to_json())
    assert found.decode(list(text)) == own.decode(text)
    readable = text.decode(errors="replace")
    assert found.encode(readable).ids == list(own.encode(readable.encode()))


@pytest.mark.parametrize("text", ["", "no json", "{}", '{"model": 7}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(UserError, match="expected a tokenizer of the tokenizers library, found"):
        LibraryTokenizer.from_files({TOKENIZER: text})


def test_a_tokenizer_without_an_end_of_text_is_refused() -> None:
    pytest.importorskip("tokenizers")
    tree = json.loads(LibraryTokenizer.train([b"text"], 257).files()[TOKENIZER])
    none = {**tree, "added_tokens": []}
    none["model"] = {**tree["model"], "vocab": {k: v for k, v in tree["model"]["vocab"].items() if len(k) == 1}}
    with pytest.raises(UserError, match=r"expected a tokenizer with the token <\|endoftext\|>, found none"):
        LibraryTokenizer.from_files({TOKENIZER: json.dumps(none)})


def test_bpe_needs_room_for_the_bytes() -> None:
    with pytest.raises(UserError, match=r"at least 257 .* found 100"):
        LibraryTokenizer.train([b"text"], 100)


def test_bpe_without_its_library_names_the_extra(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pipeloom\[bpe\]") as caught:
        load_data(replace(config, tokenizer="bpe"), 0)
    assert "\n" not in str(caught.value)


def test_token_types_are_wide_enough() -> None:
    assert token_dtype(1 << 16) is np.uint16
    assert token_dtype((1 << 16) + 1) is np.uint32


# Corpus


def read(path: Path, field: str = "text") -> list[tuple[str, bytes]]:
    return [(name, content) for name, content, _ in documents(list_sources(path).sources, field, 1 << 20)]


def test_a_folder_gives_its_visible_text_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", ".hidden", ".git/config", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else f"text of {name}", encoding="utf-8")
    (tmp_path / "nul.bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    assert [name for name, _ in read(tmp_path)] == ["a.txt", "a/z.md", "b.txt"]
    assert dict(read(tmp_path))["a/z.md"] == b"text of a/z.md"
    data = load_data(DataConfig(path=tmp_path, seq_len=1, cache=tmp_path / ".cache"), 0)
    assert "3 documents (3 skipped, such as empty.txt: empty, not UTF-8, or with NUL)" in data.description


def test_the_fingerprint_follows_names_and_contents(tmp_path: Path) -> None:
    def fingerprint(files: dict[str, str]) -> str:
        folder = tmp_path / f"{files}"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text * 50)
        return load_data(DataConfig(path=folder, seq_len=1, cache=tmp_path / "cache"), 0).corpus_sha256

    base = {"a": "1", "b": "2"}
    lines = "".join(f"{hashlib.sha256(text.encode() * 50).hexdigest()}  {name}\n" for name, text in base.items())
    assert fingerprint(base) == hashlib.sha256(lines.encode()).hexdigest()
    others = [{"a": "1", "b": "3"}, {"a": "1", "c": "2"}, {"a": "1"}]
    assert len({fingerprint(files) for files in [base, *others]}) == 4


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.floats(0, 0.9))
def test_the_split_is_by_whole_documents_each_that_fits(sizes: list[int], fraction: float) -> None:
    keys = np.array([key_of(f"{number}") for number in range(len(sizes))], np.uint64)
    found = held_out(keys, np.array(sizes), fraction)
    assert not found.all()
    share = sum(size for size, is_held in zip(sizes, found, strict=True) if is_held) / sum(sizes)
    assert not found.any() or fraction / 2 - 1e-9 <= share <= fraction + 1e-9
    left = fraction * sum(sizes)
    for number in np.argsort(keys):
        fits = sizes[number] <= left
        assert not found.any() or found[number] == fits
        left -= sizes[number] if fits else 0


def test_the_order_of_documents_depends_on_names_only() -> None:
    keys = {name: key_of(name) for name in ("a", "b", "c.jsonl/1", "c.jsonl/2")}
    assert len(set(keys.values())) == 4
    assert sorted(keys, key=keys.__getitem__) != sorted(keys)


def test_the_default_corpus_is_real(default_data: Data) -> None:
    assert len(default_data.train.tokens) + len(default_data.validation.tokens) > 5_000_000
    share = len(default_data.validation.tokens) / len(default_data.train.tokens)
    assert 0.04 < share < 0.06
    assert "import " in default_data.tokenizer.decode(default_data.train.tokens[:200_000])
    assert 2 < default_data.unigram_loss < math.log(257)
    assert not any("site-packages" in str(source.path) for source in list_sources(None).sources)


# Windows


def test_batches_of_another_size_go_on_behind_what_was_read() -> None:
    windows = TokenWindows(np.arange(100, dtype=np.uint16), 9, seed=3)
    expected = [*windows.batch(0, 4), *windows.batch(1, 4), *windows.batch(2, 4)]
    found = [*windows.batch(0, 4), *windows.resumed(4).batch(0, 3), *windows.resumed(4).batch(1, 3)]
    assert np.array_equal(found, expected[:10])


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 7), st.none() | st.integers(-3, 99))
def test_each_window_comes_once_an_epoch(num_tokens: int, seq_len: int, batch_size: int, seed: int | None) -> None:
    seq_len = min(seq_len, num_tokens - 1)
    windows = TokenWindows(np.arange(num_tokens, dtype=np.uint16), seq_len, seed)
    num_batches = 2 * windows.num_windows  # so many batches are 2 x batch_size epochs
    rows = np.concatenate([windows.batch(index, batch_size) for index in range(num_batches)])
    assert rows.dtype == np.int64
    assert rows.shape == (num_batches * batch_size, seq_len + 1)
    assert (rows == rows[:, :1] + np.arange(seq_len + 1)).all()
    expected = np.arange(windows.num_windows) * (seq_len + 1)
    for epoch in rows[:, 0].reshape(-1, windows.num_windows):
        assert (np.sort(epoch) == expected).all()
        assert seed is not None or (epoch == expected).all()


def test_the_order_is_a_function_of_seed_and_index() -> None:
    tokens = np.arange(4000, dtype=np.uint16)
    first, again, other = (TokenWindows(tokens, 9, seed) for seed in (1, 1, 2))
    later = [again.batch(index, 8) for index in (7, 55, 3)]
    assert all(np.array_equal(first.batch(index, 8), batch) for index, batch in zip((7, 55, 3), later, strict=True))
    assert not np.array_equal(first.batch(3, 8), other.batch(3, 8))
    assert not np.array_equal(first.batch(0, 400), first.batch(1, 400)), "epochs differ"


def test_the_order_is_the_same_everywhere() -> None:
    starts = TokenWindows(np.arange(80, dtype=np.uint16), 9, seed=0).batch(0, 8)[:, 0]
    assert starts.tolist() == [30, 20, 10, 60, 0, 70, 40, 50]


def test_fewer_tokens_than_a_window_are_refused() -> None:
    with pytest.raises(UserError, match="at least 11 tokens, found 10"):
        TokenWindows(np.arange(10, dtype=np.uint16), 10)


def test_unigram_loss_is_the_entropy_of_the_counts() -> None:
    train, validation = np.array([3, 1, 0]), np.array([1, 0, 1])
    expected = -(math.log(4 / 7) + math.log(1 / 7)) / 2
    assert unigram_loss(token_shares(train), validation) == pytest.approx(expected)


# Loading and the cache


def test_loading_twice_gives_the_same_and_reads_the_text_once(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_data(config, 3)
    monkeypatch.setattr(tokenizing, "contents", None)
    second, other = load_data(config, 3), load_data(config, 4)
    assert second.description == first.description
    assert second.corpus_sha256 == first.corpus_sha256
    assert second.unigram_loss == first.unigram_loss
    assert np.array_equal(first.train.batch(5, 4), second.train.batch(5, 4))
    assert not np.array_equal(first.train.batch(5, 4), other.train.batch(5, 4))
    assert np.array_equal(first.validation.batch(0, 4), other.validation.batch(0, 4))
    assert "40 documents" in first.description
    assert "\n" not in first.description


def test_the_sides_are_disjoint_documents(config: DataConfig) -> None:
    loaded = load_data(config, 0)
    sides = [
        {text.split(":")[0] for text in loaded.tokenizer.decode(np.where(tokens == 256, 0, tokens)).split("\0") if text}
        for tokens in (loaded.train.tokens, loaded.validation.tokens)
    ]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {f"document {number}" for number in range(40)}
    assert 0.05 < len(loaded.validation.tokens) / len(loaded.train.tokens) < 0.12


def test_the_cache_has_one_entry_for_each_file_however_its_path_is_written(
    config: DataConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "part0" / "link.txt").symlink_to(tmp_path / "other.txt")
    (tmp_path / "other.txt").write_text("a document behind a link " * 5, encoding="utf-8")
    (tmp_path / "linked").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    assert config.cache is not None
    for path in (folder, tmp_path / "linked", Path("corpus")):
        sources = list_sources(path).sources
        assert [*prepared_module._resolved(sources)] == [str(source.path.resolve()) for source in sources]
        load_data(replace(config, path=path), 0)
    assert len([one for one in config.cache.iterdir() if one.is_dir()]) == 1


def test_bpe_is_loaded_from_the_cache(config: DataConfig) -> None:
    pytest.importorskip("tokenizers")
    bpe = replace(config, tokenizer="bpe", bpe_vocab_size=280)
    first, second = load_data(bpe, 0), load_data(bpe, 0)
    assert first.tokenizer.vocab_size == second.tokenizer.vocab_size == 280
    assert "words" in second.tokenizer.decode(second.train.batch(0, 4).ravel())
    assert len(first.train.tokens) < len(load_data(config, 0).train.tokens)


def test_text_is_encoded_with_the_tokenizer_of_a_checkpoint_whatever_the_cache_has(
    config: DataConfig, folder: Path
) -> None:
    pytest.importorskip("tokenizers")
    bpe = replace(config, tokenizer="bpe", bpe_vocab_size=280)
    first = load_data(bpe, 0)
    entries = sorted(path.name for path in config.cache.iterdir())
    same = load_data(bpe, 0, first.tokenizer.files())
    assert np.array_equal(same.train.tokens, first.train.tokens)
    assert sorted(path.name for path in config.cache.iterdir()) == entries, "the same tokenizer: no second entry"

    for path in folder.rglob("*.txt"):
        path.write_text("quite different letters: " + "zyx wvu tsr qpo nml " * 12, encoding="utf-8")
    trained, given = load_data(bpe, 0), load_data(bpe, 0, first.tokenizer.files())
    assert trained.tokenizer.files() != first.tokenizer.files() == given.tokenizer.files()
    assert "zyx wvu" in given.tokenizer.decode(given.train.tokens[:80])
    assert len(given.train.tokens) > len(trained.train.tokens)
    assert np.array_equal(load_data(bpe, 0, first.tokenizer.files()).train.tokens, given.train.tokens)
    assert np.array_equal(load_data(bpe, 0).train.tokens, trained.train.tokens)


def test_another_kind_of_tokenizer_than_the_checkpoints_is_refused(config: DataConfig) -> None:
    pytest.importorskip("tokenizers")
    bpe = replace(config, tokenizer="bpe", bpe_vocab_size=280)
    given = load_data(bpe, 0).tokenizer.files()
    with pytest.raises(UserError, match=r"data.tokenizer is bytes, the checkpoint has bpe; set data.tokenizer to bpe"):
        load_data(config, 0, given)
    with pytest.raises(UserError, match=r"data.tokenizer is bpe, the checkpoint has bytes"):
        load_data(bpe, 0, ByteTokenizer().files())
    with pytest.raises(UserError, match=r"data.bpe_vocab_size is 270, the checkpoint's tokenizer has 280 tokens; set"):
        load_data(replace(bpe, bpe_vocab_size=270), 0, given)
    assert load_data(config, 0, ByteTokenizer().files()).tokenizer.vocab_size == 257


@pytest.mark.parametrize("lost", [True, False])
def test_a_lost_or_changed_tokenizer_in_the_cache_is_trained_again(config: DataConfig, lost: bool) -> None:
    pytest.importorskip("tokenizers")
    bpe = replace(config, tokenizer="bpe", bpe_vocab_size=280)
    expected = load_data(bpe, 0).tokenizer.files()
    (file,) = config.cache.glob("*/tokenizer.json")
    file.unlink() if lost else file.write_text(expected[TOKENIZER].replace("ab", "ba"))
    assert load_data(bpe, 0).tokenizer.files() == expected


def test_one_document_is_split_at_its_tail(config: DataConfig, tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {number}\n" for number in range(200)), encoding="utf-8")
    loaded = load_data(replace(config, path=path), 0)
    num_tokens = path.stat().st_size + 1
    assert len(loaded.validation.tokens) == round(0.1 * num_tokens)
    both = loaded.tokenizer.decode([*loaded.train.tokens, *loaded.validation.tokens])
    assert both == path.read_text(encoding="utf-8")


def test_changed_text_and_changed_settings_are_new_entries(config: DataConfig) -> None:
    assert config.path is not None
    assert config.cache is not None
    before = load_data(config, 0)
    (config.path / "part0" / "0.txt").write_text("other text " * 50, encoding="utf-8")
    after = load_data(config, 0)
    assert after.corpus_sha256 != before.corpus_sha256
    load_data(replace(config, validation_fraction=0.2), 0)
    load_data(replace(config, seq_len=8), 0)  # cuts the same tokens
    assert len(list(config.cache.iterdir())) == 3


def test_leftovers_of_a_killed_process_do_not_matter(config: DataConfig) -> None:
    assert config.cache is not None
    expected = load_data(config, 0).train.batch(0, 50)
    (entry,) = config.cache.iterdir()
    leftover = config.cache / f"{entry.name}.parts"
    entry.rename(leftover)
    (leftover / "00000.bin.0123.tmp").write_bytes(b"half")
    (leftover / "entry").mkdir()
    assert np.array_equal(load_data(config, 0).train.batch(0, 50), expected)
    assert [path.name for path in config.cache.iterdir()] == [entry.name]


@pytest.mark.parametrize("damage", ["missing", "short", "garbled"])
def test_a_damaged_entry_is_written_again(config: DataConfig, damage: str) -> None:
    assert config.cache is not None
    expected = load_data(config, 0)
    (entry,) = config.cache.iterdir()
    if damage == "missing":
        (entry / "summary.json").unlink()
    elif damage == "short":
        os.truncate(entry / "tokens.bin", 100)
    else:
        (entry / "summary.json").write_text("{", encoding="utf-8")
    assert load_data(config, 0).unigram_loss == expected.unigram_loss
    assert [path.name for path in config.cache.iterdir()] == [entry.name]


def test_a_failure_while_writing_leaves_nothing(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.cache is not None

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizing, "contents", fail)
    with pytest.raises(UserError, match=r"cache folder .*No space left.*data\.cache"):
        load_data(config, 0)
    assert not config.cache.exists()


@pytest.mark.parametrize("name", ["notes.txt", "summary.json"])
def test_what_appears_at_the_folder_of_tokens_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "one.txt").write_text("a text " * 50)
    folder, real = tmp_path / "tokens", entry_module.tokenize

    def beside(*words: Any, **more: Any) -> object:
        folder.mkdir()
        (folder / name).write_text("mine")
        return real(*words, **more)

    monkeypatch.setattr(entry_module, "tokenize", beside)
    with pytest.raises(UserError, match="was made by another process meanwhile; choose another folder"):
        tokenize_text(DataConfig(path=tmp_path / "one.txt"), folder, None, is_quiet=True)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: "mine"}


def test_a_process_that_was_faster_wins(config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.cache is not None
    load_data(config, 0)
    (entry,) = config.cache.iterdir()
    real = entry_module.read_summary
    summary = real(entry)
    assert summary is not None
    write_summary(entry, replace(summary, corpus_sha256="theirs"))
    calls: list[Path] = []

    def missing_at_first(folder: Path) -> object:
        calls.append(folder)
        return None if len(calls) == 1 else real(folder)

    monkeypatch.setattr(prepared_module, "read_summary", missing_at_first)
    monkeypatch.setattr(entry_module, "read_summary", missing_at_first)
    assert load_data(config, 0).corpus_sha256 == "theirs"
    assert [path.name for path in config.cache.iterdir()] == [entry.name]


def test_processes_may_race(config: DataConfig) -> None:
    program = (
        "import sys; from pathlib import Path; from pipeloom.config import DataConfig; "
        "from pipeloom.data.text import load_data; "
        "config = DataConfig(path=Path(sys.argv[1]), cache=Path(sys.argv[2]), seq_len=16, validation_fraction=0.1); "
        "print(load_data(config, 0).train.batch(0, 2).tolist(), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(config.path), str(config.cache)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(4)]
    printed = {racer.communicate(timeout=60)[0] for racer in racers}
    assert printed == {f"{load_data(config, 0).train.batch(0, 2).tolist()} False\n"}
    assert config.cache is not None
    assert len(list(config.cache.iterdir())) == 1


def test_the_cache_folder_follows_the_environment(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_data(replace(config, cache=None), 0)
    assert len(list((tmp_path / "xdg" / "pipeloom").iterdir())) == 1


def test_an_unwritable_cache_is_refused(config: DataConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(UserError, match=r"cache folder must be writable.*Not a directory.*data\.cache"):
        load_data(replace(config, cache=tmp_path / "file" / "cache"), 0)


def test_missing_and_empty_text_is_refused(config: DataConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No such file.*nowhere.*data\.path"):
        load_data(replace(config, path=tmp_path / "nowhere"), 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"a file that is not hidden, found none in .*empty; .*data\.path"):
        load_data(replace(config, path=tmp_path / "empty"), 0)
    (tmp_path / "zeros").write_bytes(b"\0" * 1000)
    with pytest.raises(UserError, match=r"at least one UTF-8 text .*found none in .*zeros; set data\.path"):
        load_data(replace(config, path=tmp_path / "zeros"), 0)


def test_too_little_text_is_refused_with_numbers(config: DataConfig, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 99, encoding="utf-8")
    with pytest.raises(
        UserError, match=r"data\.seq_len 16 needs at least 17 tokens .* found 90 and 10 in .*; give more"
    ):
        load_data(replace(config, path=path), 0)
    assert len(load_data(replace(config, path=path, seq_len=8), 0).train.tokens) == 90


@pytest.mark.parametrize("attention", ["window", "document"])
@pytest.mark.parametrize("pack", ["stream", "best-fit"])
def test_each_token_of_a_whole_text_is_a_target_once_and_it_may_be_shorter_than_a_window(
    tmp_path: Path, attention: Literal["window", "document"], pack: Literal["stream", "best-fit"]
) -> None:
    for texts in (["a"], [TEXT * 3, "b" * 40, TEXT]):
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
        config = DataConfig(path=tmp_path, seq_len=30, cache=tmp_path / ".cache", attention=attention, pack=pack)
        found = load_whole(config)
        rows = found.windows.batch(0, found.windows.num_windows)
        assert rows.shape[1] == 31
        tokens = b"".join(text.encode() + b"\0" for text in texts)  # of the end of a text as a zero
        targets = Counter((rows[:, 1:][rows[:, 1:] >= 0] % 256).tolist())
        missing = Counter(tokens)
        missing.subtract(targets)
        firsts = Counter(text.encode()[0] for text in texts)
        if attention == "document":
            assert +missing == firsts
        elif pack == "stream":
            assert +missing == Counter(tokens[:1])
        else:  # the first one of a window, unless the document began in another
            assert +missing <= firsts
            assert missing.total() == np.count_nonzero(rows[:, 0] >= 0)
        assert min(missing.values()) == 0
        with pytest.raises(UserError, match="needs at least 31 tokens each"):
            load_data(config, 0)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "0.txt").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="at least one UTF-8 text"):
        load_whole(replace(config, path=tmp_path / "none"))


def test_a_folder_of_tokens_needs_a_window_of_each_part_and_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match="found 1 and 1 in .*one.txt; give more text, or raise --validation-fraction"):
        tokenize_text(DataConfig(path=tmp_path / "one.txt"), tmp_path / "tokens", None, is_quiet=True)
    assert [one.name for one in tmp_path.iterdir()] == ["one.txt"]
