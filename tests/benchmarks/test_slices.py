"""The benchmark of token slices: what stands beside its measurements."""

import pytest
import torch

import slices
from pipeloom.model import KeyValueCache
from pipeloom.planner.slice_lengths import LatencyTable, best_slices

TABLE = LatencyTable(slices.latency, slices.TOKENS, slices.UNIT)


@pytest.mark.parametrize("number", [1, *slices.EVEN])
def test_gpipe_simulated_is_the_formula(number):
    even = TABLE.even(number)
    assert slices.Contender("gpipe", even, 2).simulated_s == pytest.approx(even.step_s(slices.RANKS, 2))


def test_chosen_slices_are_fastest_in_simulation():
    chosen = best_slices(TABLE, slices.RANKS, 2)
    for family in slices.FAMILIES:
        others = [slices.Contender(family, TABLE.even(number), 2).simulated_s for number in range(1, 33)]
        assert slices.Contender(family, chosen, 2).simulated_s < min(others)


def test_the_best_number_of_even_slices_is_measured_too():
    measured = slices.evens(TABLE, 2)
    assert {len(one.lengths) for one in measured} > set(slices.EVEN)
    best_s = min(one.step_s(slices.RANKS, 2) for one in measured)
    assert all(TABLE.even(number).step_s(slices.RANKS, 2) >= best_s for number in range(2, TABLE.num_units + 1))


def test_a_sleeping_stage_takes_what_its_slice_takes(monkeypatch):
    slept = []
    monkeypatch.setattr(slices.time, "sleep", slept.append)
    stage, cache = slices.SleepingStage(), KeyValueCache(slices.TOKENS)
    for length in (1536, 512):
        stage(torch.ones(1, length, slices.WIDTH), cache).sum().backward()
    assert slept == pytest.approx(
        [part * slices.latency(*place) for place in ((1536, 0), (512, 1536)) for part in (1 / 3, 2 / 3)]
    )
