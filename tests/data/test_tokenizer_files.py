"""Tokenizers of other programs: which tokens they give, what is stored of them, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from given_tokenizers import TEXT, folder_of, trained

from pipeloom import load_run
from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.config import DataConfig, find_problems
from pipeloom.config.tokenizer_files import num_tokens, tokenizer_files
from pipeloom.data import tokenizer as module
from pipeloom.data.text import load_data, load_whole
from pipeloom.data.tokenizer import tokenizer_from
from pipeloom.errors import ConfigError, UserError

tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "unigram"])
def test_long_texts_get_the_tokens_that_the_library_gives(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    made = trained(kind)
    own = tokenizer_from(tokenizer_files(folder_of(made, tmp_path / kind)))
    text = "".join(TEXT + f"{number} words\n" * (number % 3) for number in range(60))
    made.encode_special_tokens = True
    whole = made.encode(text, add_special_tokens=False).ids
    assert own.encode(text.encode()).tolist() == whole
    monkeypatch.setattr(module, "_PART_CHARS", 230)
    monkeypatch.setattr(module, "_CONTEXT_CHARS", 60)
    assert len(module._cuts(text, 0, len(text))) > 10
    assert own.encode(text.encode()).tolist() == whole
    flat = text.replace("\n", " ")  # nowhere to cut but between words, or inside them
    assert own.encode(flat.encode()).tolist() == made.encode(flat, add_special_tokens=False).ids


def test_a_file_trains_and_the_run_needs_it_no_more(tmp_path: Path) -> None:
    path = folder_of(trained("llama3"), tmp_path / "given")
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(TEXT * 5, encoding="utf-8")
    config = DataConfig(path=tmp_path / "text", tokenizer=path, seq_len=8, cache=tmp_path / "cache")
    data = load_data(config, 0)
    whole = load_whole(config).windows.tokens
    tokens = whole.tolist()
    begin, end = (tokenizer_ids(path)[name] for name in ("<s>", "</s>"))
    assert tokens[0] == begin
    assert [place for place, token in enumerate(tokens) if token == begin][1:] == [
        place + 1 for place, token in enumerate(tokens[:-1]) if token == end
    ], "a text that spells <s> is text"
    assert str(path) in data.description
    stored = data.tokenizer.files()
    assert np.array_equal(load_whole(config, stored).windows.tokens, whole)
    (path / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": "<unk>"}))
    with pytest.raises(UserError, match="the checkpoint has another one; set data.tokenizer as in the run"):
        load_data(config, 0, stored)
    shutil.rmtree(path)
    again = load_data(config, 0, stored)
    assert np.array_equal(load_whole(config, stored).windows.tokens, whole)
    assert "tokenizer of the checkpoint, since" in again.description
    with pytest.raises(UserError, match="data.tokenizer is bytes, the checkpoint has one from a file"):
        load_data(replace(config, tokenizer="bytes"), 0, stored)


def tokenizer_ids(path: Path) -> dict[str, int]:
    return tokenizers.Tokenizer.from_file(str(path / TOKENIZER)).get_vocab()


def test_another_file_gives_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 30, encoding="utf-8")
    config = DataConfig(path=tmp_path / "text.txt", seq_len=8, cache=tmp_path / "cache")
    first = load_whole(replace(config, tokenizer=folder_of(trained("gpt2"), tmp_path / "a"))).windows
    second = load_whole(replace(config, tokenizer=folder_of(trained("unigram"), tmp_path / "b"))).windows
    assert not np.array_equal(first.tokens[:50], second.tokens[:50])


@pytest.mark.parametrize("adds", [True, False, None])
def test_the_configuration_decides_about_the_first_token(adds: bool | None, tmp_path: Path) -> None:
    path = folder_of(trained("gpt2"), tmp_path / "a", add_bos_token=adds, bos_token="<unk>")
    found = tokenizer_from(tokenizer_files(path)).begin_of_text
    assert found == {True: (tokenizer_ids(path)["<unk>"],), False: (), None: (tokenizer_ids(path)["<s>"],)}[adds]


def test_a_limit_of_length_cuts_no_document(tmp_path: Path) -> None:
    made = trained("gpt2")
    made.enable_truncation(4)
    made.enable_padding(length=4)
    own = tokenizer_from(tokenizer_files(folder_of(made, tmp_path / "a")))
    assert own.decode(own.encode(TEXT.encode())) == TEXT


def test_unused_numbers_are_rows_of_the_embedding(tmp_path: Path) -> None:
    path = folder_of(trained("gpt2"), tmp_path / "a")
    tree = json.loads((path / TOKENIZER).read_text())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 999, "content": "<far>"})
    (path / TOKENIZER).write_text(json.dumps(tree))
    assert num_tokens(path) == 1000


def test_a_model_with_a_smaller_vocabulary_is_refused_and_a_larger_one_is_not(tmp_path: Path) -> None:
    path = folder_of(trained("gpt2"), tmp_path / "a")
    with pytest.raises(
        ConfigError, match=rf"model.vocab_size must be at least {num_tokens(path)}, .*{path}, found 100"
    ):
        load_run(data={"tokenizer": str(path)}, model={"vocab_size": 100})
    assert not find_problems(load_run(data={"tokenizer": str(path)}, model={"vocab_size": 512}), trains=False)
    assert load_run(data={"tokenizer": str(path / TOKENIZER)}).data.vocab_size == num_tokens(path)


def test_templates_are_stored_from_a_file_of_their_own_too(tmp_path: Path) -> None:
    path = folder_of(trained("gpt2"), tmp_path / "a", chat_template=[{"name": "default", "template": "{{ 1 }}"}])
    assert json.loads(tokenizer_files(path)[TOKENIZER_CONFIG])["chat_template"] == "{{ 1 }}"
    (path / "chat_template.jinja").write_text("{{ 2 }}")
    assert json.loads(tokenizer_files(path)[TOKENIZER_CONFIG])["chat_template"] == "{{ 2 }}"


WRONG = {
    "no file": ({}, "must contain a tokenizer.json, found none; transformers writes one"),
    "no json": ({TOKENIZER: "{"}, "must be a tokenizer.json of the tokenizers library, found another file: it is not"),
    "another file": ({TOKENIZER: '{"model": 7}'}, "must be a tokenizer.json of the tokenizers library"),
    "no end": (
        {TOKENIZER: '{"model": {"vocab": {"a": 0}}}'},
        "must have an end-of-text token, found no eos_token",
    ),
    "unknown end": (
        {TOKENIZER: '{"model": {"vocab": {"a": 0}}}', TOKENIZER_CONFIG: '{"eos_token": "<e>"}'},
        "found eos_token '<e>', which is none of its tokens",
    ),
    "no object": ({TOKENIZER: '{"model": {"vocab": {"a": 0}}}', TOKENIZER_CONFIG: "[]"}, "must be a JSON object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_tokenizer_is_one_problem_of_the_run(name: str, tmp_path: Path) -> None:
    files, expected = WRONG[name]
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    problems = find_problems(replace(load_run(), data=DataConfig(tokenizer=tmp_path)))
    assert len(problems) == 1
    assert problems[0].startswith("data.tokenizer must be bytes, bpe, a tokenizer.json or a folder with one; ")
    assert expected in problems[0]


def test_dropout_would_give_other_tokens_each_time(tmp_path: Path) -> None:
    path = folder_of(trained("gpt2"), tmp_path / "a")
    tree = json.loads((path / TOKENIZER).read_text())
    tree["model"]["dropout"] = 0.1
    (path / TOKENIZER).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"found model\.dropout; set it to null"):
        tokenizer_from(tokenizer_files(path))
