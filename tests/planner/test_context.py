"""The context axis in the search: for long sequences, in programs that run it."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_model
from pipeloom.errors import ConfigError
from pipeloom.planner.plan import make_question, plan
from pipeloom.planner.space import arrangements
from pipeloom.workload.launchers import MEGATRON

LONG = 131_072


def question(**changes):
    wanted = {"num_devices": 8, "global_batch": 4, "seq": LONG, "launcher": "megatron", "recompute": ("full",)}
    return make_question("llama-3-8b", "dgx-h100", **(wanted | changes))


def test_a_context_axis_is_searched_where_ranks_have_enough_tokens():
    assert question(num_devices=64).context_sizes == (1, 2, 4, 8, 16, 32)
    assert question(seq=8192).context_sizes == (1, 2)
    assert question(seq=4096).context_sizes == (1,)
    assert question(seq=4096, cp=(1, 4)).context_sizes == (1, 4)


def test_a_data_axis_in_place_of_half_a_context_axis_is_preferred():
    """Twice the replicas with half the sequences have as many tokens a rank, without the exchange."""
    found, _ = arrangements(question(tp=(1,), pp=(1,)))
    sizes = {(one.run.cp, one.run.dp, one.run.micro_batch) for one in found}
    assert (2, 4, 1) in sizes
    assert not {(cp, dp, size) for cp, dp, size in sizes if cp > 1 and size > 1}
    only, _ = arrangements(question(tp=(1,), pp=(1,), cp=(2,), dp=(4,), global_batch=8))
    assert {(one.run.cp, one.run.micro_batch) for one in only} == {(2, 1), (2, 2)}


@pytest.mark.parametrize(("kv_heads", "sizes"), [(1, (1, 8)), (2, (2, 4))])
@pytest.mark.parametrize("launcher", ["megatron", "pipeloom"])
def test_a_sequence_that_no_other_axis_fits_is_trained_with_a_context_axis(launcher, kv_heads, sizes):
    """One sequence, few key and value heads: no data axis, a small tensor axis, a pipeline that holds all tokens."""
    model = replace(load_model("llama-3-8b"), kv_heads=kv_heads)

    def answer(cp):
        wanted = {"num_devices": 8, "global_batch": 1, "seq": LONG, "launcher": launcher}
        return plan(make_question(model, "dgx-h100", **wanted, cp=cp), count=1, explains=False)

    alone, found = answer((1,)), answer((1, 2, 4, 8))
    assert alone.question.limits.tp is None is alone.question.limits.pp
    assert alone.best is None is alone.open_bound_s
    assert (found.best.run.tp, found.best.run.cp) == sizes


def test_shards_inside_a_node_are_those_of_whole_replicas():
    found, _ = arrangements(question(num_devices=16, tp=(1,), pp=(1,), cp=(4,)))
    sizes = {(one.replicate, one.levels) for arrangement in found for one in arrangement.shardings()}
    assert {replicate for replicate, _ in sizes} == {1, 2}


def test_a_program_without_a_context_axis_refuses_it():
    refusal = "other has no context parallelism; leave cp out, or name another program"
    launcher = replace(MEGATRON, title="other", has_context=False)
    with pytest.raises(ConfigError, match=refusal):
        replace(question(cp=(2,)), launcher=launcher)
    assert replace(question(), launcher=launcher).context_sizes == (1,)
