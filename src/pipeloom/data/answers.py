"""Records with an answer: a prompt and its completion, or the messages of a conversation. Only answers are targets.

A chat template is a program of a stranger. It runs in Jinja's sandbox, where it reaches nothing but the messages, and
may make neither huge texts by multiplication nor change anything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER_CONFIG
from pipeloom.data.tokenizer import LibraryTokenizer, TokenArray, Tokenizer
from pipeloom.errors import UserError

KEYS = (("messages",), ("prompt", "completion"))
"""Keys of records with an answer."""
_MOST_FACTOR = 10_000
_PRIVATE_USE = (0xE000, 0xF900)
"""Characters that texts hardly have."""
_Counts = npt.NDArray[np.bool_]


class Exchange(bytes):
    """A record with an answer, as JSON: keys and values of one of ``KEYS``."""

    __slots__ = ()

    @property
    def text(self) -> bytes:
        """All texts in it."""
        values = json.loads(self).values()
        texts = (one if isinstance(one, str) else "\n".join(message["content"] for message in one) for one in values)
        return "\n".join(texts).encode(errors="surrogatepass")


def exchange_of(record: Mapping[str, Any]) -> Exchange | None:
    """The exchange in a record; ``None`` if it has none, or one in another form."""
    for keys in KEYS:
        values = [record.get(key) for key in keys]
        texts = keys != KEYS[0] and all(isinstance(value, str) for value in values)
        if texts or all(isinstance(value, list) and all(map(_is_message, value)) for value in values):
            return Exchange(
                json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False).encode(errors="surrogatepass")
            )
    return None


def wrong_exchange(record: Mapping[str, Any]) -> str | None:
    """What the keys of an exchange must have, and what a record has there that is in another form; ``None`` without."""
    keys = next((keys for keys in KEYS if all(key in record for key in keys)), None)
    if keys is None:
        return None
    message = "with texts under 'role' and 'content'"
    if keys == KEYS[0]:
        wanted = f"a list of messages {message} under 'messages'"
    else:
        wanted = f"two texts, or two lists of messages {message}, under 'prompt' and 'completion'"
    found = {key: _found(record[key], is_text=keys != KEYS[0]) for key in keys}
    wrong = {key: text for key, text in found.items() if text is not None}
    shown = wrong or {key: "a text" if isinstance(record[key], str) else "a list of messages" for key in keys}
    return f"{wanted}, found {' and '.join(f'{text} under {key!r}' for key, text in shown.items())}"


def _found(value: Any, *, is_text: bool) -> str | None:
    """A value that is neither messages nor, if it may be, a text; ``None`` if it is."""
    if isinstance(value, list):
        wrong = [one for one in value if not _is_message(one)]
        return f"a list with {wrong[0]!r:.40}" if wrong else None
    return None if is_text and isinstance(value, str) else f"{value!r:.40}"


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("role"), str) and isinstance(found.get("content"), str)


def encode_exchange(tokenizer: Tokenizer, exchange: Exchange, path: Path) -> tuple[TokenArray, _Counts]:
    """The tokens of an exchange with those that begin and end a document, and which of them are targets.

    Args:
        tokenizer: with a chat template, if there are messages.
        exchange: the record.
        path: its file, for messages.

    Raises:
        UserError: there is no template, it fails, or there is no answer.
    """
    record = json.loads(exchange)
    try:
        if isinstance(record.get("prompt"), str):
            return _completed(tokenizer, record["prompt"], record["completion"])
        messages = record["messages"] if "messages" in record else record["prompt"] + record["completion"]
        return _conversation(tokenizer, messages, len(record.get("prompt", ())))
    except UserError as error:
        shown = exchange[:60].decode(errors="replace")
        raise UserError(f"{error}, in {path}, record {shown}...") from None


def _completed(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[TokenArray, _Counts]:
    # One by one: in use, too, the prompt is encoded alone.
    before, after = tokenizer.encode_all([prompt.encode(), completion.encode()])
    ids = np.concatenate([tokenizer.begin_of_text, before, after, [tokenizer.end_of_text]]).astype(np.int64)
    return ids, np.arange(len(ids)) >= len(tokenizer.begin_of_text) + len(before)


def _conversation(tokenizer: Tokenizer, messages: Sequence[Any], num_given: int) -> tuple[TokenArray, _Counts]:
    files = tokenizer.files()
    settings = json.loads(files.get(TOKENIZER_CONFIG, "{}"))
    if "chat_template" not in settings or not isinstance(tokenizer, LibraryTokenizer):
        raise UserError(
            "messages need a tokenizer with a chat template, found none; set data.tokenizer to a Hugging Face folder "
            "with a chat_template"
        )
    render = _renderer(files[TOKENIZER_CONFIG])
    whole = render(messages, add_generation_prompt=False)
    answers = [n for n, one in enumerate(messages) if one["role"] == "assistant" and n >= num_given]
    found = [_answer(render, messages, number, whole) for number in answers]
    if not answers or found[-1] is None:
        what = "no message of the role assistant" if not answers else "one that the chat template writes elsewhere"
        raise UserError(f"a conversation must have an answer behind its messages, found {what}")
    # A template that writes earlier answers in another way once others follow shows the last one as in use.
    ranges = [one for one in found if one is not None] if None not in found else found[-1:]
    ids, starts, stops = tokenizer.encode_marked(whole)
    counts = np.zeros(len(ids), np.bool_)
    for one in ranges:
        assert one is not None
        # A token that begins before the answer and ends in it, as " quick" behind a colon, is its first one.
        counts |= ((starts >= one[0]) | (stops > one[0])) & (starts < one[1])
    ends = [] if len(ids) and ids[-1] == tokenizer.end_of_text else [tokenizer.end_of_text]
    return np.concatenate([ids, ends]).astype(np.int64), np.concatenate([counts, np.zeros(len(ends), np.bool_)])


_Render = Callable[..., str]


def _answer(render: _Render, messages: Sequence[Any], number: int, whole: str) -> tuple[int, int] | None:
    """Where an answer is in the conversation: behind the prompt to generate it, with its end; ``None`` if elsewhere."""
    given = messages[:number]
    before = render(given, add_generation_prompt=True)
    after = whole if number == len(messages) - 1 else render(messages[: number + 1], add_generation_prompt=False)
    if not after.startswith(before) or not whole.startswith(after):
        return None
    is_prompt = before != render(given, add_generation_prompt=False)
    begin = len(before) if is_prompt else _begin(render, messages[: number + 1], len(before), after)
    return None if begin is None else (begin, len(after))


def _begin(render: _Render, messages: Sequence[Any], num_before: int, after: str) -> int | None:
    """Where the last message begins under a template without a prompt to generate it: behind the header of its role.

    Args:
        render: writes messages.
        messages: up to the last one.
        num_before: characters of those before it.
        after: all of them as the template writes them.
    """
    mark = next(one for one in map(chr, range(*_PRIVATE_USE)) if one not in after)
    last = messages[-1]
    marked = render([*messages[:-1], {**last, "content": mark + last["content"]}], add_generation_prompt=False)
    begin = marked.find(mark)
    if begin < 0 or marked[:begin] != after[:begin]:
        return None
    # White space alone is no header: as " quick" behind [/INST], it is generated with the answer.
    return begin if after[num_before:begin].strip() else num_before


def _to_json(value: Any, **given: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **given)


@cache
def _renderer(config_json: str) -> _Render:
    """A function of messages that a chat template describes."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not all(isinstance(one, int) and abs(one) < _MOST_FACTOR for one in (left, right)):
                raise SecurityError("a product that may be huge")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """The tags around answers that some templates have; what is between them stays."""

        tags = {"generation"}  # noqa: RUF012  as the library has it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def fail(message: str) -> None:
        raise TemplateError(message)

    settings = json.loads(config_json)
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    names = {name: settings.get(name, "") for name in ("bos_token", "eos_token")}
    compiled = cache(environment.from_string)

    def render(messages: Sequence[Any], *, add_generation_prompt: bool) -> str:
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "raise_exception": fail}
        try:
            return compiled(settings["chat_template"]).render(**names, **given)
        except Exception as error:  # a template may do anything to any value
            raise UserError(f"the chat template of data.tokenizer must take the messages, found {error}") from None

    return render
