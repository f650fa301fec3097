"""Runs that differ in some fields."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.exchanges import data_parallel_s, step_terms
from pipeloom.cost.placed import Placed
from pipeloom.workload.run import Run

RUN = Run(
    shape=load_model("llama-3-8b"), seq=1024, dp=4, tp=2, pp=4, loops=2, layers_by_stage=(4,) * 8, global_batch=64
)


def test_a_changed_run_is_the_replaced_one():
    changed = RUN.changed(shard="full", replicate=2)
    assert changed == replace(RUN, shard="full", replicate=2)
    assert hash(changed) == hash(replace(RUN, shard="full", replicate=2))
    assert RUN.shard == "none"
    with pytest.raises(AssertionError, match="no such field"):
        RUN.changed(shards="full")


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "full"])
def test_micro_batches_and_recomputation_change_nothing_of_the_state(shard):
    others = [{"micro_batch": 2}, {"recompute": "full"}, {"sequence_parallel": True}, {"global_batch": 32}]
    found = set()
    for changes in ({}, *others):
        run = replace(RUN, shard=shard, **changes)
        placed = Placed(run, load_cluster("dgx-a100"), load_software("pipeloom"))
        assert run.of_state == replace(RUN, shard=shard).of_state
        found.add((data_parallel_s(placed), step_terms(placed, 0.0)))
    assert len(found) == 1
