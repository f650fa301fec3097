"""Files of tokens that were changed: the windows in a changed block are refused, all others are read."""

import json
import os
import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeloom.config import DataConfig
from pipeloom.data.checksums import BLOCK_BYTES, open_checked, write_checksum
from pipeloom.data.prepared import tokenize_text
from pipeloom.data.text import load_data, load_whole
from pipeloom.errors import UserError


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """A text of some five blocks of tokens."""
    words = np.random.default_rng(0).integers(97, 123, 5 * BLOCK_BYTES // 2, np.uint8).tobytes().decode()
    (tmp_path / "a.txt").write_text(words, encoding="utf-8")
    return DataConfig(path=tmp_path / "a.txt", seq_len=64, cache=tmp_path / "cache")


def change(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def refused(config: DataConfig) -> list[int]:
    """Numbers of the windows that cannot be read."""
    windows = load_whole(config).windows
    found: list[int] = []
    for number in range(windows.num_windows):
        try:
            windows.batch(number, 1)
        except UserError:
            found.append(number)
    return found


@pytest.mark.parametrize("pack", ["stream", "best-fit"])
def test_windows_in_a_changed_block_are_refused_and_no_others(config: DataConfig, pack: str) -> None:
    config = replace(config, pack=pack)
    assert refused(config) == []
    (file,) = (config.cache or Path()).glob("*/tokens.bin")
    place = 2 * BLOCK_BYTES + 7
    change(file, place)
    wrong = refused(config)
    if pack == "stream":
        border = 2 * BLOCK_BYTES // 2
        assert wrong == list(range((border - 1) // 64, (border + BLOCK_BYTES // 2 - 1) // 64 + 1))
    assert 0 < len(wrong) <= BLOCK_BYTES // 2 // 64 + 2
    with pytest.raises(UserError, match=r"bytes 32,768 to 49,151 are damaged; copy the folder again"):
        load_data(config, 0).train.batch(0, 400)
    change(file, place)
    assert refused(config) == []


def test_a_changed_target_is_refused_at_the_start(tmp_path: Path, config: DataConfig) -> None:
    lines = (json.dumps({"prompt": f"{number} =", "completion": f"{number}"}) for number in range(200))
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = replace(config, path=tmp_path / "a.jsonl")
    load_data(config, 0)
    (file,) = (config.cache or Path()).glob("*/targets.bin")
    change(file, 3)
    with pytest.raises(UserError, match=r"targets\.bin was changed"):
        load_data(config, 0)


@pytest.mark.parametrize("name", ["tokens.idx", "counts.npy"])
def test_changed_borders_and_counts_are_refused_at_the_start(tmp_path: Path, config: DataConfig, name: str) -> None:
    tokenize_text(config, tmp_path / "tokens", 1, is_quiet=True)
    config = replace(config, path=tmp_path / "tokens", cache=None)
    load_data(config, 0)
    change(tmp_path / "tokens" / name, -8)
    with pytest.raises(UserError, match=rf"{re.escape(name)} was changed: .* copy the folder again"):
        load_data(config, 0)


def test_a_summary_with_another_number_is_damaged(tmp_path: Path, config: DataConfig) -> None:
    tokenize_text(config, tmp_path / "tokens", 1, is_quiet=True)
    summary, config = tmp_path / "tokens" / "summary.json", replace(config, path=tmp_path / "tokens", cache=None)
    tree = json.loads(summary.read_text(encoding="utf-8"))
    moved = {"train_tokens": tree["train_tokens"] + 1, "validation_tokens": tree["validation_tokens"] - 1}
    summary.write_text(json.dumps({**tree, **moved}, indent=2) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="is a folder of tokens, which are damaged"):
        load_data(config, 0)
    del tree["sha256"]  # of an older version
    summary.write_text(json.dumps({**tree, **moved}), encoding="utf-8")
    load_data(config, 0)


def test_tokens_that_are_read_where_they_are_have_checksums_too(tmp_path: Path, config: DataConfig) -> None:
    tokenize_text(config, tmp_path / "tokens", 1, is_quiet=True)
    config = replace(config, path=tmp_path / "tokens" / "tokens.bin")
    assert refused(config) == []
    file = tmp_path / "tokens" / "tokens.bin"
    times = file.stat()
    change(file, 0)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # an entry is found by it, and a disk changes bytes alone
    assert refused(config) == list(range(BLOCK_BYTES // 2 // 64))


def test_a_folder_without_checksums_is_read_and_damaged_checksums_are_refused(
    tmp_path: Path, config: DataConfig
) -> None:
    tokenize_text(config, tmp_path / "tokens", 1, is_quiet=True)
    config = replace(config, path=tmp_path / "tokens", cache=None)
    sums = tmp_path / "tokens" / "tokens.bin.crc32.npy"
    for content in (b"", sums.read_bytes()[:-5]):
        sums.write_bytes(content)
        with pytest.raises(UserError, match=r"tokens\.bin\.crc32\.npy is damaged; copy the folder again"):
            load_data(config, 0)
    sums.unlink()
    change(tmp_path / "tokens" / "tokens.bin", 0)
    assert refused(config) == []


def test_each_block_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (3 * BLOCK_BYTES // 256) + b"end.")
    write_checksum(tmp_path, "name", file)
    checked = open_checked(tmp_path, "name", file, 2, "copy it again")
    assert checked is not None
    real, sizes = zlib.crc32, list[int]()

    def noted(content: bytes) -> int:
        sizes.append(len(content))
        return real(content)

    monkeypatch.setattr(zlib, "crc32", noted)
    for _ in range(2):
        checked.check(BLOCK_BYTES // 2, 0, 1)
    assert sizes == [BLOCK_BYTES]
    checked.check(0, 0, (3 * BLOCK_BYTES + 4) // 2)
    checked.check(0, 0, 1)
    assert sizes == [BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES, 4]
