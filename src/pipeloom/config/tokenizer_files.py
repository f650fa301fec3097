"""A tokenizer that another program made: its ``tokenizer.json``, and what the files beside it contain about it.

Only JSON and text are read. Nothing that a folder names is imported or executed.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG
from pipeloom.errors import UserError
from pipeloom.system.files import parse_json, read_text

_SPECIAL = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"
_BESIDE = (TOKENIZER_CONFIG, _SPECIAL, _TEMPLATE)
_MOST_BYTES = 1 << 28
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]")  # noqa: RUF001
"""Names of end-of-text tokens, for a ``tokenizer.json`` without a file that names its own."""


def tokenizer_files(path: Path) -> Mapping[str, str]:
    """The two files that a run stores of a tokenizer: name -> text.

    ``tokenizer.json`` is unchanged. ``tokenizer_config.json`` has what a run needs of the files beside it:
    ``eos_token``, and where the folder has them ``bos_token``, ``add_bos_token`` and ``chat_template``.

    Args:
        path: a ``tokenizer.json``, or a folder of Hugging Face that contains one.

    Raises:
        UserError: there is none, it cannot be read, or nothing names its end-of-text token.
    """
    file = _file_of(path)
    return _read(file, tuple(_stamp(file.with_name(name)) for name in (file.name, *_BESIDE)))


def num_tokens(path: Path) -> int:
    """The vocabulary size that a tokenizer needs: its largest token + 1.

    Raises:
        UserError: as ``tokenizer_files``.
    """
    return _count(tokenizer_files(path)[TOKENIZER])


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / TOKENIZER).is_file():
        advice = "transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise UserError(f"{path} must contain a {TOKENIZER}, found none; {advice}")
    return path / TOKENIZER


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=4)
def _read(file: Path, _stamps: tuple[tuple[int, int] | None, ...]) -> Mapping[str, str]:
    text = read_text(file, "the tokenizer", _MOST_BYTES)
    names = _tokens(text, file)
    beside = [_object(file.with_name(name)) for name in (_SPECIAL, TOKENIZER_CONFIG)]
    given = {key: value for tree in beside for key, value in tree.items() if value is not None}
    end = _content(given.get("eos_token")) or next((one for one in _ENDS if one in names), None)
    if end not in names:
        found = "no eos_token" if end is None else f"eos_token {end!r}, which is none of its tokens"
        raise UserError(
            f"the tokenizer {file} must have an end-of-text token, found {found}; "
            f"set eos_token in {file.with_name(TOKENIZER_CONFIG)}"
        )
    begin = _content(given.get("bos_token"))
    if given.get("add_bos_token") is True and begin not in names:
        found = "no bos_token" if begin is None else f"bos_token {begin!r}, which is none of its tokens"
        raise UserError(
            f"the tokenizer {file} must have a token that begins each text, as its add_bos_token is true, found "
            f"{found}; set bos_token in {file.with_name(TOKENIZER_CONFIG)}, or add_bos_token to false"
        )
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    if begin:
        settings["bos_token"] = begin
    if isinstance(given.get("add_bos_token"), bool):
        settings["add_bos_token"] = given["add_bos_token"]
    if template := _template(given.get("chat_template"), file.with_name(_TEMPLATE)):
        settings["chat_template"] = template
    return {TOKENIZER: text, TOKENIZER_CONFIG: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}


@lru_cache(maxsize=4)
def _count(text: str) -> int:
    return max(_tokens(text, TOKENIZER).values()) + 1


def _tokens(text: str, file: object) -> dict[str, int]:
    """Token -> number, of a ``tokenizer.json``."""
    try:
        tree = parse_json(text)
        vocabulary = tree["model"]["vocab"]
        # A list of texts with their scores, in models of the kind Unigram.
        listed = {one[0]: number for number, one in enumerate(vocabulary)} if isinstance(vocabulary, list) else {}
        added = {one["content"]: one["id"] for one in tree.get("added_tokens") or ()}
        found = {**(listed or vocabulary), **added}
        _ = max(found.values()) + 1  # an error without tokens, and if they are no numbers
    except (UserError, ValueError, AttributeError, IndexError, KeyError, TypeError) as error:
        why = f": {error}" if isinstance(error, UserError) else ""
        raise UserError(f"{file} must be a tokenizer.json of the tokenizers library, found another file{why}") from None
    return found


def _object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        tree = parse_json(read_text(file))
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file} must be a JSON object, found {type(tree).__name__}")
    return tree


def _content(token: Any) -> str | None:
    """The text of a special token, which may be an object with settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template(given: Any, file: Path) -> str | None:
    """The chat template: of its own file, or in the configuration, where there may be several with names."""
    if file.is_file():
        return read_text(file)
    if isinstance(given, list):
        named = (one.get("template") for one in given if isinstance(one, dict) and one.get("name") == "default")
        given = next(named, None)
    return given if isinstance(given, str) else None
