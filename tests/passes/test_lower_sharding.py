"""Gathers and reductions: how few, where they stand, and that nothing is lost, on every level of sharding."""

import itertools
import re
from collections import Counter, defaultdict
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from orders import family_schedules, one_rank_schedules

from pipeloom.errors import ScheduleError, UserError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_unshard, lower
from pipeloom.schedule import Kind, Level, Placement, Schedule, format_schedule, parse_schedule
from pipeloom.schedule.sharding import fewest_stays

COMPUTE = ("F", "B", "I", "R")  # on the weights; W needs none
quick = settings(max_examples=80, deadline=None)
residencies = st.integers(1, 5)
prefetches = st.integers(0, 4)


def gathers(schedule):
    """For each rank its number of gathers."""
    return [sum(action.kind == "UNSHARD" for action in row) for row in schedule.rows]


def reductions(schedule):
    return [sum(action.kind == "REDUCE_GRAD" for action in row) for row in schedule.rows]


def sharded(name, residency, prefetch=1, **sizes):
    return add_unshard(lower(make_schedule(name, **sizes)), residency, prefetch)


def visits_of(row):
    """Stages of the visits, in order: runs of what computes on the weights of one stage."""
    stages = [action.stage for action in row if action.kind.value in COMPUTE]
    return [stage for stage, _ in itertools.groupby(stages)]


# ---------------------------------------------------------------------------------------------- how few


@pytest.mark.parametrize("loops", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 7, 32])
def test_breadth_first_gathers_two_times_its_stages_but_those_that_stay_whatever_the_micro_batches(loops, count):
    for residency in range(1, loops + 1):
        schedule = sharded("breadth-first", residency, pp=4, loops=loops, num_microbatches=count)
        assert gathers(schedule) == [2 * loops - residency] * 4


@pytest.mark.parametrize(("loops", "count", "expected"), [(4, 8, 31), (4, 32, 163), (8, 32, 395)])
def test_depth_first_gathers_once_a_visit_with_one_stage_resident(loops, count, expected):
    schedule = sharded("depth-first", 1, pp=4, loops=loops, num_microbatches=count)
    assert gathers(schedule)[0] == len(visits_of(schedule.rows[0])) == expected


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_without_loops_one_gather_lasts_for_the_step(name):
    assert gathers(sharded(name, 1, pp=4, num_microbatches=8)) == [1] * 4


def fewest_arrivals(stages, places):
    """By trying every choice of what goes: the fewest arrivals, and None kept beyond ``places``."""
    arrivals = {frozenset(): 0}  # what is there -> the fewest arrivals so far
    for stage in stages:
        after = {}
        for present, number in arrivals.items():
            others = present - {stage}
            for kept in range(min(len(others), places - 1) + 1):
                for stay in itertools.combinations(sorted(others), kept):
                    there = frozenset({stage, *stay})
                    cost = number + (stage not in present)
                    after[there] = min(cost, after.get(there, cost))
        arrivals = after
    return min(arrivals.values(), default=0)


@given(st.lists(st.integers(0, 4), max_size=14), st.integers(1, 4))
def test_stays_are_the_fewest_cover_every_use_and_never_exceed_the_places(stages, places):
    stays = fewest_stays(stages, places)
    assert len(stays) == fewest_arrivals(stages, places)
    assert [stay.first for stay in stays] == sorted({stay.first for stay in stays})
    for use, stage in enumerate(stages):
        held = [stages[stay.first] for stay in stays if stay.first <= use <= stay.last]
        assert len(held) == len(set(held)) <= places
        assert stage in held


@quick
@given(one_rank_schedules(), residencies, prefetches)
def test_gathers_are_the_fewest_for_any_order_of_compute(schedule, residency, prefetch):
    expected = fewest_arrivals(visits_of(schedule.rows[0]), residency)
    assert gathers(add_unshard(schedule, residency, prefetch)) == [expected]


@quick
@given(family_schedules(trains=False), prefetches)
def test_more_residency_never_gathers_more_and_prefetch_changes_no_number(schedule, prefetch):
    counts = [gathers(add_unshard(schedule, residency, prefetch)) for residency in range(1, 6)]
    for few, more in itertools.pairwise(counts):
        assert all(a >= b for a, b in zip(few, more, strict=True))
    stages = [len(schedule.placement.stages_of(rank)) for rank in range(schedule.num_ranks)]
    assert counts[4] == gathers(add_unshard(schedule, None, prefetch)) == stages
    assert counts[1] == gathers(add_unshard(schedule, 2, 0))


# ---------------------------------------------------------------------------------------------- where


@quick
@given(family_schedules(trains=False) | one_rank_schedules(), residencies, prefetches)
def test_a_stage_is_gathered_while_it_is_visited_and_the_row_is_otherwise_what_it_was(schedule, residency, prefetch):
    result = add_unshard(schedule, residency, prefetch)
    assert result.level is Level.COMMUNICATION
    assert result.max_gathered == residency
    for row, before in zip(result.rows, schedule.rows, strict=True):
        assert tuple(action for action in row if action.kind.value not in ("UNSHARD", "RESHARD")) == before
        there = set()
        for action in row:
            match action.kind.value:
                case "UNSHARD":
                    assert action.stage not in there
                    there.add(action.stage)
                case "RESHARD":
                    there.remove(action.stage)
                case "F" | "B" | "I":  # W needs no weights
                    assert action.stage in there
            assert len(there) <= residency
        assert there == set()


