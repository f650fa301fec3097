"""Two updates over processes: the gradients of each step, and of the step after them, are the single process's."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo  # imported once here, not once in every process
from replicas import parts_of
from small_run import small_run
from thinned import thinned

from pipeloom.config import ModelConfig, OptimizerConfig, ScheduleConfig
from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.execute.stages.batch import Batch
from pipeloom.model import build_stage
from pipeloom.training.equivalence import Gradients, _joined, compare
from pipeloom.training.optimizers.optimizer import make_optimizer
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

STEPS = 3
"""The last one computes with the parameters that two updates have made."""
OPTIMIZER = OptimizerConfig(lr=0.02, weight_decay=0.3)
LAYOUTS = [
    Layout(pp=2, loops=2, dp=2, shard="none", num_microbatches=3, recompute="selective"),
    Layout(pp=2, loops=2, dp=2, shard="optimizer", num_microbatches=1),
    Layout(pp=2, loops=2, tp=2, num_microbatches=8, recompute="full"),
    Layout(pp=2, loops=2, tp=2, sequence_parallel=True, num_microbatches=3),
    Layout(pp=1, loops=2, tp=2, dp=2, shard="gradients", num_microbatches=3),
    Layout(pp=1, loops=3, tp=2, dp=2, shard="full", sequence_parallel=True, num_microbatches=1, recompute="full"),
    Layout(pp=1, loops=2, dp=4, replicate=2, shard="full", num_microbatches=3),
    Layout(pp=4, loops=1, num_microbatches=8),
]


def steps_of(config, world, data):
    """On rank 0 the whole gradients of each step."""
    pipeline, found = Pipeline(config, world), []
    optimizer = make_optimizer(OPTIMIZER, pipeline.data_parallel.parts)
    slices = world.gather(pipeline.slices())
    for step in range(STEPS):
        result = pipeline.train_step(pipeline.batch(data.train.batch(step, config.layout.batch_size)))
        check_held(result.held, pipeline.schedule, config.layout.coordinates(world.rank).pipeline)
        gradients = {name: gradient.clone() for name, gradient in pipeline.gradients().items()}
        own = Gradients(pipeline.counted_loss(result), gradients if pipeline.is_first_replica else {})
        parts = world.gather(own)
        found.append(None if parts is None else _joined(parts, slices))
        optimizer.step()
        pipeline.data_parallel.refresh()
    pipeline.close()
    return found


def check_held(held, schedule, rank):
    """What a rank held is what its row was proved to hold, and no more."""
    num_stages = len(schedule.placement.stages_of(rank))
    assert held.stage_inputs == schedule.peak_stage_inputs[rank]
    assert held.gathered <= (schedule.max_gathered or num_stages)
    assert held.gradients <= (schedule.gradient_buffers or num_stages)


def plain_steps(config, data):
    """The same by one process without any of this."""
    sizes = {"max_positions": config.data.seq_len, "seed": 0, "dtype": torch.float64, "device": "cpu"}
    model = build_stage(config.model, range(config.model.num_layers + 2), **sizes)
    named = dict(model.named_parameters())
    optimizer = make_optimizer(OPTIMIZER, parts_of(named.values()))
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        windows = data.train.batch(step, config.layout.batch_size)
        batch = Batch.of(windows, config.layout.dp * config.layout.num_microbatches, torch.device("cpu"))
        losses = [batch.loss(model(tokens), number) for number, tokens in enumerate(batch.inputs)]
        sum(losses).backward()
        found.append(Gradients(float(sum(losses).detach()), {name: p.grad.clone() for name, p in named.items()}))
        optimizer.step()
    return found


def worst_of_all(configs, rendezvous, rank, size):
    world, worst = join_forked(rendezvous, rank, size, "cpu", 60), []
    for given in configs:
        data = load_data(given.data, 0)
        config = resolve(given, data)
        found = steps_of(config, world, data)
        if rank == 0:
            pairs = zip(found, plain_steps(config, data), strict=True)
            worst.append([max(compare(one, other).values()) for one, other in pairs])
    world.leave()
    return worst


@pytest.mark.parametrize("numbers", thinned([{1, 3, 4, 6}, {0, 2, 5, 7}], 2))
def test_every_step_equals_the_single_process(tmp_path, numbers):
    """Both families have layouts with one matrix for embedding and head, and with two.

    In one process every family does at every level: ``test_tensor_parallel_in_process``.
    """
    model = ModelConfig(family="gpt2", num_layers=4, hidden_size=10, num_heads=2, ffn_size=14)
    configs = []
    for number, layout in enumerate(LAYOUTS):
        if number not in numbers:
            continue
        is_looped = number % 2 == 0 and layout.num_loops > 1
        sections = {
            "model": replace(model, tied=number // 2 % 2 == 0),
            "layout": layout if is_looped else replace(layout, loops=1),
            "schedule": ScheduleConfig(family="breadth-first" if is_looped else "1f1b"),
        }
        configs.append(small_run(tmp_path, **sections))
    load_data(configs[0].data, 0)
    worst = run_workers(partial(worst_of_all, configs), 4)[0]
    assert [len(steps) for steps in worst] == [STEPS] * len(configs)
    assert max(max(steps) for steps in worst) < 1e-9
