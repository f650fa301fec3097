"""Weights in bfloat16 without a float32 copy: rounded by chance, equal on all ranks that hold them, half the bytes."""

from dataclasses import replace

import pytest
import torch
from any_runs import DATA
from one_process import OneProcess
from thinned import thinned

from pipeloom.config import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainingConfig,
    find_problems,
)
from pipeloom.planner.plan import make_question, of_training
from pipeloom.predict.memory import memory_by_rank
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.training.optimizers import fused_adamw
from pipeloom.training.optimizers.fused_adamw import rounded
from pipeloom.training.optimizers.lomo import Lomo
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

LAYOUTS = {
    "one rank": {"pp": 1},
    "replicas": {"dp": 2},
    "optimizer": {"dp": 2, "shard": "optimizer"},
    "gradients": {"pp": 1, "dp": 2, "shard": "gradients"},
    "full": {"dp": 2, "shard": "full"},
    "tensor": {"tp": 2, "sequence_parallel": True},
}


def run_of(name="lomo", update="stage", lr=0.01, *, wide=False, tied=False, **layout):
    config = RunConfig(
        model=ModelConfig(num_layers=2, hidden_size=8, num_heads=2, ffn_size=12, tied=tied),
        data=DataConfig(seq_len=8),
        layout=Layout(**{"pp": 2, "loops": 2, "num_microbatches": 2, "microbatch_size": 1, **layout}),
        optimizer=OptimizerConfig(name=name, lr=lr, update=update, clip="none", wide_weights=wide),
        training=TrainingConfig(dtype="bfloat16"),
    )
    return resolve(config, DATA)


def train(config, steps=2):
    ranks = OneProcess(config)
    for _ in range(steps):
        for updates in ranks.updates:
            updates.begin_step(config.optimizer.lr)
        results = ranks.step()
        squares = [sum(each) for each in zip(*(updates.squares() for updates in ranks.updates), strict=True)]
        for updates in ranks.updates:
            updates.end_step(squares, config.optimizer.lr)
    return ranks, results


def test_a_value_is_the_mean_of_its_roundings():
    numbers = torch.tensor([1.0, 1.0 + 2**-9, -3.0 - 2**-7, 1e-30, 0.0, float("inf")])
    found = rounded(numbers.repeat(20_000, 1), torch.Generator().manual_seed(1))
    assert torch.equal(found, found.bfloat16().float())
    assert [sorted(set(column.tolist())) for column in found[:, :3].T] == [
        [1.0],
        [1.0, 1.0 + 2**-7],
        [-3.0 - 2**-6, -3.0],
    ]
    assert found[:, :5].mean(0) == pytest.approx(numbers[:5], rel=1e-3)
    assert torch.isinf(found[:, 5]).all()


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
@pytest.mark.parametrize("case", thinned(list(LAYOUTS), 2))
def test_ranks_that_hold_the_same_weights_round_them_alike(name, case):
    ranks, _ = train(run_of(name, **LAYOUTS[case], tied=case == "replicas"))
    found, num_equal = {}, 0
    for pipeline in ranks.pipelines:
        for stage, weights in pipeline.data_parallel.weights.items():
            assert weights.shard.dtype == torch.bfloat16
            assert weights.copy_bytes == 0
            if weights.is_held:
                shared = weights.order.shapes if case != "tensor" else weights.module.replicated()
                for parameter in shared:
                    values = weights.module.get_parameter(parameter).detach()
                    num_equal += (stage, parameter) in found
                    assert torch.equal(found.setdefault((stage, parameter), values), values)
    assert num_equal > 0 or case in {"one rank", "full"}


def test_changes_below_the_last_digit_add_up():
    parameter = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    parameter.grad = torch.ones(20_000)
    lomo = Lomo([{"params": [parameter]}], lr=1e-3)
    lomo.state[parameter] = {"step": torch.zeros(())}
    for _ in range(100):
        lomo.step()
    # Rounded to the nearest, 1 - 0.001 is 1 in every step.
    assert parameter.float().mean().item() == pytest.approx(0.9, abs=2e-3)
    assert int(lomo.state[parameter]["step"]) == 100


def test_pieces_of_a_long_interval_are_updated_in_one_step(monkeypatch):
    def train_one(at_once):
        monkeypatch.setattr(fused_adamw, "_AT_ONCE", at_once)
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1000, dtype=torch.bfloat16))
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.linspace(2, 0, 1000)
        lomo = Lomo([{"params": [parameter]}], lr=0.5, weight_decay=0.1)
        lomo.state[parameter] = {"step": torch.zeros(())}
        lomo.step()
        return parameter.detach().float(), lomo.state[parameter]["step"].item()

    (whole, one), (cut, same) = train_one(1000), train_one(96)
    assert one == same == 1
    torch.testing.assert_close(whole, cut, rtol=2**-7, atol=2**-7)  # each rounding is one of two neighbors


def test_updates_within_the_step_and_a_second_run_have_the_same_bits():
    runs = [train(run_of(update=update))[0] for update in ("stage", "step", "step")]
    first, *others = (
        [one.shard for p in ranks.pipelines for one in p.data_parallel.weights.values()] for ranks in runs
    )
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("case", [case for case in LAYOUTS if case != "tensor"])
def test_predicted_bytes_are_those_of_the_run(case):
    config = run_of(**LAYOUTS[case])
    sizes, (ranks, results) = sizes_in_training(config), train(config, 1)
    predicted = memory_by_rank(sizes.run, sizes.software, ranks.pipelines[0].schedule, 2)
    for pipeline, result in zip(ranks.pipelines, results, strict=True):
        memory, weights = predicted[pipeline._place.pipeline], pipeline.data_parallel.weights.values()
        assert memory.optimizer_bytes == sum(one.copy_bytes for one in weights) == 0
        assert result.held.weights_bytes == memory.weights_bytes
        assert result.held.gradients_bytes == memory.gradients_bytes
    wide = sizes_in_training(run_of(**LAYOUTS[case], wide=True))
    assert memory_by_rank(wide.run, wide.software, ranks.pipelines[0].schedule, 2)[0].optimizer_bytes > 0


def test_what_cannot_be_updated_without_a_copy_is_refused_at_once():
    config = replace(run_of(), training=TrainingConfig(dtype="float32"), adapter=AdapterConfig(rank=2))
    config = replace(
        config, optimizer=OptimizerConfig(wide_weights=False), schedule=ScheduleConfig(device_budget="1MB")
    )
    found = [one for one in find_problems(config) if "wide_weights" in one]
    assert [one.split(" found ")[-1].split(" does not work with ")[-1] for one in found] == [
        "adapter.rank, whose weights are few; leave one of them out",
        "training.dtype float32; set bfloat16, or leave it out",
        "adamw",
        "schedule.device_budget, which moves float32 weights; leave one of them out",
    ]


def test_plans_count_no_copy():
    question = make_question("gpt-6.6b", "dgx-a100", num_devices=8, global_batch=8, seq=512)
    narrow, wide = (of_training(question, run_of(wide=wide)).software for wide in (False, True))
    assert (narrow.wide_weights, wide.wide_weights) == (False, True)
