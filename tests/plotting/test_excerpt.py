"""Parts of large traces."""

from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.plotting.timelines import excerpt
from pipeloom.simulation import simulate

TRACE = simulate(lower(make_schedule("breadth-first", pp=4, loops=2, num_microbatches=6)), Costs(1.0, 2.0, 0.1))


def test_a_small_trace_is_kept_whole():
    part, note = excerpt(TRACE)
    assert part == TRACE
    assert note == ""


def test_of_many_ranks_the_first_are_kept():
    part, note = excerpt(TRACE, most_ranks=2)
    assert part.num_ranks == 2
    assert {span.rank for span in part.spans} == {0, 1}
    assert part.compute(1) == TRACE.compute(1)
    assert note == "ranks 0 to 1 of 4"


def test_of_many_actions_the_first_are_kept():
    part, note = excerpt(TRACE, most_ranks=3, most_actions=20)
    assert 0 < len(part.compute()) <= 20
    last = max(span.start_s for span in part.compute())
    left_out = [span for rank in range(3) for span in TRACE.compute(rank) if span not in part.compute(rank)]
    assert min(span.start_s for span in left_out) >= last
    assert note.startswith("ranks 0 to 2 of 4, the first ")
