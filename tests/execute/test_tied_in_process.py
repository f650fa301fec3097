"""A tied embedding and head, every rank in one process: two steps equal the single process."""

from collections import deque
from itertools import product

import pytest
import torch
from families import SOME, fitting
from thinned import thinned
from transformer_ranks import TransformerCluster, differences, plain_steps, tied_schedule

from pipeloom.analysis.bubble import account_bubble
from pipeloom.errors import UserError
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.parts.part import RankRow
from pipeloom.execute.parts.tied import Tied
from pipeloom.families import make_schedule
from pipeloom.model import TIED_NAME
from pipeloom.passes import lower
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.trace import from_chrome, merge, to_chrome
from pipeloom.workload.layout import Layout

LEVELS = ("none", "optimizer", "gradients", "full")


def layout_of(family, **sizes):
    return Layout(loops=fitting(family, sizes.pop("loops", 2))["loops"], **sizes)


CASES = [
    *(("none", pp, 1, None) for pp in (1, 2, 4)),
    *((shard, 2, 2, None) for shard in LEVELS),
    ("gradients", 1, 2, None),
    ("full", 1, 2, None),
    ("full", 3, 2, None),
    ("full", 2, 4, 2),
]


EVERY = [(family, *case, (1, 5)[(n + m) % 2]) for n, family in enumerate(SOME) for m, case in enumerate(CASES)]
"""Each family in each case, with one micro-batch and with many in turns."""


@pytest.mark.parametrize(("family", "shard", "pp", "dp", "replicate", "num_microbatches"), thinned(EVERY, 5))
def test_steps_equal_the_single_process(family, shard, pp, dp, replicate, num_microbatches):
    sizes = {"pp": pp, "dp": dp, "replicate": replicate, "shard": shard, "num_microbatches": num_microbatches}
    layout = layout_of(family, **sizes)
    assert differences(TransformerCluster(layout, tied_schedule(layout, family))) < 1e-9


PLACED = [
    (family, shard, ("v", "linear")[(n + m) % 2]) for n, family in enumerate(SOME) for m, shard in enumerate(LEVELS)
]


@pytest.mark.parametrize(("family", "shard", "placement"), thinned(PLACED, 3))
def test_so_they_do_in_every_placement(family, shard, placement):
    layout = layout_of(family, pp=2, dp=2, shard=shard, num_microbatches=3)
    schedule = tied_schedule(layout, family, fitting(family, 2, placement)["placement"])
    assert differences(TransformerCluster(layout, schedule, "gpt2")) < 1e-9


FEW = [
    (family, buffers, shard, ("looped", "v")[(n + buffers + (shard == "full")) % 2])
    for n, family in enumerate(("depth-first", "breadth-first", "hybrid"))
    for buffers, shard in product((1, 2), ("gradients", "full"))
]


@pytest.mark.parametrize(("family", "buffers", "shard", "placement"), thinned(FEW, 5))
def test_the_heads_gradient_is_in_the_last_of_several_reductions(family, buffers, shard, placement):
    layout = layout_of(family, pp=2, dp=2, loops=3, shard=shard, num_microbatches=4)
    schedule = tied_schedule(layout, family, placement, gradient_buffers=buffers, residency=1)
    if family == "depth-first" and buffers == 1:
        assert sum(action.kind is Kind.REDUCE_GRAD and action.stage == 0 for action in schedule.rows[0]) > 1
    assert differences(TransformerCluster(layout, schedule)) < 1e-9


@pytest.mark.parametrize(("pp", "placement"), [(1, "looped"), (2, "looped"), (2, "v"), (3, "looped")])
@pytest.mark.parametrize("shard", ["none", "full"])
def test_evaluation_between_steps_uses_the_weights_of_now(pp, placement, shard):
    layout = layout_of("breadth-first", pp=pp, dp=2, shard=shard, num_microbatches=2)
    cluster = TransformerCluster(layout, tied_schedule(layout, "breadth-first", placement))
    forward = tied_schedule(layout, "forward-only", placement)
    evaluators = [cluster.executor(rank, forward) for rank in range(layout.num_ranks)]
    whole = cluster.model.whole()
    for _ in range(2):
        cluster.step()
        for found in cluster.whole("shard"):
            for name, tensor in found.items():
                whole.get_parameter(name).data.copy_(tensor)
        found = sum(float(value) for result in cluster.play(evaluators) for value in result.outputs.values())
        with torch.no_grad():
            numbered = enumerate(cluster.model.tokens())
            expected = sum(float(cluster.model.loss(whole(tokens), number)) for number, tokens in numbered)
        assert found == pytest.approx(expected, rel=1e-12)


def test_frozen_first_stages_keep_the_matrix_and_the_head_still_uses_it():
    rows = ("0F0 0SEND_F0", "1RECV_F0 1F0 1RECV_B0 1B0", "2RECV_F0 2F0 2B0 2SEND_B0")
    rows = (rows[0].replace("0F0", "0SEND_TIED 0F0"), rows[1], "2RECV_TIED " + rows[2])
    rows = (rows[0], rows[1].replace("1F0", "1F0 1SEND_F0"), rows[2])
    schedule = parse_schedule("\n".join(rows))
    assert schedule.first_backward_stage == 1
    layout = Layout(pp=3, loops=1, num_microbatches=1)
    cluster = TransformerCluster(layout, schedule)
    expected = plain_steps(cluster.model, 1)[0][0]
    found = {name: tensor for one in cluster.step() for name, tensor in one.items()}
    assert not found[TIED_NAME].any()
    trained = [name for name in found if name.startswith(("layers", "head"))]
    assert trained
    assert all(float((found[name] - expected[name]).abs().max()) < 1e-9 for name in trained)


