"""The files of a corpus: what this program wrote below the folder of a text is no part of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.checkpoint.checkpoint_folder import FOLDER, INFO, METADATA, TOKENIZER
from pipeloom.config import DataConfig, OutputConfig, RunConfig
from pipeloom.data.listing import list_sources
from pipeloom.data.prepared import tokenize_text
from pipeloom.data.text import load_data, load_whole
from pipeloom.errors import UserError
from pipeloom.runs.run_folder import ADAPTER_WEIGHTS, CONFIG, DRAFTS, METRICS, WEIGHTS, WEIGHTS_INDEX
from pipeloom.runs.run_start import draft_start


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder of records."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = (f'{{"text": "record {number} of a few words"}}\n' for number in range(60))
    (folder / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def config(text: Path, tmp_path: Path) -> DataConfig:
    return DataConfig(path=text, seq_len=16, cache=tmp_path / "cache")


def run_into(folder: Path, config: DataConfig) -> None:
    """Write the first files of a run, up to its first step."""
    folder.mkdir(parents=True)
    run = draft_start(folder, RunConfig(data=config, output=OutputConfig(folder=folder)))
    run.add_metrics({"step": 1})
    run.close()


def files_of(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")


def test_a_run_in_the_folder_of_its_text_does_not_change_the_text(config: DataConfig, text: Path) -> None:
    before = load_data(config, 0)
    run_into(text / "outputs" / "1", config)
    after = load_data(config, 0)
    assert after.corpus_sha256 == before.corpus_sha256
    line = f"without 1 folder that pipeloom wrote: {text / 'outputs' / '1'} (a run)"
    assert after.description.splitlines()[1:] == [f"           {line}"]
    assert load_whole(config).description.endswith(line)


def test_cache_and_tokens_in_the_folder_of_their_text_do_not_change_it(config: DataConfig, text: Path) -> None:
    config = replace(config, cache=text / "cache", tokenizer="bytes")
    before = load_data(config, 0)
    assert tokenize_text(config, text / "tokens", 1, is_quiet=True).endswith(f"wrote: {text / 'cache'} (the cache)")
    after = load_data(config, 0)
    assert after.corpus_sha256 == before.corpus_sha256
    assert after.description.endswith(f"wrote: {text / 'cache'} (the cache), {text / 'tokens'} (tokens)")


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ([CONFIG, METRICS], "a run"),
        ([f"{DRAFTS}/{CONFIG}"], "a run"),
        ([CONFIG, f"{FOLDER}/step-000001/{INFO}", f"{FOLDER}/step-000001/{METADATA}"], "a run"),
        ([INFO, METADATA], "a checkpoint"),
        ([WEIGHTS, TOKENIZER, "config.json"], "weights"),
        ([WEIGHTS_INDEX, "config.json"], "weights"),
        ([ADAPTER_WEIGHTS, "adapter_config.json"], "weights"),
        (["lock", "00000.npy"], "tokens"),
    ],
)
def test_what_this_program_writes_is_recognized_by_its_files(text: Path, names: list[str], kind: str) -> None:
    folder = text / "part" / "own.parts"
    files_of(folder, *names, "deeper/file.txt")
    files_of(text / "part", "b.txt")
    sources, left_out = list_sources(text)
    assert [one.name for one in sources] == ["a.jsonl", "part/b.txt"]
    assert left_out == (f"{folder} ({kind})",)


@pytest.mark.parametrize(
    "names", [[CONFIG, "x.txt"], [METRICS], ["config.json", TOKENIZER], [INFO], [f"{FOLDER}/a.txt"], ["summary.json"]]
)
def test_other_folders_stay_text(text: Path, names: list[str]) -> None:
    files_of(text / "part", *names)
    sources, left_out = list_sources(text)
    assert {one.name for one in sources} == {"a.jsonl", *(f"part/{name}" for name in names)}
    assert not left_out


def test_the_folder_that_is_named_is_text_whatever_it_has(text: Path) -> None:
    files_of(text, CONFIG, METRICS)
    assert [one.name for one in list_sources(text, text).sources] == ["a.jsonl", CONFIG, METRICS]


def test_a_folder_of_nothing_else_is_refused_with_what_is_left_out(config: DataConfig, text: Path) -> None:
    run_into(text / "runs" / "1", config)
    with pytest.raises(UserError, match=r"found none in .*runs without 1 folder that pipeloom wrote: .*1 \(a run\)"):
        load_data(replace(config, path=text / "runs"), 0)


def test_of_many_left_out_folders_a_message_names_some(config: DataConfig, text: Path) -> None:
    for number in range(8):
        files_of(text / f"{number}", CONFIG, METRICS)
    description = load_data(config, 0).description
    assert "without 8 folders that pipeloom wrote: " in description
    assert description.count("(a run)") == 5
    assert description.endswith(" and 3 more")
