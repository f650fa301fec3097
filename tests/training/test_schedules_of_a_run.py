"""The schedules of one run: training, evaluation and sampling find their stages on the same ranks."""

from dataclasses import replace

import pytest
from families import TRAINING, fitting
from small_run import small_run

from pipeloom.catalog import load_software
from pipeloom.config import ModelConfig, RunConfig, ScheduleConfig
from pipeloom.cost.placed import Placed
from pipeloom.cost.stages import replicated_parameters
from pipeloom.model import TensorParallel, stage_pieces
from pipeloom.model.tensor_parallel import TensorGroup
from pipeloom.predict.describe import describe, described_run
from pipeloom.predict.step import simulate_step
from pipeloom.schedule import Kind
from pipeloom.training.schedules import forward_schedule, training_schedule
from pipeloom.training.stages import stage_of
from pipeloom.workload.layout import Layout


@pytest.mark.parametrize("family", TRAINING)
def test_evaluation_goes_through_the_stages_where_training_has_them(tmp_path, family):
    layout = Layout(pp=3, loops=fitting(family, 2)["loops"], num_microbatches=6)
    config = small_run(tmp_path, layout=layout, schedule=ScheduleConfig(family=family))
    assert forward_schedule(config, 2).placement == training_schedule(config).placement


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_replicated_parameters_are_those_that_stages_hold_whole(family, tied):
    model = ModelConfig(family=family, num_layers=6, hidden_size=16, num_heads=4, num_kv_heads=4, tied=tied)
    layout = Layout(pp=2, loops=2, tp=2, sequence_parallel=True, partition=(2, 2, 2, 2))
    config = RunConfig(model=model.resolve(64), layout=layout)
    parallel = TensorParallel(TensorGroup(2, 1), splits_sequence=True)
    stages = [stage_of(config, pieces, "meta", parallel=parallel) for pieces in stage_pieces(layout.partition)]
    for stage in stages:
        stage.borrow(None)  # what the last stage has of the first one's is not its own
    counted = [sum(p.numel() for name, p in one.named_parameters() if name in one.replicated()) for one in stages]
    assert list(replicated_parameters(described_run(config, "fp32"), load_software("pipeloom"))) == counted


def stages_reduced(schedule):
    return sorted(action.stage for _, _, action in schedule.actions() if action.kind is Kind.REDUCE_GRAD)


def test_sums_over_tensor_parallel_ranks_are_in_the_simulated_schedule():
    """Without data parallelism, too: ranks that split tokens add up the gradients of norms."""
    layout = Layout(pp=2, loops=2, tp=2, sequence_parallel=True, num_microbatches=4)
    config = RunConfig(model=ModelConfig(num_heads=6).resolve(257), layout=layout)
    described = describe(config)
    step = simulate_step(
        Placed(described.run, described.cluster, described.software), config.knobs(), moves_by_seconds=False
    )
    assert step.schedule.rows == training_schedule(config).rows
    assert stages_reduced(step.schedule) == [0, 1, 2, 3]
    assert min(step.prediction.costs.reduce_s) > 0
    alone = replace(config, layout=replace(layout, sequence_parallel=False))
    assert stages_reduced(training_schedule(alone)) == []
