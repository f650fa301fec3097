"""The tokens that end a generated text: the end-of-text token, and those that the files of a model list.

Models of conversations often have several, such as one behind a text and one behind an answer.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeloom.catalog.model_files import CONFIG_JSON
from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, is_hugging_face, read_origin
from pipeloom.data.tokenizer import Tokenizer
from pipeloom.errors import UserError
from pipeloom.system.files import MOST_RECORD_BYTES, parse_json, read_text
from pipeloom.training.pretrained import END_KEY, GENERATION_CONFIG, read_description


def end_tokens(start: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens behind which a text of a model ends.

    Those of ``generation_config.json``, or without this file of ``config.json``, count if the model uses the tokenizer
    of their folder: the numbers of another one mean other tokens.

    Args:
        start: a checkpoint, or a Hugging Face folder.
        tokenizer: of the model.

    Raises:
        UserError: a file cannot be read, or lists something else than tokens.
    """
    texts = _texts(start, tokenizer)
    file = next((name for name in (GENERATION_CONFIG, CONFIG_JSON) if name in texts), None)
    return frozenset({tokenizer.end_of_text, *([] if file is None else _listed(texts[file], file, start))})


def _texts(start: Path, tokenizer: Tokenizer) -> Mapping[str, str]:
    """The text files that may list tokens of this tokenizer."""
    if is_hugging_face(start):
        file = start / TOKENIZER
        if not file.is_file() or read_text(file, most_bytes=MOST_RECORD_BYTES) != tokenizer.files()[TOKENIZER]:
            return {}
        return {name: read_text(start / name) for name in (GENERATION_CONFIG, CONFIG_JSON) if (start / name).is_file()}
    text = read_origin(start)
    first = None if text is None else read_description(text)
    return first.texts if first is not None and first.uses_tokenizer else {}


def _listed(text: str, file: str, start: Path) -> list[int]:
    try:
        tree = parse_json(text)
    except UserError as error:
        raise UserError(f"{file} of {start}: {error}") from None
    given = tree.get(END_KEY) if isinstance(tree, dict) else None
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(one) is int and one >= 0 for one in listed):
        raise UserError(
            f"{END_KEY} in {file} of {start} must be a token's number or a list of them, found {given!r:.60}"
        )
    return listed
