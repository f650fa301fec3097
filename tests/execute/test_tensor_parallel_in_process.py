"""All axes at once, every rank in one process: two steps, and what they leave, equal the single process."""

from itertools import product

import pytest
from families import SOME, fitting
from transformers import TransformerCluster, differences, schedule_of

from pipeloom.workload.layout import Layout

LEVELS = ("none", "optimizer", "gradients", "full")
RECOMPUTE = ("none", "selective", "full")


def worst(family, *, tied=False, model="llama", **sizes):
    layout = Layout(loops=fitting(family, 2)["loops"], **sizes)
    return differences(TransformerCluster(layout, schedule_of(layout, family, tied=tied), model, tied=tied))


CASES = list(product(SOME, LEVELS))


@pytest.mark.parametrize(("family", "shard"), CASES)
def test_steps_over_eight_ranks_equal_the_single_process(family, shard):
    """Each family at each level with every recomputation; tied or not, split or not and many or one take turns."""
    for number, recompute in enumerate(RECOMPUTE, start=CASES.index((family, shard))):
        turns = {"tied": number % 2 == 0, "sequence_parallel": number // 2 % 2 == 0}
        sizes = {"pp": 2, "tp": 2, "dp": 2, "shard": shard, "num_microbatches": (1, 3)[number // 4 % 2]}
        assert worst(family, recompute=recompute, **turns, **sizes) < 1e-9


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize(("family", "shard"), CASES)
def test_so_they_do_without_tensor_parallelism(family, shard, num_microbatches):
    recompute = RECOMPUTE[(CASES.index((family, shard)) + num_microbatches) % 3]
    sizes = {"pp": 2, "dp": 2, "shard": shard, "num_microbatches": num_microbatches}
    assert worst(family, recompute=recompute, model="gpt2", **sizes) < 1e-9


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SOME)
def test_and_with_tensor_parallelism_and_copies_or_alone(family, tied, splits):
    sizes = {"tied": tied, "model": "gpt2", "tp": 2, "sequence_parallel": splits, "num_microbatches": 3}
    assert worst(family, pp=3, **sizes) < 1e-9
    assert worst(family, pp=1, dp=4, replicate=2, shard="full", **sizes) < 1e-9
