"""Measuring a model's pieces: every setting once, finite, and what shared cores add."""

from dataclasses import replace
from functools import partial
from math import isfinite

import pytest

from pipeloom.config import ModelConfig, OptimizerConfig
from pipeloom.measure.pieces import PieceRequest, measure_pieces, undisturbed
from pipeloom.training.optimizers.optimizer import make_optimizer

TINY = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=11).resolve(11)
REQUEST = PieceRequest(
    model=TINY,
    seq_len=8,
    micro_batches=(1, 2),
    tp=(1, 2),
    recompute=("none", "full"),
    sequence_parallel=True,
    kind="cpu",
    num_processes=2,
    num_cores=1,
    budget_s=0.1,
    make_optimizer=partial(make_optimizer, OptimizerConfig()),
    clip_grad_norm=1.0,
)


@pytest.fixture(scope="module")
def crowded():
    return measure_pieces(REQUEST)


def seconds_of(pieces):
    return [*pieces.embedding, *pieces.layer, *pieces.head, *pieces.stage, pieces.message_s]


def test_every_setting_is_measured_once(crowded):
    keys = [pieces.run for pieces in crowded.pieces]
    wanted = [(tp, kind, size) for tp in (1, 2) for kind in ("none", "full") for size in (1, 2)]
    assert [(key.tp, key.recompute, key.micro_batch) for key in keys] == wanted
    assert {
        (*(getattr(key.shape, name) for name in ("hidden", "heads", "ffn", "vocab", "family")), key.seq) for key in keys
    } == {(16, 2, TINY.ffn_size, 11, "llama", 8)}
    assert [key.sequence_parallel for key in keys] == [False] * 4 + [True] * 4
    assert crowded.rounds >= 3


def test_seconds_are_finite_and_what_computes_takes_some(crowded):
    for pieces in crowded.pieces:
        assert all(isfinite(value) and 0 <= value < 10 for value in seconds_of(pieces))
        assert sum(seconds_of(pieces)) > 0
    assert 0 < crowded.update.seconds(1000) < 10


def test_messages_are_measured_where_cores_are_shared_and_there_are_stages(crowded):
    for pieces in crowded.pieces:
        assert (pieces.message_s > 0) == (pieces.run.tp == 1)  # with two tensor-parallel ranks there is one stage


def test_with_a_core_for_each_process_messages_take_the_links_time():
    found = measure_pieces(replace(REQUEST, num_cores=2, tp=(1,), micro_batches=(1,), recompute=("none",)))
    assert [pieces.message_s for pieces in found.pieces] == [0.0]
    assert sum(found.pieces[0].layer) >= 0


def test_what_disturbs_some_rounds_does_not_count():
    assert undisturbed([1.0, 1.0, 1.0, 9.0, 50.0]) == 1.0
