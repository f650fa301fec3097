"""Tokenizers of other programs, small ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, TOKENIZER_CONFIG

TEXT = "The quick brown fox, naïve,  狐 🦊.\r\n\tdef jumps():\n\n    return 'over'  \n}\n\nthe lazy dog  <s> 42\n"


def trained(kind: str) -> Any:
    """A tokenizer as families of models have them."""
    tokenizers = pytest.importorskip("tokenizers")
    models, pre = tokenizers.models, tokenizers.pre_tokenizers
    if kind == "gpt2":
        made, before = tokenizers.Tokenizer(models.BPE()), pre.ByteLevel(add_prefix_space=False)
    elif kind == "llama3":
        pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = pre.Split(tokenizers.Regex(pattern), "isolated")
        made = tokenizers.Tokenizer(models.BPE())
        before = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        made, before = tokenizers.Tokenizer(models.Unigram()), pre.Metaspace(prepend_scheme="first")
    made.pre_tokenizer = before
    made.decoder = tokenizers.decoders.Metaspace() if kind == "unigram" else tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<unk>"]
    if kind == "unigram":
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        alphabet = pre.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    made.train_from_iterator([TEXT] * 20, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def folder_of(made: Any, path: Path, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    made.save(str(path / TOKENIZER))
    (path / TOKENIZER_CONFIG).write_text(json.dumps({"eos_token": {"content": "</s>"}, **settings}))
    return path
