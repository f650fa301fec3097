"""Tensor parallelism over processes: alone, with data parallelism and with recomputation, equal to a single process."""

import pytest
from families import SOME, fitting
from gloo import differences_over_gloo
from small_run import small_run

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.layout import Layout

SHAPES = {
    "llama": ModelConfig(num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=20),
    "gpt2": ModelConfig(family="gpt2", num_layers=4, hidden_size=16, num_heads=4, ffn_size=21),
}
AXES = [
    {"pp": 2, "tp": 2},
    {"pp": 2, "tp": 2, "sequence_parallel": True},
    {"pp": 1, "tp": 4},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "none", "sequence_parallel": True},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "optimizer"},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "gradients", "sequence_parallel": True},
    {"pp": 1, "tp": 2, "dp": 2, "shard": "full", "sequence_parallel": True},
]
RECOMPUTE = ("none", "selective", "full")


@pytest.mark.parametrize("model", SHAPES)
def test_every_family_equals_the_single_process_over_gloo(tmp_path, model):
    configs, number = [], 0
    for family in SOME:
        for axes in AXES:
            if axes["tp"] == 4 and model == "llama":
                continue  # it has two key and value heads
            number += 1
            if number % 2 != list(SHAPES).index(model):
                continue  # the other model's
            layout = Layout(
                loops=fitting(family, 2)["loops"],
                num_microbatches=3,
                recompute=RECOMPUTE[number // 2 % 3],
                **axes,
            )
            configs.append(
                small_run(tmp_path, model=SHAPES[model], layout=layout, schedule=ScheduleConfig(family=family))
            )
    found = differences_over_gloo(configs, 4)
    assert len(found) == len(configs)
    assert max(max(one.values()) for one in found) < 1e-9
