"""A size of the tokenizer that a run does not use is named where it goes on from a checkpoint."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from pipeloom.checkpoint.checkpoint_choice import Choice
from pipeloom.config import DataConfig, RunConfig
from pipeloom.training.run import _unused_size

CONFIG = RunConfig(data=DataConfig(tokenizer="bpe", bpe_vocab_size=300))
DATA = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=280))
CHOICE = Choice(Path("step-000002"))


def test_a_size_without_effect_is_named():
    assert "data.bpe_vocab_size 300 has no effect" in _unused_size(CONFIG, DATA, CHOICE)
    used = replace(CONFIG, data=replace(CONFIG.data, bpe_vocab_size=280))
    assert _unused_size(used, DATA, CHOICE) == ""
    assert _unused_size(CONFIG, DATA, None) == ""
