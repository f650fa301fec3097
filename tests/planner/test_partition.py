"""Layers of a run's stages, by FLOPs and by seconds."""

import pytest

from partition import CASES, CLUSTER, PROGRAM, Case, slowest_rank_s, step_s
from pipeloom.catalog import load_model
from pipeloom.config import ModelConfig
from pipeloom.cost.partition import default_partition
from pipeloom.cost.placed import Placed
from pipeloom.schedule import Placement
from pipeloom.workload.run import Run

FOUR = Placement.looped(4)


def test_the_head_counts_at_its_cost():
    small = ModelConfig(num_layers=14, hidden_size=64).resolve(vocab_size=257)
    large = ModelConfig(num_layers=14, hidden_size=64).resolve(vocab_size=20_000)
    recompute = ("none",) * 14
    assert default_partition(small, 64, FOUR, recompute)[-1] >= 4
    assert default_partition(large, 64, FOUR, recompute)[-1] == 1


def test_what_is_recomputed_counts():
    model = ModelConfig(num_layers=20, hidden_size=64).resolve(vocab_size=257)
    sizes = default_partition(model, 64, FOUR, ("full",) * 10 + ("none",) * 10)
    plain = default_partition(model, 64, FOUR, ("none",) * 20)
    assert sizes[0] + sizes[1] < plain[0] + plain[1]


def test_ranks_count_with_loops():
    model = ModelConfig(num_layers=10, hidden_size=64).resolve(vocab_size=2)
    layers = list(default_partition(model, 64, Placement.looped(2, 4), ("none",) * 10))
    layers[0] -= 1
    layers[-1] -= 1
    assert sum(layers[::2]) == sum(layers[1::2]) == 5


@pytest.mark.parametrize(
    ("case", "gain"),
    [
        (Case("llama-3-8b", 8), 1.18),  # the head takes as long as two of 32 layers
        (Case("llama-3-8b", 8, 2), 1.2),
        (Case("llama-3-8b", 4, 2, placement="v"), 1.1),
        (Case("llama-13b", 8, recomputed=0.25), 1.1),
        (Case("llama-13b", 4, 3), 1.08),  # 40 layers in 12 stages
    ],
)
def test_it_beats_even_layers(case, gain):
    even = case.even()
    fastest = Placed(even, CLUSTER, PROGRAM).with_fastest_layers().run
    assert slowest_rank_s(even) >= gain * slowest_rank_s(fastest)
    assert step_s(even) >= gain * step_s(fastest)


@pytest.mark.parametrize(("pp", "loops", "recomputed"), [(8, 2, 0.5), (4, 4, 0.25)])
def test_with_loops_and_some_layers_that_recompute_ranks_have_their_long_stages_together(pp, loops, recomputed):
    even = Case("llama-13b", pp, loops, recomputed=recomputed).even()
    assert step_s(even) >= 1.1 * step_s(Placed(even, CLUSTER, PROGRAM).with_fastest_layers().run)


@pytest.mark.parametrize("case", [case for case in CASES if case.loops == 1 or case.recomputed in (0, 1)])
def test_no_rank_is_slower_than_with_even_layers(case):
    even = case.even()
    fastest = Placed(even, CLUSTER, PROGRAM).with_fastest_layers().run
    assert slowest_rank_s(fastest) <= slowest_rank_s(even) * (1 + 1e-9)
    assert sum(fastest.layers_by_stage) == fastest.shape.layers


def test_a_slow_rank_gets_fewer_layers():
    run = Run(shape=load_model("llama-13b"), seq=2048, pp=4, loops=2, global_batch=32)
    layers = Placed(run, CLUSTER, PROGRAM).with_fastest_layers(slowness=(1, 2, 1, 1)).run.layers_by_stage
    by_rank = [sum(layers[rank::4]) for rank in range(4)]
    assert sum(layers) == 40
    assert by_rank[1] * 2 <= max(by_rank) + 2
    assert min(by_rank) == by_rank[1]


def test_a_v_is_balanced_as_a_v():
    run = Run(shape=load_model("llama-3-8b"), seq=2048, pp=4, loops=2, placement="v")
    layers = Placed(run, CLUSTER, PROGRAM).with_fastest_layers().run.layers_by_stage
    assert layers[0] + layers[7] < layers[1] + layers[6]  # embedding and head are on rank 0
