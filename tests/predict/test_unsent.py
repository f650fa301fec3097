"""A step without its messages is the same order, and takes no longer."""

import hypothesis.strategies as st
from families import TRAINING, named_sizes
from hypothesis import given, settings

from pipeloom.catalog import load_model, load_software
from pipeloom.cost.costs import Costs
from pipeloom.families import Choice
from pipeloom.predict.step import graph_without_messages, lowered
from pipeloom.recipe import Knobs
from pipeloom.schedule.clock import seconds_of_all
from pipeloom.schedule.kinds import COMPUTE_KINDS, Kind
from pipeloom.simulation import simulate
from pipeloom.workload.run import Run

WITHOUT_MESSAGES = (*COMPUTE_KINDS, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)


@settings(max_examples=80, deadline=None)
@given(
    named_sizes(names=TRAINING),
    st.integers(1, 4),
    st.integers(1, 10),
    st.sampled_from(["none", "optimizer", "gradients", "full"]),
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.none() | st.integers(1, 3)),
    st.integers(0, 4),
)
def test_without_messages_nothing_else_changes_and_nothing_takes_longer(named, pp, count, shard, rooms, transfer_s):
    name, sizes = named
    shape, software = load_model("gpt-6.6b"), load_software("pipeloom")
    choice = Choice(family=name, pp=pp, num_microbatches=count, **sizes)
    knobs = Knobs(choice=choice, residency=rooms[0], prefetch=rooms[1], gradient_buffers=rooms[2])
    run = Run(
        shape=shape, seq=1024, global_batch=2 * count, pp=pp, dp=2, micro_batch=1, loops=choice.loops, shard=shard
    )
    schedule, graph = lowered(run, software, knobs), graph_without_messages(run, software, knobs)
    assert [row.take(row.is_kind(*WITHOUT_MESSAGES)) for row in schedule.rows] == list(graph.facts.rows)
    costs = Costs(2, 4, transfer_s, unshard_s=3, reduce_s=5)
    _, ends = graph.times(seconds_of_all(graph.facts, costs.seconds))
    assert 0 < ends.max() <= simulate(schedule, costs).end_s
