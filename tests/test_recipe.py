"""One recipe makes the schedule that is trained, simulated, planned and printed."""

import random
from dataclasses import replace

import pytest

from pipeloom.catalog import load_software
from pipeloom.cli.simulate import order_of
from pipeloom.config import ModelConfig, RunConfig, ScheduleConfig, find_problems
from pipeloom.families import FAMILIES, Choice, make_schedule
from pipeloom.passes import (
    Moves,
    add_moves,
    add_reduce_grad,
    add_stage_swaps,
    add_tied,
    add_unshard,
    add_updates,
    lower,
)
from pipeloom.passes.lower_sharding import ReduceGrad, Unshard
from pipeloom.predict.describe import described_run
from pipeloom.predict.step import recipe_of
from pipeloom.recipe import Recipe, Residence, build, communicating, without_messages
from pipeloom.schedule import Kind
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.workload.layout import Layout

BREADTH_FIRST = Choice(family="breadth-first", pp=2, loops=2, num_microbatches=4)
ONE_RANK = Choice(family="breadth-first", pp=1, loops=4, num_microbatches=2)


def some_run(draw):
    """A run with every knob of its schedule drawn at random; some have problems."""
    pp, loops, dp = draw.choice([1, 2, 4]), draw.choice([1, 2, 3]), draw.choice([1, 2])
    shard = draw.choice(["none", "optimizer", "gradients", "full"]) if dp > 1 else "none"
    return RunConfig(
        model=ModelConfig(num_layers=16, hidden_size=16, num_heads=4, tied=draw.random() < 0.4),
        layout=Layout(
            pp=pp,
            loops=loops,
            dp=dp,
            tp=draw.choice([1, 1, 2]),
            num_microbatches=draw.choice([4, 8]),
            shard=shard,
            token_slices=draw.choice([None, None, 2]),
            recompute=draw.choice(["none", "full"]),
            sequence_parallel=draw.random() < 0.2,
        ),
        schedule=ScheduleConfig(
            family=draw.choice([name for name, one in FAMILIES.items() if one.has_backward]),
            receive_buffers=draw.choice([1, 2, 3]),
            residency=draw.choice([None, 1, 2]) if shard == "full" else None,
            prefetch=draw.choice([None, 0, 1]) if shard != "none" else None,
            gradient_buffers=draw.choice([None, 1, 2]) if shard in ("gradients", "full") else None,
            keep=draw.choice([None, None, (2,) * pp]),
            balance=draw.random() < 0.2,
        ),
    )


def some_runs(count):
    draw, found = random.Random(0), []
    while len(found) < count:
        config = some_run(draw)
        if not find_problems(config, trains=False):
            found.append(config)
    return found


def test_what_is_simulated_has_the_recipe_of_what_is_trained():
    program, families = load_software("pipeloom"), set()
    for config in some_runs(300):
        assert recipe_of(described_run(config, "fp32"), program, order_of(config)) == config.recipe(), config
        families.add(config.schedule.family)
    assert families == {name for name, one in FAMILIES.items() if one.has_backward}


def test_passes_run_in_the_order_of_the_recipe():
    tied = add_tied(lower(BREADTH_FIRST.make(), 1))
    expected = add_reduce_grad(add_unshard(tied, 1, 0), 1)
    recipe = Recipe(
        start=BREADTH_FIRST,
        receive_buffers=1,
        lends_tied=True,
        unshard=Unshard(1, 0),
        reduce_grad=ReduceGrad(1),
    )
    assert build(recipe) == expected
    assert build(replace(recipe, start=BREADTH_FIRST.make())) == expected
    assert build(replace(recipe, moves=Moves(balance=True))) == add_moves(expected, Moves(balance=True))


def test_stages_visit_the_device_with_their_updates():
    updated = add_updates(lower(ONE_RANK.make()), "at once")
    recipe = Recipe(start=ONE_RANK, updates="at once", residence=Residence(2, is_bytes=False))
    assert build(recipe) == add_stage_swaps(updated, 2)

    class Tens:
        def kept(self, _):
            return KeptBytes()

        def stages(self):
            return [Amounts(weights=3, gradient=3, state=4)] * 4

    assert build(replace(recipe, residence=Residence(20)), Tens()).rows == add_stage_swaps(updated, 2).rows
    forward_only = replace(recipe, start=replace(ONE_RANK, family="forward-only"))
    assert not any(row.is_kind(Kind.UPDATE).any() for row in build(forward_only).rows)


def test_a_schedule_is_made_once():
    recipe = Recipe(start=BREADTH_FIRST, reduce_grad=ReduceGrad(None))
    assert communicating(recipe) is communicating(replace(recipe, moves=Moves(balance=True)))


def test_without_messages_only_messages_are_missing():
    recipe = Recipe(start=BREADTH_FIRST, unshard=Unshard(1, 1), reduce_grad=ReduceGrad(2))
    whole = communicating(recipe)
    messages = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
    num_messages = sum(int(row.is_kind(*messages).sum()) for row in whole.rows)
    assert num_messages > 0
    assert without_messages(recipe).num_nodes == whole.num_actions - num_messages


@pytest.mark.parametrize("shard", ["none", "full"])
def test_the_default_run_exchanges_what_its_level_takes(shard):
    config = RunConfig(layout=Layout(pp=2, dp=2, shard=shard, loops=2, num_microbatches=4))
    lowered = lower(make_schedule("breadth-first", pp=2, loops=2, num_microbatches=4))
    gathered = add_unshard(lowered, 2, 1) if shard == "full" else lowered
    assert build(config.recipe()) == add_reduce_grad(gathered)