def places_of(row):
    """For each gather its slot, the number of visits before it, and the number of the visit that it is for."""
    compute = [slot for slot, action in enumerate(row) if action.kind.value in COMPUTE]
    first_slots = [s for n, s in enumerate(compute) if n == 0 or row[s].stage != row[compute[n - 1]].stage]
    for slot, action in enumerate(row):
        if action.kind == "UNSHARD":
            started = [s for s in first_slots if s < slot]
            own = next(n for n, s in enumerate(first_slots) if s > slot and row[s].stage == action.stage)
            yield slot, len(started), own, first_slots


@quick
@given(family_schedules(), residencies, prefetches)
def test_a_gather_is_at_the_end_of_a_visit_in_the_order_of_visits_and_within_its_distance(s, residency, prefetch):
    for row in add_unshard(s, residency, prefetch).rows:
        owns = []
        for slot, started, own, first_slots in places_of(row):
            assert own - prefetch <= started <= own
            between = row[slot : first_slots[started]]
            assert all(action.kind.value not in COMPUTE for action in between)
            owns.append(own)
        assert owns == sorted(owns)


@quick
@given(family_schedules(), residencies, prefetches)
def test_no_gather_could_stand_earlier(schedule, residency, prefetch):
    result = add_unshard(schedule, residency, prefetch)
    for rank, row in enumerate(result.rows):
        for slot, started, own, first_slots in places_of(row):
            if started > max(0, own - prefetch):
                moved = [*row[:slot], *row[slot + 1 :]]
                moved.insert(first_slots[started - 1], row[slot])
                rows = [moved if number == rank else other for number, other in enumerate(result.rows)]
                with pytest.raises(ScheduleError) as refused:
                    result.with_rows(rows, result.level)
                assert refused.value.rule in ("gathered-bound", "unshard-before-compute")  # no place, or there still


@quick
@given(family_schedules(), residencies)
def test_a_stage_is_dropped_as_soon_as_it_is_not_used_again_before_it_is_gathered_anew(schedule, residency):
    for row in add_unshard(schedule, residency, 1).rows:
        for slot, action in enumerate(row):
            if action.kind == "RESHARD":
                before = next(a for a in reversed(row[:slot]) if a.kind.value in COMPUTE)
                assert before.stage == action.stage


