"""The loss of evaluation and of validation is that of the whole model, in every family of schedules and layout."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from any_runs import DATA
from families import TRAINING, fitting
from one_process import OneProcess
from thinned import thinned

from pipeloom.config import DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.windows import TokenWindows
from pipeloom.training.inference.evaluation import each_once
from pipeloom.training.session import resolve
from pipeloom.training.stages import stage_of
from pipeloom.workload.layout import Layout

LAYERS, SEQ_LEN, VOCAB = 4, 12, 257
LAYOUTS = {
    "pipeline": {"pp": 2},
    "tensor ranks": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "full sharding": {"pp": 2, "dp": 2, "shard": "full"},
}
WINDOWS = {"family": "gemma3", "window": 5}
CASES = {
    "plain": ({}, False),
    "tied": ({"tied": True}, False),
    "windows": (WINDOWS, False),
    "documents": ({}, True),
    "all": ({"tied": True, **WINDOWS}, True),
}


def config_of(layout, model=None, *, by_document=False, **schedule):
    return resolve(
        RunConfig(
            model=ModelConfig(num_layers=LAYERS, hidden_size=16, num_heads=4, num_kv_heads=2, **(model or {})),
            data=DataConfig(seq_len=SEQ_LEN, attention="document" if by_document else "window"),
            layout=Layout(**{"num_microbatches": 4, "microbatch_size": 1, **layout}),
            schedule=ScheduleConfig(**schedule),
            training=TrainingConfig(dtype="float64"),
        ),
        DATA,
    )


def stream(config):
    """Windows of drawn tokens, the last one not full, and more than a whole number of batches."""
    draw = np.random.default_rng(1)
    num = (config.layout.batch_size + 3) * (SEQ_LEN + 1) + 7
    begins = np.sort(draw.choice(np.arange(1, num), num // 5, replace=False)) if config.data.by_document else None
    return TokenWindows(draw.integers(VOCAB, size=num), SEQ_LEN, begins=begins, filler=VOCAB - 1)


def whole_loss(model, windows):
    """The mean loss, window by window, and each document of a window alone."""
    size, total, count = SEQ_LEN + 1, 0.0, 0
    for first in range(0, len(windows.tokens), size):
        tokens = torch.from_numpy(windows.tokens[first : first + size])
        borders = [] if windows._begins is None else windows._begins[windows._begins > first] - first
        for own in torch.tensor_split(tokens, [int(one) for one in borders if one < len(tokens)]):
            if len(own) > 1:
                with torch.no_grad():
                    logits = model(own[:-1].unsqueeze(0))[0]
                total += float(torch.nn.functional.cross_entropy(logits, own[1:], reduction="sum"))
                count += len(own) - 1
    return total / count, count


def assert_equal(config, *, trains):
    ranks, windows = OneProcess(config, trains=trains), stream(config)
    loss, count = whole_loss(stage_of(config, range(LAYERS + 2), "cpu"), windows)
    if trains:
        ranks.step()  # validation follows a step, which changes no weights before their update
    found = ranks.mean_loss(list(each_once(windows, config.layout.batch_size)))
    assert found.tokens == count
    assert found.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("family", thinned(TRAINING, 3))
def test_losses_are_those_of_the_whole_model(family):
    """Each family in each layout; in turns the models, and stages that train or have weights only."""
    place = TRAINING.index(family)
    for number, layout in enumerate(LAYOUTS.values()):
        model, by_document = list(CASES.values())[(place * len(LAYOUTS) + number) % len(CASES)]
        sizes = {**layout, "loops": fitting(family, 2)["loops"]}
        config = config_of(sizes, model, by_document=by_document, family=family)
        assert_equal(config, trains=(place + number) % 2 == 0)


@pytest.mark.parametrize("trains", [True, False])
def test_so_they_are_with_frozen_layers(trains):
    config = config_of({"pp": 2, "loops": 2, "dp": 2, "shard": "full"}, WINDOWS)
    assert_equal(replace(config, training=replace(config.training, freeze_layers=2)), trains=trains)
