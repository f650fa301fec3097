"""What layouts with different sharding share."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.placed import _SHARED_BY_SHARDINGS, Placed
from pipeloom.workload.run import Run


@pytest.mark.parametrize("software", ["pipeloom", "fsdp", "megatron-2021"])
def test_shared_members_are_those_of_the_sharding_itself(software):
    shape, program = load_model("llama-3-8b", 4096), load_software(software)
    run = Run(shape=shape, seq=4096, pp=4, dp=4, loops=2, global_batch=64)
    placed = Placed(run, load_cluster("dgx-h100"), program)
    for name in _SHARED_BY_SHARDINGS:
        getattr(placed, name)
    for shard in ("none", "optimizer", "gradients", "full"):
        alone = Placed(replace(run, shard=shard), placed.cluster, program)
        assert {name: getattr(placed.with_sharding_of(alone.run), name) for name in _SHARED_BY_SHARDINGS} == {
            name: getattr(alone, name) for name in _SHARED_BY_SHARDINGS
        }
