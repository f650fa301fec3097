"""Records with answers: what of them is a target, under which templates, and what a template may not do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from given_tokenizers import folder_of, trained

from pipeloom.cli import main
from pipeloom.config import DataConfig
from pipeloom.config.tokenizer_files import tokenizer_files
from pipeloom.data.answers import Exchange, encode_exchange, exchange_of
from pipeloom.data.records import read_records
from pipeloom.data.text import load_data
from pipeloom.data.tokenizer import ByteTokenizer, tokenizer_from
from pipeloom.data.windows import without_marks
from pipeloom.errors import UserError

CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<s>' + message['role'] + '\\n' + message['content'] + '</s>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the fox?"},
    {"role": "assistant", "content": "quick"},
    {"role": "user", "content": "the dog?"},
    {"role": "assistant", "content": "lazy 狐"},
]


def tokenizer_of(folder: Path, template: str | None = CHATML) -> Any:
    path = folder_of(trained("gpt2"), folder / "tokenizer", **({} if template is None else {"chat_template": template}))
    return tokenizer_from(tokenizer_files(path))


def parts(tokenizer: Any, record: dict[str, Any]) -> tuple[str, str]:
    """The whole exchange, and its targets, as text with special tokens."""
    found = exchange_of(record)
    assert found is not None
    ids, counts = encode_exchange(tokenizer, found, Path("a.jsonl"))
    assert counts.dtype == np.bool_
    decode = tokenizer._encoding.decode if hasattr(tokenizer, "_encoding") else lambda ids, **_: tokenizer.decode(ids)
    return decode(ids.tolist(), skip_special_tokens=False), decode(ids[counts].tolist(), skip_special_tokens=False)


def test_a_completion_and_the_end_behind_it_are_targets() -> None:
    found = exchange_of({"prompt": "2 + 2 = ", "completion": "4", "more": 1})
    assert found is not None
    ids, counts = encode_exchange(ByteTokenizer(), found, Path("a"))
    assert ids.tolist() == [*b"2 + 2 = 4", 256]
    assert ids[counts].tolist() == [*b"4", 256]


def test_every_answer_of_a_conversation_is_a_target_with_its_end(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    whole, targets = parts(tokenizer_of(tmp_path), {"messages": MESSAGES})
    assert whole == (
        "<s>system\nbe brief</s>\n<s>user\nthe fox?</s>\n<s>assistant\nquick</s>\n<s>user\nthe dog?</s>\n"
        "<s>assistant\nlazy 狐</s>\n</s>"
    )
    assert targets == "quick</s>\nlazy 狐</s>\n"


def test_a_prompt_of_messages_has_no_targets(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    record = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    assert parts(tokenizer_of(tmp_path), record)[1] == "lazy 狐</s>\n"


def test_where_a_template_rewrites_earlier_answers_the_last_one_counts(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    thinks = CHATML.replace(
        "message['content'] +",
        "('<think>' if loop.last and message.role == 'assistant' else '') + message['content'] +",
    )
    assert parts(tokenizer_of(tmp_path, thinks), {"messages": MESSAGES})[1] == "<think>lazy 狐</s>\n"


def test_tags_around_answers_change_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tagged = CHATML.replace("{{ '<s>' +", "{% generation %}{{ '<s>' +").replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}"
    )
    assert parts(tokenizer_of(tmp_path, tagged), {"messages": MESSAGES})[1] == "quick</s>\nlazy 狐</s>\n"


WITHOUT_PROMPT = {
    "{{ message['role'] + ': ' + message['content'] + '</s>' }}": "quick</s>lazy 狐</s>",
    "{{ '<s>' + message['role'] + '\n' + message['content'] | trim + '</s>' }}": "quick</s>lazy 狐</s>",
    "{{ '[' + message.content + ']' if message.role != 'assistant' else ' ' + message.content + '</s>' }}": (
        " quick</s> lazy 狐</s>"
    ),
}
"""What templates that have no prompt for an answer write of a message -> the targets."""


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "unigram"])
@pytest.mark.parametrize("body", WITHOUT_PROMPT)
def test_the_role_is_no_target_where_a_template_has_no_prompt_for_an_answer(
    body: str, kind: str, tmp_path: Path
) -> None:
    template = f"{{% for message in messages %}}{body}{{% endfor %}}"
    path = folder_of(trained(kind), tmp_path / "tokenizer", chat_template=template)
    _, targets = parts(tokenizer_from(tokenizer_files(path)), {"messages": MESSAGES})
    found = targets.replace("<unk>", "狐").replace("</s> ", "</s>").strip()
    assert found == WITHOUT_PROMPT[body].replace("</s> ", "</s>").strip()


def test_an_empty_answer_has_its_end_alone(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    template = "{% for message in messages %}{{ message.role + ': ' + message.content + '</s>' }}{% endfor %}"
    messages = [MESSAGES[1], {"role": "assistant", "content": ""}]
    assert parts(tokenizer_of(tmp_path, template), {"messages": messages})[1] == "</s>"


WRONG = {
    "{{ ''.__class__.__mro__ }}": "must take the messages, found access to attribute '__class__'",
    "{{ messages.append(1) }}": "must take the messages, found access to attribute 'append'",
    "{{ 'a' * 100000000 }}": "found a product that may be huge",
    "{{ 10 ** 10 ** 10 }}": "found a product that may be huge",
    "{% for i in range(1000000) %}{% endfor %}": "found Range too big",
    "{{ raise_exception('roles must alternate') }}": "found roles must alternate",
    "{% if %}": "must take the messages, found",
    "{{ messages[9].content.x }}": "must take the messages, found",
    "nothing": "found one that the chat template writes elsewhere",
}


@pytest.mark.parametrize("template", WRONG)
def test_what_a_template_may_not_do(template: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    if template == "nothing":
        template, message = "{{ messages | length }}", WRONG[template]
    else:
        message = WRONG[template]
    with pytest.raises(UserError) as caught:
        parts(tokenizer_of(tmp_path, template), {"messages": MESSAGES})
    assert message in str(caught.value)
    assert 'in a.jsonl, record {"messages": [{"role": "system"' in str(caught.value)


def test_conversations_need_a_template_and_an_answer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="messages need a tokenizer with a chat template, found none"):
        parts(ByteTokenizer(), {"messages": MESSAGES})
    pytest.importorskip("tokenizers")
    with pytest.raises(
        UserError, match="must have an answer behind its messages, found no message of the role assistant"
    ):
        parts(tokenizer_of(tmp_path), {"messages": MESSAGES[:2]})


@pytest.mark.parametrize(
    "record",
    [{"prompt": "a"}, {"messages": "a"}, {"messages": [{"role": 1, "content": "a"}]}, {"prompt": 1, "completion": "a"}],
)
def test_other_records_are_no_exchanges(record: dict[str, Any]) -> None:
    assert exchange_of(record) is None


def test_an_exchange_has_its_text_for_training_a_tokenizer() -> None:
    assert exchange_of({"messages": MESSAGES[:2]}).text == b"be brief\nthe fox?"  # pyrefly: ignore
    assert Exchange(b'{"prompt": "a", "completion": "b"}').text == b"a\nb"


# Runs


def records(path: Path, num: int = 60) -> Path:
    lines = [{"prompt": f"{number} and {number} is ", "completion": f"{2 * number}."} for number in range(num)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (
            {"prompt": "4=", "completion": 5},
            "two texts, or two lists of .*'completion', found 5 under 'completion'; ch",
        ),
        ({"prompt": None, "completion": 5}, "found None under 'prompt' and 5 under 'completion'; change the record"),
        ({"prompt": "4=", "completion": MESSAGES}, "found a text under 'prompt' and a list of messages under 'comp"),
        (
            {"messages": "hello"},
            "a list of messages with texts under 'role' and 'content' under 'messages', found 'hello'",
        ),
        ({"messages": [{"role": "user"}]}, r"found a list with \{'role': 'user'\} under 'messages'; change the record"),
        ({"prompt": "4="}, "a text under 'text', found the keys prompt; set data.field"),
    ],
)
def test_an_answer_of_another_form_is_named(tmp_path: Path, record: dict[str, Any], wrong: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UserError, match=f"line 1 of .*a.jsonl must have .*{wrong}"):
        list(read_records(tmp_path / "a.jsonl", "text"))


def test_windows_hold_whole_records_and_only_answers_are_targets(tmp_path: Path) -> None:
    config = DataConfig(
        path=records(tmp_path / "a.jsonl"), seq_len=63, validation_fraction=0.2, cache=tmp_path / "cache"
    )
    data = load_data(config, 0)
    assert "of answers) and" in data.description
    assert "of packed windows filled up" in data.description
    answers, wholes = set(), set()
    for row in [*data.train.batch(0, data.train.num_windows), *data.validation.batch(0, data.validation.num_windows)]:
        answers |= {one for one in data.tokenizer.decode(np.where(row == 256, 10, row)[row >= 0]).split("\n") if one}
        tokens = without_marks(row)
        wholes |= {one for one in data.tokenizer.decode(np.where(tokens == 256, 10, tokens)).split("\n") if one}
    assert answers == {f"{2 * number}." for number in range(60)}
    assert wholes == {f"{number} and {number} is {2 * number}." for number in range(60)}
    # Token frequencies are those of answers: their letters are digits, a full stop and the end.
    assert data.shares[ord("a")] < data.shares[ord(".")]
    with pytest.raises(UserError, match=r"data\.pack stream would cut answers from what they answer"):
        load_data(replace(config, pack="stream"), 0)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_may_hold_conversations(ending: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("tokenizers")
    tokenizer_of(tmp_path)
    table = arrow.table({"messages": [MESSAGES] * 30, "number": range(30)})
    file = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, file)
    else:
        with arrow.OSFile(str(file), "wb") as out, arrow.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    config = DataConfig(path=file, tokenizer=tmp_path / "tokenizer", seq_len=127, validation_fraction=0.2)
    data = load_data(replace(config, cache=tmp_path / "cache"), 0)
    assert "30 documents" in data.description
    row = data.train.batch(0, 1)[0]
    assert "lazy 狐" in data.tokenizer.decode(row[row >= 0])
    assert "fox" not in data.tokenizer.decode(row[row >= 0])


def test_a_run_trains_on_answers_and_a_folder_of_tokens_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = records(tmp_path / "a.jsonl")
    assert main(["tokenize", str(text), str(tmp_path / "tokens")]) == 0
    assert "of answers" in capsys.readouterr().out
    words = [
        "train",
        "--model.num-layers",
        "1",
        "--model.hidden-size",
        "8",
        "--model.num-heads",
        "1",
        "--layout.pp",
        "1",
    ]
    words += ["--layout.loops", "1", "--layout.num-microbatches", "2", "--data.seq-len", "31", "--training.steps", "2"]
    words += ["--training.no-predict", "--training.sample-tokens", "2", "--checkpoint.final", "none"]
    assert main([*words, "--data.path", str(tmp_path / "tokens"), "--output.folder", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["unigram_loss"] < np.log(20), "few letters are in answers"
    expected = load_data(DataConfig(path=text, seq_len=31, cache=tmp_path / "cache"), 0)
    assert summary["corpus_sha256"] == expected.corpus_sha256
    found = load_data(DataConfig(path=tmp_path / "tokens", seq_len=31), 0)
    assert np.array_equal(found.train.batch(0, 9), expected.train.batch(0, 9))
