"""One recipe makes the schedule that is trained, simulated, planned and printed."""

from dataclasses import replace

import pytest

from pipeloom.config import RunConfig
from pipeloom.families import Choice, make_schedule
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
from pipeloom.recipe import Recipe, Residence, build, communicating, without_messages
from pipeloom.schedule import Kind
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.workload.layout import Layout

BREADTH_FIRST = Choice(family="breadth-first", pp=2, loops=2, num_microbatches=4)
ONE_RANK = Choice(family="breadth-first", pp=1, loops=4, num_microbatches=2)


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
