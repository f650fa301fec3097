"""What of a checkpoint does not fit a run."""

from dataclasses import replace

import pytest
from small_run import small_run

from pipeloom.checkpoint.checkpoint_folder import METADATA, measure, write_info
from pipeloom.data.tokenizer import ByteTokenizer
from pipeloom.errors import UserError
from pipeloom.training.checkpoints import contents
from pipeloom.training.session import Tokens, resolve

BYTES = Tokens(ByteTokenizer())


def refusal(tmp_path, monkeypatch, **changes):
    """Why a small run, changed, cannot go on from its own checkpoint; ``changes`` of its sections, by name."""
    config = small_run(tmp_path)
    written = resolve(config, BYTES)
    (tmp_path / METADATA).write_bytes(b"nothing")
    write_info(tmp_path, contents.checkpoint_info(written, None, 3, 24, 192), measure([tmp_path / METADATA]))
    # The tensors are not there: what they are is all that is compared.
    monkeypatch.setattr(contents, "stored_shapes", lambda _: contents.expected_shapes(written))
    changed = {name: replace(getattr(config, name), **values) for name, values in changes.items()}
    checkpoint = replace(config.checkpoint, resume=tmp_path)
    with pytest.raises(UserError) as refused:
        contents.check_resumable(resolve(replace(config, **changed, checkpoint=checkpoint), BYTES))
    return str(refused.value)


def test_sizes_of_a_larger_model_are_listed(tmp_path, monkeypatch):
    found = refusal(tmp_path, monkeypatch, model={"num_layers": 7})
    assert (
        "is not of this model:\n  - model.num_layers is 7, the checkpoint has 6\n  - it lacks model.layers.6." in found
    )


def test_other_frozen_layers_of_the_same_model_are_named(tmp_path, monkeypatch):
    found = refusal(tmp_path, monkeypatch, training={"freeze_layers": 1})
    assert "training.freeze_layers or adapter.rank differs" in found