def test_prefetch_and_residency_in_one_row():
    def row(residency, prefetch):
        schedule = make_schedule("breadth-first", pp=1, loops=3, num_microbatches=1)
        return " ".join(map(str, add_unshard(schedule, residency, prefetch).rows[0]))

    one = (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 2RESHARD "
        "1UNSHARD 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    )
    assert row(1, 0) == row(1, 1) == row(1, 9) == one  # without a free place nothing can be ahead
    assert row(2, 0) == (
        "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 2UNSHARD 2F0 2B0 2RESHARD 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    )
    assert row(2, 1) == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    )
    assert row(3, 2) == "0UNSHARD 1UNSHARD 2UNSHARD 0F0 1F0 2F0 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD"


def test_kept_weights_are_gathered_once_before_their_first_use_and_never_dropped():
    schedule = make_schedule("breadth-first", pp=1, loops=3, num_microbatches=1)
    row = " ".join(map(str, add_unshard(schedule, None, 1).rows[0]))
    assert row == "0UNSHARD 1UNSHARD 0F0 2UNSHARD 1F0 2F0 2B0 1B0 0B0"
    assert add_unshard(schedule, None, 1).max_gathered is None


# ---------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("buffers", [1, 2, 3, None])
def test_breadth_first_reduces_each_stage_once_however_few_the_buffers(buffers):
    schedule = lower(make_schedule("breadth-first", pp=4, loops=4, num_microbatches=8))
    assert reductions(add_reduce_grad(schedule, buffers)) == [4] * 4


@pytest.mark.parametrize(("loops", "groups"), [(2, 1), (4, 2), (4, 8)])
def test_depth_first_with_one_gradient_buffer_reduces_once_a_backward_visit(loops, groups):
    schedule = lower(make_schedule("depth-first", pp=4, loops=loops, num_microbatches=4 * groups))
    assert reductions(add_reduce_grad(schedule, 1)) == [loops * groups] * 4
    assert reductions(add_reduce_grad(schedule)) == [loops] * 4


@quick
@given(one_rank_schedules(), st.integers(1, 4))
def test_reductions_are_the_fewest_for_any_order_of_compute(schedule, buffers):
    adding = [action.stage for action in schedule.rows[0] if action.kind.value in ("B", "W")]
    assert reductions(add_reduce_grad(schedule, buffers)) == [fewest_arrivals(adding, buffers)]


LEVELS = {
    "replicated": add_reduce_grad,
    "sharded optimizer": lambda schedule: add_reduce_grad(add_unshard(schedule, None, 1)),
    "sharded gradients": lambda schedule: add_reduce_grad(add_unshard(schedule, None, 1), 2),
    "fully sharded": lambda schedule: add_reduce_grad(add_unshard(schedule, 2, 1), 2),
    "fully sharded, one place": lambda schedule: add_reduce_grad(add_unshard(schedule, 1, 0), 1),
    "reductions first": lambda schedule: add_unshard(add_reduce_grad(schedule, 2), 2, 1),
}


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(schedule=family_schedules() | one_rank_schedules())
def test_every_micro_batch_is_reduced_exactly_once_on_every_level(level, schedule):
    result = LEVELS[level](schedule)
    for row in result.rows:
        sums, reduced = defaultdict(list), defaultdict(list)
        for action in row:
            if action.kind.value in ("B", "W"):
                sums[action.stage].append(action.microbatch)
                assert len(sums) <= (result.gradient_buffers or len(row))
            elif action.kind == "REDUCE_GRAD":
                reduced[action.stage] += sums.pop(action.stage)
        assert not sums
        assert all(Counter(found) == Counter(range(result.num_microbatches)) for found in reduced.values())
        assert set(reduced) == {action.stage for action in row if action.kind.value in ("B", "W")}


@pytest.mark.parametrize("name", ["breadth-first", "depth-first"])
def test_frozen_stages_are_gathered_and_not_reduced(name):
    full = make_schedule(name, pp=2, loops=2, num_microbatches=4)
    rows = [[a for a in row if a.kind == "F" or a.stage >= 1] for row in full.rows]
    frozen = lower(Schedule(tuple(map(tuple, rows)), Placement.looped(2, 2), 4, first_backward_stage=1))
    result = add_reduce_grad(add_unshard(frozen, 1, 1), 1)
    assert {action.stage for _, _, action in result.actions() if action.kind is Kind.UNSHARD} == {0, 1, 2, 3}
    assert {action.stage for _, _, action in result.actions() if action.kind is Kind.REDUCE_GRAD} == {1, 2, 3}


def test_a_reduction_follows_the_gathers_that_are_needed_before_its_buffer_is():
    schedule = make_schedule("breadth-first", pp=1, loops=4, num_microbatches=1)

    def tail(buffers):
        row = " ".join(map(str, add_reduce_grad(add_unshard(schedule, 2, 1), buffers).rows[0]))
        return row[row.index("3B0") :]

    rest = " 2B0 2RESHARD 0UNSHARD 2REDUCE_GRAD 1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    assert tail(None) == tail(2) == "3B0 3RESHARD 1UNSHARD 3REDUCE_GRAD" + rest
    # with one buffer 2B0 waits for the reduction of stage 3, and stage 1 is needed only behind it
    assert tail(1) == (
        "3B0 3RESHARD 3REDUCE_GRAD 1UNSHARD 2B0 2RESHARD 2REDUCE_GRAD 0UNSHARD "
        "1B0 1RESHARD 1REDUCE_GRAD 0B0 0RESHARD 0REDUCE_GRAD"
    )


def test_a_schedule_that_reduces_already_keeps_its_reductions():
    once = add_reduce_grad(lower(make_schedule("1f1b", pp=2, num_microbatches=3)))
    assert add_reduce_grad(once) is once


# ---------------------------------------------------------------------------------------------- text, refusals


@quick
@given(family_schedules(), st.integers(1, 3) | st.none(), st.integers(1, 3) | st.none())
def test_text_and_csv_read_back(schedule, residency, buffers):
    result = add_reduce_grad(add_unshard(schedule, residency, 1), buffers)
    for read in (parse_schedule(format_schedule(result)), parse_torch_csv(format_torch_csv(result))):
        assert read.rows == result.rows
        assert (read.level, read.num_microbatches) == (result.level, result.num_microbatches)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: add_unshard(s, 0, 1), "residency must be at least 1, found 0"),
        (lambda s: add_unshard(s, 1, -1), "prefetch must be at least 0, found -1"),
        (lambda s: add_unshard(add_unshard(s, 1, 1), 1, 1), "gathers weights already"),
        (lambda s: add_reduce_grad(s, 0), "gradient_buffers must be at least 1, found 0"),
        (lambda s: add_reduce_grad(add_reduce_grad(s), 1), "reduces gradients already"),
    ],
)
def test_wrong_knobs_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        change(lower(make_schedule("1f1b", pp=2, num_microbatches=2)))


def test_the_table_of_gathers_in_the_docs_is_what_the_pass_makes():
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "sharding.md").read_text(encoding="utf-8")
    numbers = r"\| (\d+) \| (\d+) \| ([\d, ]+) \| ([\d, ]+) \|\n"
    table = re.findall(numbers, page)
    assert len(table) == 3
    for loops, count, *shown in table:
        for name, text in zip(("breadth-first", "depth-first"), shown, strict=True):
            sizes = {"pp": 4, "loops": int(loops), "num_microbatches": int(count)}
            assert [int(cell) for cell in text.split(",")] == [gathers(sharded(name, r, **sizes))[0] for r in (1, 2, 3)]
