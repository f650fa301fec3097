"""What a run prints of itself before its first step and behind its last one."""

import errno
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_run import small_run

from pipeloom.cli.train import _parameters
from pipeloom.config import AdapterConfig, CheckpointConfig, ModelConfig, TrainingConfig
from pipeloom.data.prepared import sizes_of
from pipeloom.data.summary import Summary
from pipeloom.predict.describe import completed
from pipeloom.training.run import _announce, _print_line, _read_again
from pipeloom.training.stages import stage_of
from pipeloom.workload.layout import Layout


@pytest.fixture
def described(tmp_path):
    """Returns a run of a layout whose sizes are known."""

    def make(layout, **sections):
        config, problems = completed(small_run(tmp_path, layout=layout, **sections), lambda *_, **__: [])
        assert not problems
        return replace(config, model=config.model.resolve(257))

    return make


def announced(config, name):
    """The line of a name; ``None`` if there is none."""
    lines = []
    _announce(config, lines.append)
    return next((line for line in lines if line.startswith(name)), None)


def batch_line(config):
    return announced(config, "batch")


def test_a_terminal_that_was_closed_ends_no_run(monkeypatch):
    def refuse(text):
        raise OSError(errno.EIO, text)

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=refuse, flush=lambda: None, isatty=lambda: False))
    _print_line("restart    started again from step 6")
    with pytest.raises(OSError, match="started again"):
        sys.stdout.write("started again")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ({"pp": 2}, ""),
        ({"dp": 2}, " for each of 2 replicas: 16 sequences, 128 tokens a step"),
        ({"dp": 2, "average_every": 3}, " for each update of each of 2 replicas: 48 sequences, 384 tokens a step"),
    ],
)
def test_the_batch_is_that_of_all_replicas(described, layout, more):
    whole = Layout(**{"pp": 1, "loops": 1, "num_microbatches": 4, "microbatch_size": 2} | layout)
    found = batch_line(described(whole))
    assert found == f"batch      4 micro-batches of 2 sequences of 8 tokens{more}"


def test_unequal_replicas_have_the_whole_step_beside_their_numbers(described):
    layout = Layout(pp=1, dp=2, loops=1, num_microbatches=3, microbatches=(3, 1), microbatch_size=2)
    found = batch_line(described(layout))
    assert found.endswith("3 and 1 micro-batches of 2 sequences of 8 tokens: 8 sequences, 64 tokens a step")


@pytest.mark.parametrize(
    ("settings", "what", "key"),
    [
        ({"adapter": AdapterConfig(rank=2)}, "adapter.rank 2 trains adapters of random weights", "adapter.rank"),
        (
            {"training": TrainingConfig(freeze_layers=2)},
            "training.freeze_layers 2 keeps random weights",
            "training.freeze_layers",
        ),
    ],
)
def test_random_weights_that_stay_are_a_warning(described, tmp_path, settings, what, key):
    run = described(Layout(pp=1, loops=1), **settings)
    assert announced(run, "warning") == (
        f"warning    {what}, which stay as they are; start from trained ones "
        f"with --checkpoint.init DIR, or leave {key} out"
    )
    assert announced(replace(run, checkpoint=CheckpointConfig(init=tmp_path)), "warning") is None
    assert announced(replace(run, checkpoint=CheckpointConfig(resume=tmp_path)), "warning") is None


def test_periods_that_exceed_the_run_are_a_line(described):
    trial = described(Layout(pp=1, loops=1), training=TrainingConfig(steps=2, validate_every=50))
    trial = replace(trial, checkpoint=CheckpointConfig(every=3, keep=1, keep_every=2))
    assert announced(trial, "period") == (
        "period     no effect in this run of 2 steps: training.validate_every 50, checkpoint.every 3"
    )
    whole = replace(trial, training=replace(trial.training, steps=50))
    assert announced(whole, "period") is None


def test_parameters_that_are_trained_and_that_a_token_takes_are_counted(described):
    plain = described(Layout(pp=1, loops=1))
    tuned = described(Layout(pp=1, loops=1), adapter=AdapterConfig(rank=2))
    assert _parameters(1234, plain) == "1,234"
    # Of 6 layers q and v, each 2 x 16 and 16 x 2.
    assert _parameters(1234, tuned) == f"1,234, of which {6 * 2 * 2 * 2 * 16:,} are trained"
    sizes = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, experts=4, experts_per_token=1, ffn_size=8)
    routed = described(Layout(pp=1, loops=1), model=sizes)
    whole = sum(one.numel() for one in stage_of(routed, range(4), "meta").parameters())
    taken = whole - 2 * 3 * (3 * 16 * 8)  # of 2 layers, 3 experts of three matrices each are left out
    assert _parameters(whole, routed) == f"{whole:,}, of which a token takes {taken:,}"


@pytest.mark.parametrize(("windows", "times"), [(7, "18 or 19"), (64, "2"), (100, "1 or 2")])
def test_validation_windows_that_are_read_again_are_counted(described, windows, times):
    config = described(Layout(pp=1, loops=1, num_microbatches=8, microbatch_size=2))
    config = replace(config, training=replace(config.training, validation_batches=8))
    data = SimpleNamespace(validation=SimpleNamespace(num_windows=windows))
    words = f"8 validation batches need 128 windows, the validation text has {windows}: each is read {times} times"
    assert words in _read_again(config, data)


def test_a_small_text_has_bytes_and_a_large_one_gigabytes():
    for size, words in ((12, "1 document, 12 bytes, "), (1_230_000_000, "1 document, 1.23 GB, ")):
        assert sizes_of(Summary(1, 0, size, 257, 10, 2, "", "")).startswith(words)
