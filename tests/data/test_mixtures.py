"""Several sources: whose turn it is, what a checkpoint stores, and that new weights neither lose nor repeat windows."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint, read_info
from pipeloom.cli import main
from pipeloom.config import DataConfig, RunConfig, SourceConfig, find_problems
from pipeloom.config.file import format_run, parse_run, read_run_file
from pipeloom.data.text import load_data
from pipeloom.data.windows import Mixture, TokenWindows, Turns, resumed
from pipeloom.errors import UserError

SEQ_LEN = 4


def sources(*sizes: int) -> list[TokenWindows]:
    """Windows whose tokens are all the number of the source; the first one is the number of the window."""
    found = []
    for source, size in enumerate(sizes):
        tokens = np.full((size, SEQ_LEN + 1), source, np.uint16)
        tokens[:, 0] = np.arange(size)
        found.append(TokenWindows(tokens.ravel(), SEQ_LEN, seed=source))
    return found


def mixture(weights: tuple[float, ...], sizes: tuple[int, ...] = (7, 40, 11), names: str = "abc") -> Mixture:
    return Mixture(sources(*sizes), weights, [(name, f"/{name}") for name in names[: len(sizes)]])


def seen(rows: np.ndarray) -> list[tuple[int, int]]:
    """Source and window of each row."""
    return [(int(row[1]), int(row[0])) for row in rows]


def test_each_source_is_within_one_window_of_its_share_at_each_of_a_million_draws() -> None:
    turns, total = Turns([0.5, 0.3, 0.1]), 9
    assert turns.weights == (5, 3, 1)
    # After nine draws each has its share, so that the draws repeat: the first and the last nine show all of them.
    for begin in (0, 111_111):
        counts = [weight * begin for weight in turns.weights]
        first = list(counts)
        for draw in range(total * begin + 1, total * begin + total + 1):
            counts[turns.next(counts)] += 1
            off = [abs(count - draw * weight / total) for count, weight in zip(counts, turns.weights, strict=True)]
            assert max(off) < 1
        assert [count - before for count, before in zip(counts, first, strict=True)] == [5, 3, 1]


def test_in_the_shares_of_their_sizes_each_window_comes_once() -> None:
    found = mixture((7, 40, 11)).batch(0, 58)
    assert len(set(seen(found))) == 58


@given(st.lists(st.integers(1, 40) | st.floats(0.001, 9).map(lambda x: round(x, 3)), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_counts_keep_to_their_shares_with_any_weights(weights: list[float]) -> None:
    turns, counts = Turns(weights), [0] * len(weights)
    total, most = sum(turns.weights), 1 - 1 / max(2, 2 * len(weights) - 2)
    for draw in range(1, 150):
        counts[turns.next(counts)] += 1
        off = [abs(count - draw * weight / total) for count, weight in zip(counts, turns.weights, strict=True)]
        assert max(off) <= most + 1e-9


def test_each_source_is_read_in_its_own_epochs() -> None:
    found = seen(mixture((5, 3, 1)).batch(0, 270))
    assert Counter(source for source, _ in found) == {0: 150, 1: 90, 2: 30}
    for source, size in enumerate((7, 40, 11)):
        own = [window for number, window in found if number == source]
        for begin in range(0, len(own) - size, size):
            assert sorted(own[begin : begin + size]) == list(range(size))


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_a_resumed_run_reads_what_follows(before: int, batch_size: int, later: int) -> None:
    whole = seen(mixture((5, 3, 1)).batch(0, before + 3 * later))
    read = mixture((5, 3, 1))
    for index in range(before // batch_size):
        read.batch(index, batch_size)
    stored = json.loads(json.dumps(read.position(before)))
    assert sum(one["windows"] for one in stored) == before
    again = mixture((10, 6, 2)).resumed(before, stored, "mix")
    found = [row for index in range(3) for row in seen(again.batch(index, later))]
    assert found == whole[before:]
    assert [row for index in (2, 0) for row in seen(again.batch(index, later))] == [*found[2 * later :], *found[:later]]


def test_new_weights_lose_and_repeat_nothing() -> None:
    first = mixture((5, 3, 1))
    rows = [row for index in range(50) for row in seen(first.batch(index, 8))]
    second = mixture((1, 1, 8)).resumed(400, first.position(400), "mix")
    rows += [row for index in range(100) for row in seen(second.batch(index, 8))]
    third = mixture((1, 1, 8)).resumed(1200, second.position(800), "mix")
    rows += seen(third.batch(0, 10))
    assert Counter(source for source, _ in rows[400:1200]) == {0: 80, 1: 80, 2: 640}
    for source, windows in enumerate(sources(7, 40, 11)):
        own = [window for number, window in rows if number == source]
        assert own == windows.read(range(len(own)))[:, 0].tolist()


def test_a_source_that_is_left_out_goes_on_when_it_returns_and_a_new_one_begins() -> None:
    first = mixture((1, 1, 2))
    rows = seen(first.batch(0, 40))
    without = mixture((1, 1), (7, 40)).resumed(40, first.position(40), "mix")
    rows += seen(without.batch(0, 20))
    stored = without.position(20)
    assert [one["windows"] for one in stored] == [20, 20, 20]
    back = mixture((1, 1, 1, 1), (7, 40, 11, 5), "abcd").resumed(60, stored, "mix")
    rows += seen(back.batch(0, 40))
    for source, windows in enumerate(sources(7, 40, 11, 5)):
        own = [window for number, window in rows if number == source]
        assert own == windows.read(range(len(own)))[:, 0].tolist()
    assert Counter(source for source, _ in rows) == {0: 30, 1: 30, 2: 30, 3: 10}


def test_a_run_of_one_text_may_get_more_of_them() -> None:
    mixed = mixture((1, 1), (7, 40)).resumed(9, [], "b")
    rows = seen(mixed.batch(0, 20))
    expected = sources(7, 40)[1].read(range(9, 19))[:, 0].tolist()
    assert [window for source, window in rows if source == 1] == expected


def test_copies_of_a_text_go_on_each_behind_its_own_windows() -> None:
    def of(*paths: str) -> Mixture:
        return Mixture(sources(40, 40), (1, 3), [("same", path) for path in paths])

    expected = seen(of("/a", "/b").batch(0, 32))[8:]
    stored = of("/a", "/b").position(8)
    for paths in (("/a", "/b"), ("/new", "/b"), ("/c", "/d")):
        again = of(*paths).resumed(8, stored, "mix")
        assert seen(again.batch(0, 24)) == expected
        assert [one["windows"] for one in again.position(24)] == [8, 24]


def test_one_text_of_several_goes_on_behind_its_own_windows_and_the_others_stay_noted() -> None:
    first = mixture((1, 3), (7, 40))
    rows = seen(first.batch(0, 8))
    stored = first.position(8)
    for name, expected in ((("b", "/b"), range(6, 10)), (("new", "/moved"), range(4))):
        alone = resumed(sources(7, 40)[1], name, 8, stored, "mix")
        found = [window for _, window in seen(alone.batch(0, 4))]
        assert found == sources(7, 40)[1].read(expected)[:, 0].tolist()
    alone = resumed(sources(7, 40)[1], ("b", "/b"), 8, stored, "mix")
    rows += seen(alone.batch(0, 4))
    again = resumed(sources(7, 40)[1], ("b", "/b"), 12, alone.position(4), "b")
    rows += seen(again.batch(0, 4))
    rows += seen(mixture((1, 1), (7, 40)).resumed(16, again.position(4), "b").batch(0, 8))
    for source, windows in enumerate(sources(7, 40)):
        own = [window for number, window in rows if number == source]
        assert own == windows.read(range(len(own)))[:, 0].tolist()


# Runs


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("prose", "code")]
    for folder, text in zip(found, ("some words and more words. ", "def one(): return 1\n"), strict=True):
        folder.mkdir()
        for number in range(20):
            (folder / f"{number}.txt").write_text(f"{number} " + text * 20, encoding="utf-8")
    return found


def data_of(folders: list[Path], cache: Path, weights: tuple[float, ...] = (3, 1)) -> DataConfig:
    given = tuple(SourceConfig(path=path, weight=weight) for path, weight in zip(folders, weights, strict=True))
    return DataConfig(sources=given, seq_len=16, cache=cache)


def test_sources_are_tokenized_once_for_all_weights(folders: list[Path], tmp_path: Path) -> None:
    data = load_data(data_of(folders, tmp_path / "cache"), 0)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    rows = [data.tokenizer.decode(row) for row in data.train.batch(0, 80)]
    assert 18 <= sum("de" in row or "return" in row or "one" in row for row in rows) <= 22
    assert "2 sources" in data.description
    assert "75.0%" in data.description
    other = load_data(data_of(folders, tmp_path / "cache", (1, 9)), 0)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert np.array_equal(other.validation.batch(0, 8), data.validation.batch(0, 8)), "losses stay comparable"
    assert other.corpus_sha256 == data.corpus_sha256


def test_files_that_are_in_several_sources_are_named(folders: list[Path], tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", folders[0] / "3.txt"
    file.write_text("a longer text " * 80, encoding="utf-8")
    link = tmp_path / "link.txt"
    link.symlink_to(file)
    line = f"in several sources, such as {file} in {{}} and {{}}: one may train on what another holds out"
    for paths in ([folders[0], file], [link, folders[0]], [file, link]):
        description = load_data(data_of(paths, cache), 0).description
        assert description.endswith(f"1 file is {line.format(*paths)}")
    assert "several sources" not in load_data(data_of(folders, cache), 0).description
    (tmp_path / "all").symlink_to(folders[0])
    assert "20 files are in several sources" in load_data(data_of([folders[0], tmp_path / "all"], cache), 0).description


def test_one_file_of_records_by_several_fields_is_several_texts(tmp_path: Path) -> None:
    records, link = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = (json.dumps({"text": f"text {number} " * 9, "more": f"more {number} " * 9}) for number in range(40))
    records.write_text("\n".join(lines), encoding="utf-8")
    link.symlink_to(records)
    for field, is_twice in (("more", False), ("text", True)):
        both = SourceConfig(path=records), SourceConfig(path=link, field=field)
        found = load_data(DataConfig(sources=both, seq_len=16, cache=tmp_path / "cache"), 0)
        assert ("1 file is in several sources" in found.description) == is_twice


def test_byte_pair_encoding_is_trained_on_all_sources(folders: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = replace(data_of(folders, tmp_path / "cache"), tokenizer="bpe", bpe_vocab_size=300)
    data, again = load_data(config, 0), load_data(config, 0)
    assert len(data.tokenizer.encode(b"words return")) <= 4
    assert again.tokenizer.files() == data.tokenizer.files()
    assert np.array_equal(load_data(config, 0, data.tokenizer.files()).train.batch(0, 4), data.train.batch(0, 4))
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_run_file_has_a_table_for_each_source(folders: list[Path], tmp_path: Path) -> None:
    config = replace(RunConfig(), data=data_of(folders, tmp_path / "cache"))
    (tmp_path / "run.toml").write_text(format_run(config))
    assert "[[data.sources]]" in (tmp_path / "run.toml").read_text()
    assert read_run_file(tmp_path / "run.toml")[0].data == config.data
    (tmp_path / "relative.toml").write_text(
        '[[data.sources]]\npath = "prose"\n[[data.sources]]\npath = "code"\nweight = 2'
    )
    found, problems = read_run_file(tmp_path / "relative.toml")
    assert not problems
    assert [(one.path, one.weight) for one in found.data.sources or ()] == [(folders[0], 1.0), (folders[1], 2)]


WRONG = {
    "[data]\nsources = []": "data.sources must have at least one source, found none; leave it out for one text",
    '[[data.sources]]\npath = ""': "data.sources.path must be a path, found ''",
    "[[data.sources]]\nweight = 1": "data.sources[1].path must be given, found {'weight': 1}",
    '[[data.sources]]\npath = "a"\nweight = "x"': "data.sources[1].weight must be a number, found 'x'",
    '[[data.sources]]\npath = "a"\nwieght = 1': "there is no setting 'data.sources.wieght'; did you mean",
    '[[data.sources]]\npath = "a"\nweight = 0': "the weight of each of data.sources must be above 0 and finite",
    '[[data.sources]]\npath = "a"\n[[data.sources]]\npath = "a"': "must have a path of its own, found a twice; add",
    '[[data.sources]]\npath = "a"\nfield = "x"\n[[data.sources]]\npath = "a"': "twice for the fields x, text",
    '[[data.sources]]\npath = "gone"': "the path of each of data.sources must be a file or a folder, found nothing",
    '[data]\npath = "a"\n[[data.sources]]\npath = "a"': "data.path and data.sources, which have a path each, are",
    '[data]\nfield = "b"\n[[data.sources]]\npath = "a"': "data.field and data.sources, which have a field each, are",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_sources_have_one_message(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("text")
    config, problems = parse_run(tomllib.loads(text))
    problems += find_problems(config)
    assert len(problems) == 1
    assert WRONG[text] in problems[0]


def test_a_flag_cannot_set_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data.sources", "a"]) == 2
    assert (
        "--data.sources is a list of tables, which no flag can set; write [[data.sources]]" in capsys.readouterr().err
    )


def test_runs_go_on_with_other_weights_and_evaluate_one_text(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"model": {"num_layers": 1, "hidden_size": 8, "num_heads": 1}, "layout": {"pp": 1, "loops": 1}}
    small["layout"] |= {"num_microbatches": 2, "microbatch_size": 2}
    training = {"steps": 4, "predict": False, "sample_tokens": 0, "validation_batches": 1}
    tree = {**small, "training": training, "checkpoint": {"every": 2}}
    config, problems = parse_run(tree)
    assert not problems
    file = tmp_path / "run.toml"
    file.write_text(format_run(replace(config, data=data_of(folders, tmp_path / "cache"))))
    assert main(["train", str(file), "--output.folder", str(tmp_path / "run")]) == 0
    info = read_info(find_checkpoint(tmp_path / "run"))
    assert [(one["windows"], one["weight"]) for one in info.sources] == [(12, 3), (4, 1)]
    file.write_text(format_run(replace(config, data=data_of(folders, tmp_path / "cache", (1, 1)))))
    capsys.readouterr()
    resumed = ["--checkpoint.resume", str(tmp_path / "run"), "--output.folder", str(tmp_path / "on")]
    assert main(["train", str(file), *resumed, "--training.steps", "6"]) == 0
    assert "since data.sources changed" in capsys.readouterr().out
    info = read_info(find_checkpoint(tmp_path / "on"))
    assert [(one["windows"], one["before"]) for one in info.sources] == [(16, 12), (8, 4)]
    assert main(["evaluate", str(tmp_path / "on")]) == 0
    assert "its validation part" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path / "on"), "--data.path", str(folders[0])]) == 0
    assert f"{folders[0]}: 20 documents" in capsys.readouterr().out
    with pytest.raises(UserError, match="seq_len"):
        load_data(replace(data_of(folders, tmp_path / "cache"), seq_len=100_000), 0)
