"""All axes at once, every rank in one process: two steps, and what they leave, equal the single process."""

from itertools import product

import pytest
from families import SOME, fitting
from thinned import thinned
from transformer_ranks import TransformerCluster, differences, schedule_of

from pipeloom.workload.layout import Layout

LEVELS = ("none", "optimizer", "gradients", "full")
RECOMPUTE = ("none", "selective", "full")


def worst(family, *, tied=False, model="llama", **sizes):
    layout = Layout(loops=fitting(family, 2)["loops"], **sizes)
    return differences(TransformerCluster(layout, schedule_of(layout, family, tied=tied), model, tied=tied))


CASES = list(enumerate(product(SOME, LEVELS)))


@pytest.mark.parametrize(("number", "case"), thinned(CASES, 5))
def test_steps_over_eight_ranks_equal_the_single_process(number, case):
    """Each family at each level; recomputation, tied or not, split or not, and many or one take turns.

    Drawn from all of these together: ``tests/conformance/test_every_byte.py``.
    """
    family, shard = case
    number += number // len(LEVELS)  # or a level would always have the same turns
    turns = {"tied": number % 2 == 0, "sequence_parallel": number // 2 % 2 == 0, "recompute": RECOMPUTE[number % 3]}
    sizes = {"pp": 2, "tp": 2, "dp": 2, "shard": shard, "num_microbatches": (1, 3)[number // 4 % 2]}
    assert worst(family, **turns, **sizes) < 1e-9


@pytest.mark.parametrize(("number", "case"), thinned(CASES, 5))
def test_so_they_do_without_tensor_parallelism(number, case):
    family, shard = case
    number += number // len(LEVELS)
    sizes = {"pp": 2, "dp": 2, "shard": shard, "num_microbatches": (1, 3)[number % 2]}
    assert worst(family, recompute=RECOMPUTE[number % 3], model="gpt2", **sizes) < 1e-9


@pytest.mark.parametrize(("number", "family"), thinned([*enumerate(SOME), *enumerate(SOME, start=len(SOME))], 5))
def test_and_with_tensor_parallelism_and_copies_or_alone(number, family):
    turns = {"tied": number % 2 == 0, "sequence_parallel": number // 2 % 2 == 0}
    sizes = {"model": "gpt2", "tp": 2, "num_microbatches": 3}
    assert worst(family, pp=3, **turns, **sizes) < 1e-9
    assert worst(family, pp=1, dp=4, replicate=2, shard="full", **turns, **sizes) < 1e-9
