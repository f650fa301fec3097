"""A tied embedding and head over real processes: gradients equal those of a single process."""

from functools import partial

import pytest
from small_run import small_run

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.execute.launch import run_workers
from pipeloom.execute.world import join_forked
from pipeloom.generate import FAMILIES
from pipeloom.layout import Layout
from pipeloom.train.data import load_data
from pipeloom.train.equivalence import compare_with_reference
from pipeloom.train.session import resolve

TRAINING = [name for name, family in FAMILIES.items() if family.has_backward]
TIED = {"num_layers": 6, "hidden_size": 16, "num_heads": 2, "tied": True}


def _all_differences(configs, rendezvous, rank, size):
    """Compare every configuration with the reference, one after the other, in the same processes."""
    world = join_forked(rendezvous, rank, size, "cpu", 30)
    worst = []
    for config in configs:
        data = load_data(config.data, 0)
        found = compare_with_reference(resolve(config, data), world, data, num_batches=1)
        assert found is None or "embedding.tokens.weight" in found
        assert found is None or "head.output.weight" not in found
        worst.append(None if found is None else max(found.values()))
    world.leave()
    return worst


def compared(configs, num_ranks):
    load_data(configs[0].data, 0)
    worst = run_workers(partial(_all_differences, configs), num_ranks)[0]
    assert len(worst) == len(configs)
    return max(worst)


@pytest.mark.parametrize(("pp", "placements"), [(2, ("looped", "v")), (3, ("looped",))])
def test_every_family_equals_the_single_process_over_gloo(tmp_path, pp, placements):
    configs = []
    for family in TRAINING:
        for placement in placements:
            model = "gpt2" if placement == "v" else "llama"
            layout = Layout(pp=pp, loops=2 if FAMILIES[family].is_looped else 1, num_microbatches=4, microbatch_size=2)
            schedule = ScheduleConfig(family=family, placement=placement)
            configs.append(
                small_run(tmp_path, model=ModelConfig(family=model, **TIED), layout=layout, schedule=schedule)
            )
    assert compared(configs, pp) < 1e-9


def test_every_sharding_level_equals_the_single_process_over_gloo(tmp_path):
    configs = []
    few = ScheduleConfig(family="depth-first", gradient_buffers=1)
    cases = [(shard, ScheduleConfig()) for shard in ("none", "optimizer", "gradients", "full")] + [("full", few)]
    for shard, schedule in cases:
        layout = Layout(pp=2, dp=2, loops=2, shard=shard, num_microbatches=3, microbatch_size=2)
        configs.append(small_run(tmp_path, model=ModelConfig(**TIED), layout=layout, schedule=schedule))
    hybrid = Layout(pp=1, dp=4, loops=3, replicate=2, shard="full", num_microbatches=3, microbatch_size=2)
    configs.append(small_run(tmp_path, model=ModelConfig(**TIED), layout=hybrid))
    assert compared(configs, 4) < 1e-9
