"""The greedy generator keeps its budgets, is never worse than a family, and is close to the best there is."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from thinned import thinned

from pipeloom.analysis.summary import longest_rank_s
from pipeloom.cost.costs import StageCosts
from pipeloom.errors import ConfigError
from pipeloom.families import make_schedule
from pipeloom.families.greedy import Task, best_schedule
from pipeloom.families.local_search import SearchProblem, local_search
from pipeloom.families.weight_gradients import insert_weight_gradients, without_weight_gradients
from pipeloom.passes import lower
from pipeloom.schedule import PLACEMENTS, Placement
from pipeloom.schedule.ledger import KeptBytes, most_in_rows
from pipeloom.simulation import simulate

SECONDS = st.integers(1, 6).map(float)


def task(placement, count, seconds=(1, 1, 1), inputs=None, **more):
    stages = placement.num_stages
    forward_s, input_s, weight_s = ((float(each),) * stages for each in seconds)
    budgets = (float(stages if inputs is None else inputs),) * placement.num_ranks
    sizes = {"placement": placement, "num_microbatches": count, "budgets": budgets}
    return Task(forward_s=forward_s, input_s=input_s, weight_s=weight_s, **(sizes | more))


@st.composite
def tasks(draw):
    pp, loops = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    placement = draw(st.sampled_from(list(PLACEMENTS.values())))(pp, loops)
    stages = placement.num_stages
    forward_s, input_s, weight_s, kept = (draw(st.lists(SECONDS, min_size=stages, max_size=stages)) for _ in range(4))
    pending = [size * draw(st.sampled_from([0.25, 0.5, 1.0])) for size in kept]
    least = [sum(kept[stage] for stage in placement.stages_of(rank)) for rank in range(pp)]
    return Task(
        placement=placement,
        num_microbatches=draw(st.integers(1, 4)),
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        boundary_s=[draw(st.sampled_from([0.0, 0.5]))] * (stages - 1),
        kept=kept,
        pending=pending,
        budgets=[each * draw(st.sampled_from([1.0, 1.5, 3.0])) for each in least],
    )


@settings(max_examples=3, deadline=None)
@given(tasks())
def test_what_is_found_keeps_every_budget_and_takes_the_seconds_that_the_simulator_says(wanted):
    found = best_schedule(wanted)
    held = most_in_rows(found.schedule, KeptBytes(wanted.kept, wanted.pending))
    assert all(most <= room * (1 + 1e-9) for most, room in zip(held, wanted.budgets, strict=True))
    seconds = [i + w for i, w in zip(wanted.input_s, wanted.weight_s, strict=True)]
    share = {w / (i + w) for i, w in zip(wanted.input_s, wanted.weight_s, strict=True)}
    if len(share) == 1 and not any(wanted.boundary_s):
        trace = simulate(found.schedule, StageCosts(tuple(wanted.forward_s), tuple(seconds), weight_share=share.pop()))
        assert trace.end_s == pytest.approx(found.step_s)
        assert longest_rank_s(trace) == pytest.approx(found.rank_s)
    lower(found.schedule)
    assert best_schedule(wanted).schedule.rows == found.schedule.rows


@pytest.mark.parametrize(
    ("pp", "seconds"),
    thinned([(2, (18, 18, 9)), (4, (1, 1, 1)), (2, (30, 29, 20)), (8, (1, 1, 1))], 2),
)
def test_no_family_is_better_in_its_own_memory(pp, seconds):
    forward_s, input_s, weight_s = seconds
    for name, loops in (("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("v-half", 2)):
        schedule = make_schedule(name, pp=pp, loops=loops, num_microbatches=3 * pp)
        stages, both_s = pp * loops, input_s + weight_s
        costs = StageCosts((float(forward_s),) * stages, (float(both_s),) * stages, weight_share=weight_s / both_s)
        wanted = task(schedule.placement, 3 * pp, seconds, max(schedule.peak_stage_inputs))
        assert best_schedule(wanted).step_s <= simulate(schedule, costs).end_s * (1 + 1e-9)


def test_twice_the_memory_takes_the_bubble_away_and_short_gradients_of_weights_bring_some_back():
    """The profiled seconds of 6.2B and 1.5B on 8 ranks."""
    rates = []
    for seconds, pending in (((29.7, 29.4, 19.9), 0.43), ((18.5, 18.1, 9.3), 0.37)):
        wanted = task(Placement.looped(8), 24, seconds, 16, pending=(pending,) * 8)
        rates.append(best_schedule(wanted, "rank").rank_s / (24 * sum(seconds)) - 1)
    assert rates == pytest.approx([0, 0.04], abs=0.01)


def test_what_cannot_be_is_reported_at_once():
    with pytest.raises(ConfigError) as refused:
        task(Placement.looped(2), 0, boundary_s=(1.0, 1.0))
    assert refused.value.problems == (
        "boundary_s must have 1 values, found 2",
        "the number of micro-batches must be at least 1, found 0",
    )
    with pytest.raises(ConfigError, match="rank 1 needs room for an input of each of its stages, 2, found 1"):
        task(Placement.v(2, 2), 4, budgets=(2.0, 1.0))


CASES = [
    (Placement.looped(pp), count, seconds, inputs, 1)
    for pp, count, seconds, inputs in (
        (2, 6, (2, 2, 1), 2),
        (3, 4, (3, 2, 1), 3),
        (3, 6, (1, 1, 1), 6),
        (4, 6, (2, 3, 2), 2),
    )
] + [
    (placement(pp, 2), count, seconds, inputs, 1.04)
    for placement in (Placement.looped, Placement.v)
    for pp, count, seconds, inputs in ((2, 3, (1, 1, 1), 4), (2, 4, (3, 2, 1), 3), (3, 3, (2, 2, 1), 6))
]


@pytest.mark.parametrize(("placement", "count", "seconds", "inputs", "most"), thinned(CASES, 3))
def test_the_best_there_is_is_not_much_better(placement, count, seconds, inputs, most):
    """The bounds are the largest gaps of ``benchmarks/greedy_gap.py``."""
    pytest.importorskip("ortools", reason="the exact solver is not installed: pip install ortools")
    from exact import Exact

    found = best_schedule(task(placement, count, seconds, inputs))
    sizes = [[each] * placement.num_stages for each in seconds]
    exact = Exact(placement, count, sizes, [inputs] * placement.num_ranks, most_s=round(found.step_s))
    best_s, is_proven, _ = exact.solve(exact.makespan)
    assert is_proven
    assert best_s <= found.step_s <= best_s * most * (1 + 1e-9)


def test_changed_orders_are_better_where_memory_is_short_and_never_worse():
    short = task(Placement.v(2, 2), 4, (3, 2, 1), 3)
    assert best_schedule(short).step_s < best_schedule(short, tries=0).step_s
    for wanted in (task(Placement.looped(4), 6, (2, 3, 2), 2), task(Placement.looped(2, 2), 3, inputs=3)):
        assert best_schedule(wanted, tries=40).step_s <= best_schedule(wanted, tries=0).step_s


def test_more_tries_from_a_start_are_never_worse_and_keep_what_a_rank_has_room_for():
    wanted = task(Placement.v(2, 2), 4, (3, 2, 1), 3)
    clocks = [wanted.clock.with_patience(patience, pulls=False) for patience in (0.0, 1.0)]
    problem = SearchProblem(wanted.placement, wanted.budgets, clocks, end_of)
    orders = [without_weight_gradients(row) for row in best_schedule(wanted, tries=0).schedule.rows]
    start = min(
        (insert_weight_gradients(orders, wanted.placement, wanted.budgets, clock) for clock in clocks), key=end_of
    )
    ends = [end_of(local_search(problem, start, tries, 5)) for tries in (0, 50, 500)]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < ends[0] == end_of(start)
    assert end_of(local_search(problem, start, 500, 5)) == ends[-1]


def end_of(woven):
    """When the last action starts."""
    return max(float(starts.max()) for starts in woven.starts)
