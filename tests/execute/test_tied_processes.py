"""A tied embedding and head over real processes: gradients equal those of a single process."""

import pytest
from families import SOME, fitting
from gloo import differences_over_gloo
from small_run import small_run

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.workload.layout import Layout

TIED = {"num_layers": 6, "hidden_size": 16, "num_heads": 2, "tied": True}


def compared(configs, num_ranks):
    found = differences_over_gloo(configs, num_ranks)
    assert len(found) == len(configs)
    assert all("embedding.tokens.weight" in one and "head.output.weight" not in one for one in found)
    return max(max(one.values()) for one in found)


@pytest.mark.parametrize(("pp", "placements"), [(2, ("looped", "v")), (3, ("looped",))])
def test_every_family_equals_the_single_process_over_gloo(tmp_path, pp, placements):
    configs = []
    for family in SOME:
        for wanted in placements:
            loops, placement = fitting(family, 2, wanted).values()
            model = "gpt2" if wanted == "v" else "llama"
            layout = Layout(pp=pp, loops=loops, num_microbatches=4, microbatch_size=2)
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


TENSOR = [
    {"pp": 2},
    {"pp": 2, "sequence_parallel": True},
    {"pp": 1, "dp": 2, "shard": "full", "sequence_parallel": True},
    {"pp": 1, "dp": 2, "shard": "none"},
]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_with_tensor_parallelism_each_rank_borrows_its_slice(tmp_path, model):
    configs = []
    for number, axes in enumerate(TENSOR):
        recompute = "full" if number % 2 else "none"
        layout = Layout(tp=2, loops=2, num_microbatches=3, microbatch_size=2, recompute=recompute, **axes)
        configs.append(small_run(tmp_path, model=ModelConfig(family=model, **TIED), layout=layout))
    assert compared(configs, 4) < 1e-9
