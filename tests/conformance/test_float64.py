"""In float64 a step of ranks that share experts or sequences is that of a single process, to rounding.

Those of other runs: ``tests/execute/test_equal_over_gloo.py``, over processes.
"""

from dataclasses import replace
from itertools import product

import pytest
from any_runs import DATA, context_runs, exact, on_cpus
from families import TRAINING, fitting
from one_process import OneProcess
from thinned import thinned

from pipeloom.config import DataConfig, ModelConfig, RunConfig, ScheduleConfig, TrainingConfig, find_problems
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

LEVELS = ("none", "optimizer", "gradients", "full")
SIZES = {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 4, "ffn_size": 12}
EXPERTS = {"experts": 4, "expert_every": 2, "shared_experts": 1, "balance_weight": 1.0}
BALANCED_BATCHES = ("gpipe", "breadth-first")
"""Families whose backwards begin behind all forwards of a stage, as the loss of a whole batch needs."""


def run_of(family, *, model=(), attention="window", **layout):
    sizes = fitting(family, 2 if layout["pp"] > 1 else 1)
    config = RunConfig(
        model=ModelConfig(num_layers=4, **SIZES, **dict(model)),
        data=DataConfig(seq_len=16, attention=attention),
        layout=Layout(loops=sizes["loops"], num_microbatches=3, microbatch_size=1, **layout),
        schedule=ScheduleConfig(family=family, placement=sizes["placement"] if layout["pp"] > 1 else None),
        training=TrainingConfig(dtype="float64"),
    )
    assert not find_problems(config, trains=False)
    return resolve(config, DATA)


CASES = list(product(TRAINING, LEVELS, ("none", "selective", "full"), (1, 2)))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "level", "recompute", "tp"), thinned(CASES, 77))
def test_four_ranks_that_share_experts_have_the_gradients_of_one_process(family, level, recompute, tp):
    """With the balance loss: of the whole batch, summed over replicas, in the families that take it."""
    balance = "batch" if family in BALANCED_BATCHES else "microbatch"
    model = {**EXPERTS, "balance": balance}
    ranks = OneProcess(run_of(family, model=model, pp=2, dp=4, ep=4, tp=tp, shard=level, recompute=recompute))
    results = ranks.step()
    assert max(ranks.differences(results).values()) < 1e-12
    ranks.config = replace(ranks.config, model=replace(ranks.config.model, balance="none"))
    assert max(ranks.differences(results).values()) > 1e-3


AXES = list(product((1, 2), (1, 2), (2, 4), LEVELS, ("window", "document")))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "axes"), thinned(list(enumerate(AXES)), 27))
def test_ranks_that_share_sequences_have_the_gradients_of_one_process(number, axes):
    """With every level, tensor and pipeline ranks, and masks of documents; families in turns."""
    pp, tp, cp, level, attention = axes
    ranks = OneProcess(
        run_of(
            TRAINING[number % len(TRAINING)], pp=pp, tp=tp, cp=cp, shard=level, attention=attention, recompute="full"
        )
    )
    results = ranks.step()
    assert max(ranks.differences(results).values()) < 1e-12
    if attention == "document":
        ranks.config = replace(ranks.config, data=replace(ranks.config.data, attention="window"))
        assert max(ranks.differences(results).values()) > 1e-3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", thinned(range(24), 23))
def test_any_run_that_shares_sequences_has_the_gradients_of_one_process(part):
    drawn = context_runs(24)[part]
    data = replace(drawn.data, attention=("window", "document")[part % 2])
    config = replace(drawn, data=data, training=replace(drawn.training, dtype="float64"))
    assert not find_problems(config, trains=False)
    ranks = OneProcess(resolve(exact(on_cpus(config)), DATA))
    assert max(ranks.differences(ranks.step()).values()) < 1e-9, config
