"""Best-fit packing: whole documents, each token once, and windows that are as full as the best of its kind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.config import DataConfig
from pipeloom.data.packing import PackedWindows, pack, with_targets
from pipeloom.data.text import load_data
from pipeloom.execute.stages.batch import Batch
from pipeloom.model.cross_entropy import IGNORED

FILLER = 999


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(2, 16))
def test_each_token_is_in_one_window_and_only_long_documents_are_cut(sizes: list[int], size: int) -> None:
    ends = np.cumsum(sizes)
    found = pack(ends, size)
    parts = zip(found.begins, found.sizes, strict=True)
    tokens = np.concatenate([np.arange(begin, begin + length) for begin, length in parts])
    assert np.array_equal(np.sort(tokens), np.arange(ends[-1]))
    used = np.add.reduceat(found.sizes, found.windows[:-1])
    assert used.max() <= size
    starts = {0, *ends.tolist()}
    for begin, length in zip(found.begins.tolist(), found.sizes.tolist(), strict=True):
        document = int(np.searchsorted(ends, begin, side="right"))
        assert begin in starts or (begin - (ends[document] - sizes[document])) % size == 0
        assert begin + length in starts or length == size
    # Best fit leaves no two windows that would fit into one.
    assert len(used) < 2 or np.sort(used)[:2].sum() > size


def test_the_fullest_window_with_room_gets_the_next_document() -> None:
    found = pack(np.cumsum([6, 5, 4, 3, 2]), 10)
    by_window = np.split(found.sizes, found.windows[1:-1])
    assert [sorted(one.tolist()) for one in by_window] == [[4, 6], [2, 3, 5]]


def test_what_fills_a_window_is_no_target() -> None:
    windows = PackedWindows(
        np.arange(30, dtype=np.uint16), 7, None, packed=pack(np.array([6, 9, 11, 30]), 8), filler=FILLER
    )
    rows = windows.batch(0, windows.num_windows)
    assert sorted(rows[rows >= 0].tolist()) == list(range(30))
    assert set(rows[rows < 0].tolist()) == {~FILLER}
    batch = Batch.of(rows, 1, torch.device("cpu"))
    inputs, targets = batch.inputs[0], batch.targets[0]
    assert set(inputs.flatten().tolist()) <= {*range(30), FILLER}
    assert ((targets == IGNORED) == (torch.from_numpy(rows[:, 1:]) < 0)).all()
    assert batch.num_valid == int((rows[:, 1:] >= 0).sum())


def test_windows_without_targets_are_left_out() -> None:
    found = pack(np.array([4, 8, 12, 16]), 4)
    counts = np.zeros(16, np.bool_)
    counts[[4, 9, 12, 15]] = True  # 4 is the first of its window, which nothing predicts
    kept = with_targets(found, counts)
    assert kept.begins.tolist() == [8, 12]
    assert kept.windows.tolist() == [0, 1, 2]
    assert with_targets(found, np.zeros(16, np.bool_)).num_windows == 0


def test_a_step_without_targets_has_loss_0() -> None:
    batch = Batch.of(np.full((2, 5), ~3), 1, torch.device("cpu"))
    assert float(batch.loss(torch.randn(2, 4, 7), 0)) == 0


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_a_run_packs_training_and_validation(fraction: float, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text(f"{number:02} " + "word " * (number % 6), encoding="utf-8")
    config = DataConfig(path=tmp_path, seq_len=31, cache=tmp_path / ".cache", validation_fraction=fraction)
    stream, packed = load_data(config, 0), load_data(replace(config, pack="best-fit"), 0)
    assert "of packed windows filled up" in packed.description
    assert len(list((tmp_path / ".cache").iterdir())) == 1, "the same tokens"
    for whole, found in ((stream.train.tokens, packed.train), (stream.validation.tokens, packed.validation)):
        rows = found.batch(0, found.num_windows)
        assert sorted(rows[rows >= 0].tolist()) == sorted(whole.tolist())
        for row in rows:
            text = packed.tokenizer.decode(row[row >= 0])
            assert text[:2].isdigit(), "each begins with the beginning of a document"