def test_the_trace_shows_both_messages_on_the_lanes_of_their_edge():
    layout = layout_of("breadth-first", pp=3, dp=2, shard="full", num_microbatches=3)
    cluster = TransformerCluster(layout, tied_schedule(layout, "breadth-first"))
    cluster.step()
    trace = merge(cluster.results[rank].trace for rank in layout.pipelines()[0])
    found = {(str(span.action), span.rank, str(span.lane)) for span in trace.spans if "TIED" in span.action.kind.value}
    assert found == {
        ("0SEND_TIED", 0, "send to 2"),
        ("5RECV_TIED", 2, "recv from 0"),
        ("5SEND_TIED_GRAD", 2, "send to 0"),
        ("0RECV_TIED_GRAD", 0, "recv from 2"),
    }
    account_bubble(cluster.schedule, trace)  # refuses what is not a trace of the schedule
    text = to_chrome(trace, "measured")
    assert text.count('"ph": "s"') == sum("RECV" in span.action.kind.value for span in trace.spans)
    assert len(from_chrome(text).spans) == len(trace.spans)


class HeldBack(deque):
    """Messages that have not arrived before somebody lets them."""

    is_open = False

    def __bool__(self):
        return self.is_open and len(self) > 0


def go_on(running, waiting):
    """Run every rank until none can go on; where those are that have not ended."""
    moved = True
    while moved:
        moved = False
        for executor, steps in list(running.items()):
            if executor not in waiting or waiting[executor].is_done():
                moved = True
                try:
                    waiting[executor] = next(steps)
                except StopIteration:
                    del running[executor]
    return [executor.position() for executor in running]


@pytest.mark.parametrize(("dp", "place"), [(1, "at the end of its"), (2, "0REDUCE_GRAD, waiting")])
def test_nobody_waits_for_either_message_before_it_is_needed(dp, place):
    layout = Layout(pp=3, loops=1, dp=dp, shard="full" if dp > 1 else "none", num_microbatches=4)
    cluster = TransformerCluster(layout, tied_schedule(layout, "1f1b"))
    weights, gradients = [HeldBack() for _ in range(dp)], [HeldBack() for _ in range(dp)]
    for post, weight, gradient in zip(cluster.posts, weights, gradients, strict=True):
        post.edges.update({(0, 2): weight, (2, 0): gradient})
    tokens = cluster.model.tokens()[: layout.num_microbatches]
    running = {executor: executor.steps(tokens, cluster.model.loss) for executor in cluster.executors}
    waiting = {}
    stuck = go_on(running, waiting)
    assert sum("2F0, waiting for 2RECV_TIED with rank 0" in position for position in stuck) == dp
    assert sum("TIED" in position for position in stuck) == dp
    for weight in weights:
        weight.is_open = True
    stuck = go_on(running, waiting)
    assert len(stuck) == dp
    assert all(place in position and "waiting for 0RECV_TIED_GRAD with rank 2" in position for position in stuck)
    for gradient in gradients:
        gradient.is_open = True
    assert go_on(running, waiting) == []


def test_nothing_stays_lent_after_a_step():
    for pp in (1, 2):
        layout = layout_of("breadth-first", pp=pp, num_microbatches=2)
        cluster = TransformerCluster(layout, tied_schedule(layout, "breadth-first"))
        cluster.step()
        (head,) = [w.module for p in cluster.parallel for i, w in p.weights.items() if i == layout.num_stages - 1]
        with pytest.raises(AssertionError, match="without the embedding's matrix"):
            head(torch.zeros(1, 2, 8, dtype=torch.float64))


def test_a_schedule_without_the_messages_is_refused():
    layout = layout_of("gpipe", pp=2, num_microbatches=2)
    with pytest.raises(UserError, match="the schedule does not send; call add_tied first"):
        TransformerCluster(layout, lower(make_schedule("gpipe", pp=2, num_microbatches=2)))


def test_a_last_reduction_before_the_head_is_done_is_refused_on_one_rank_too():
    tied = Tied("name", TensorSpec((1,), torch.float32), gradient_dtype=torch.float32, lender=None, borrower=None)
    row = RankRow(parse_schedule("0F0 1F0 1I0 0B0 1W0 0REDUCE_GRAD 1REDUCE_GRAD"), 0, None)
    tied.bind(row)
    assert [slot for slot, calls in enumerate(row.before) if calls] == [0, 5]
    late = RankRow(parse_schedule("0F0 1F0 1I0 0B0 0REDUCE_GRAD 1W0 1REDUCE_GRAD"), 0, None)
    with pytest.raises(UserError, match="the last 0REDUCE_GRAD precedes a backward of stage 1"):
        tied.bind(late)


def test_a_single_stage_needs_nothing_of_this():
    layout = Layout(pp=1, loops=1, num_microbatches=3, partition=(4,))
    assert differences(TransformerCluster(layout, tied_schedule(layout, "breadth-first"))) < 1e-9
