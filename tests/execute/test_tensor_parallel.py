"""Tensor parallelism over processes: alone, with data parallelism and with recomputation, equal to a single process."""

import re
import time
from dataclasses import replace

import pytest
from small_run import small_run

from pipeloom.config import ModelConfig
from pipeloom.data.text import load_data
from pipeloom.errors import WorkerError
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import run_on_all_ranks
from pipeloom.workload.layout import Layout

SHAPES = {
    "llama": ModelConfig(num_layers=4, hidden_size=16, num_heads=4, num_kv_heads=2, ffn_size=20),
    "gpt2": ModelConfig(family="gpt2", num_layers=4, hidden_size=16, num_heads=4, ffn_size=21),
}


def _stall(config, world, data):
    """One step, in which the last process never comes to the first exchange."""
    pipeline = Pipeline(config, world)
    if world.rank == world.size - 1:
        time.sleep(30)
    pipeline.train_step(pipeline.batch(data.train.batch(0, config.layout.batch_size)))


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.long), 4])
def test_a_stalled_exchange_names_its_processes_its_action_and_who_is_missing(tmp_path, tp):
    config = small_run(tmp_path, model=SHAPES["gpt2"], layout=Layout(pp=1, tp=tp, num_microbatches=1))
    config = replace(config, training=replace(config.training, stall_timeout_s=2))
    load_data(config.data, 0)
    with pytest.raises(WorkerError) as caught:
        run_on_all_ranks(config, _stall)
    message = str(caught.value)
    everybody = ", ".join(map(str, range(tp)))
    missing = rf"(process {tp - 1}|one of processes [0-9, ]*{tp - 1}) did not come in time"
    assert re.match(
        rf"rank 0, slot \d+, action 0F0: in a sum of tensor-parallel processes {everybody}: {missing}: Timed out",
        message,
    )
    assert "> rank 0: >0F0<" in message
    waiting = rf"process 0 \(tensor rank 0\): rank 0 is at slot \d+ of \d+, 0F0, in a sum of .* {everybody}\n"
    assert re.search(waiting, message)
    assert re.search(rf"process {tp - 1} \(tensor rank {tp - 1}\): rank 0 is at slot 0 of \d+, 0F0$", message, re.M)
    assert not getattr(caught.value, "__notes__", []) or "Traceback" not in caught.value.__notes__[0]
