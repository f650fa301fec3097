"""Token slices that suit this machine: what is measured, fitted and chosen, and that all ranks agree."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_run import small_run

from pipeloom.config import ModelConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.measure.slices import fitted
from pipeloom.training import session
from pipeloom.training.session import resolve
from pipeloom.training.slices import measured_points, with_known_slices
from pipeloom.workload.layout import Layout


@pytest.mark.parametrize("expected", [(3e-3, 2e-5, 1e-8), (0.0, 2e-5, 1e-8), (3e-3, 0.0, 1e-8), (1e-3, 2e-5, 0.0)])
def test_the_latency_behind_points_is_found(expected):
    places = [(length, before) for length in (64, 128, 256, 512) for before in (0, 512 - length)]
    points = [(n, c, expected[0] + expected[1] * n + expected[2] * n * (c + n / 2)) for n, c in places]
    found = fitted(points)
    assert (found.fixed_s, found.token_s, found.pair_s) == pytest.approx(expected, abs=1e-12)


def test_no_part_of_a_latency_is_negative():
    found = fitted([(64, 0, 1.0), (128, 0, 1.0), (128, 128, 0.9), (256, 0, 0.8)])
    assert min(found.fixed_s, found.token_s, found.pair_s) >= 0
    assert found(np.array([64.0]), np.array([0.0])) > 0


class Ranks:
    """Stands for a rank of a world whose other ranks have sent all values."""

    device = torch.device("cpu")

    def __init__(self, rank, printed=None):
        self.rank, self.printed = rank, printed

    def from_first(self, value):
        self.printed = value if self.rank == 0 else self.printed
        return self.printed


@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_has_the_lengths_that_rank_0_chose(tmp_path, tied):
    layout = Layout(pp=2, loops=1, num_microbatches=1, microbatch_size=1, token_slices="auto")
    model = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, tied=tied)
    config = small_run(tmp_path, model=model, layout=layout)
    config = replace(config, data=replace(config.data, seq_len=48))
    config = resolve(config, load_data(config.data, 0))
    first = Ranks(0)
    chosen = with_known_slices(config, first)
    assert sum(chosen.layout.token_slices) == 48
    assert with_known_slices(config, Ranks(1, first.printed)) == chosen
    assert with_known_slices(chosen, first) is chosen


def test_points_are_at_both_ends_of_sequences(tmp_path):
    config = small_run(tmp_path)
    config = resolve(config, load_data(config.data, 0))
    points = measured_points(config, torch.device("cpu"))
    assert [point[:2] for point in points] == [(1, 0), (1, 7), (2, 0), (2, 6), (4, 0), (4, 4), (8, 0)]
    assert min(seconds for *_, seconds in points) > 0


@pytest.mark.parametrize(
    ("slices", "compiles", "minutes"), [(None, False, 0), (4, False, 0), ("auto", False, 30), (None, True, 30)]
)
def test_ranks_wait_longer_for_one_that_measures_or_compiles(tmp_path, monkeypatch, slices, compiles, minutes):
    monkeypatch.setattr(session, "run_workers", lambda work, *_, **__: [work.keywords["timeout_s"]])
    layout = Layout(pp=2, loops=1, num_microbatches=2, token_slices=slices)
    training = TrainingConfig(compile=compiles, compile_backend="eager")
    config = small_run(tmp_path, layout=layout, training=training)
    expected_s = training.stall_timeout_s + 30 + 60 * minutes
    assert session.run_on_all_ranks(config, None, 30.0) == expected_s
