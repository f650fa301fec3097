"""What "Efficient Parallelization Layouts" (arXiv 2311.05610) recommends is a result of the search; no code has it."""

from functools import cache

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.search import Search

CASES = {
    "13b": ("llama-13b", 64, 2048, 2048),
    "13b-8k": ("llama-13b", 128, 512, 8192),
    "30b": ("llama-30b", 256, 2048, 2048),
    "30b-8k": ("llama-30b", 128, 512, 8192),
    "65b": ("llama-65b", 128, 2048, 2048),
}
"""Model, devices, global batch and sequence length of the paper's sweep, in its program."""


@cache
def searching(case):
    model, devices, batch, seq = CASES[case]
    return Search(
        Question(
            shape=load_model(model),
            cluster=load_cluster("dgx-a100"),
            software=load_software("scaling-2023b"),
            num_devices=devices,
            global_batch=batch,
            seq=seq,
        )
    )


def best(case, **limits):
    return searching(case).best(1, Limits(**limits)).best


def step_s(case, **limits):
    return best(case, **limits).prediction.step_time_s


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_of_one_sequence(case):
    assert best(case).run.micro_batch == 1


@pytest.mark.parametrize("case", CASES)
def test_more_model_parallelism_before_recomputing_every_layer(case):
    kept, again = best(case, recompute=("none",)), best(case, recompute=("full",))
    assert kept.prediction.step_time_s < again.prediction.step_time_s
    assert kept.run.tp * kept.run.pp >= again.run.tp * again.run.pp


@pytest.mark.parametrize(
    ("case", "less", "more"), [("13b", 2, 4), ("13b", 1, 4), ("13b-8k", 2, 4), ("30b", 2, 4), ("65b", 2, 4)]
)
def test_a_pipeline_before_tensor_parallelism_at_the_same_product(case, less, more):
    pipeline = step_s(case, tp=(less,), pp=(more,), recompute=("none",))
    tensor = step_s(case, tp=(more,), pp=(less,), recompute=("none",))
    assert pipeline < tensor


@pytest.mark.parametrize("case", ["13b-8k", "30b-8k", "65b"])
def test_sequence_parallelism_for_large_models_and_long_sequences(case):
    split, whole = (step_s(case, sequence_parallel=(is_split,)) for is_split in (True, False))
    assert split < whole
    assert best(case).run.sequence_parallel


def test_a_small_model_with_short_sequences_needs_neither():
    run = best("13b").run
    assert (run.tp, run.pp, run.recompute, run.sequence_parallel) == (1, 1, "none", False)
