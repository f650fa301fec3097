"""Recomputation under the executor: with every family, and with weights that are dropped and gathered meanwhile."""

import pytest
from families import SOME, fitting
from gloo import differences_over_gloo
from small_run import small_run

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.workload.layout import Layout

MIXED = ("none", "full", "selective", "none", "full", "full")
CHOICES = [{"recompute": "selective"}, {"recompute": "full"}, {"recompute_layers": MIXED}]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_every_family_equals_the_single_process_over_gloo(tmp_path, model):
    shape = ModelConfig(family=model, num_layers=6, hidden_size=16, num_heads=4, num_kv_heads=2)
    configs = [
        small_run(
            tmp_path,
            model=shape,
            layout=Layout(pp=2, loops=fitting(family, 2)["loops"], num_microbatches=4, **choice),
            schedule=ScheduleConfig(family=family),
        )
        for family in SOME
        for choice in CHOICES
    ]
    found = differences_over_gloo(configs, 2)
    assert len(found) == len(configs)
    assert max(max(one.values()) for one in found) < 1e-9


def test_every_sharding_level_equals_the_single_process_over_gloo(tmp_path):
    levels = [("none", None), ("optimizer", None), ("gradients", None), ("full", None)]
    cases = [(2, 2, 2, *level) for level in levels] + [(1, 4, 3, "full", 2)]
    configs = [
        small_run(
            tmp_path,
            layout=Layout(pp=pp, dp=dp, loops=loops, shard=shard, replicate=copies, num_microbatches=3, **choice),
            schedule=ScheduleConfig(residency=1 if shard == "full" else None),
        )
        for pp, dp, loops, shard, copies in cases
        for choice in CHOICES
    ]
    found = differences_over_gloo(configs, 4)
    assert len(found) == len(configs)
    assert max(max(one.values()) for one in found) < 1e-9
