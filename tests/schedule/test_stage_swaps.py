"""Stages that come to the device and go: how few swaps, where they stand, what they move, and what is refused."""

import itertools
from typing import get_args

import hypothesis.strategies as st
import numpy as np
import pytest
from by_hand import maker
from hypothesis import given, settings
from orders import family_schedules, one_rank_schedules

from pipeloom.cost.costs import Costs
from pipeloom.errors import ScheduleError, UserError
from pipeloom.export.torch_csv import format_torch_csv
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_stage_swaps, add_tied, add_unshard, add_updates, lower
from pipeloom.passes.lower_stage_swaps import UpdatePlace
from pipeloom.recipe import Recipe, Residence, ring_recipe
from pipeloom.recipe import build as build_recipe
from pipeloom.schedule import Action, Kind, Level, Placement, Schedule, format_schedule, parse_schedule
from pipeloom.schedule.kinds import USES_STAGE
from pipeloom.schedule.sharding import arrivals, fewest_stays
from pipeloom.schedule.stage_swaps import Amounts, Content, defers_updates, stage_moves, stage_stays, swap_waits
from pipeloom.simulation import simulate

quick = settings(max_examples=60, deadline=None)
places = st.sampled_from(get_args(UpdatePlace))


def num_swaps_in(schedule):
    return tuple(int(row.is_kind(Kind.SWAP_IN).sum()) for row in schedule.rows)


def one_rank(stages, count, family="breadth-first"):
    return lower(make_schedule(family, pp=1, loops=stages, num_microbatches=count))


# ---------------------------------------------------------------------------------------------- how few


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("stages", "resident"), [(8, 2), (8, 3), (5, 2), (3, 1), (4, 4)])
def test_breadth_first_brings_2_s_minus_r_stages_whatever_the_number_of_micro_batches(stages, resident, count):
    schedule = one_rank(stages, count)
    assert num_swaps_in(add_stage_swaps(schedule, resident)) == (2 * stages - resident,)
    at_once = add_updates(schedule, "at once")
    assert num_swaps_in(add_stage_swaps(at_once, resident)) == (2 * stages - resident,)
    deferred = add_updates(schedule, "in the next step")
    assert num_swaps_in(add_stage_swaps(deferred, resident)) == (2 * stages - resident,)
    at_end = add_updates(schedule, "at the end")
    assert num_swaps_in(add_stage_swaps(at_end, resident)) == (3 * stages - 2 * resident,)


def test_depth_first_swaps_for_every_micro_batch():
    found = [num_swaps_in(add_stage_swaps(one_rank(8, count, "depth-first"), 2))[0] for count in (1, 2, 4, 8, 16, 32)]
    assert found == [14, 26, 50, 98, 194, 386]


def test_the_order_of_a_small_step():
    schedule = add_stage_swaps(add_updates(one_rank(3, 1), "at once"), 2)
    first = "0SWAP_IN 1SWAP_IN 0F0 0SWAP_OUT 2SWAP_IN 1F0 2F0 2B0 2UPDATE 2SWAP_OUT 0SWAP_IN 1B0"
    (*_, row) = format_schedule(schedule).splitlines()  # behind the promises
    assert row == f"{first} 1UPDATE 1SWAP_OUT 0B0 0UPDATE 0SWAP_OUT"
    at_end = add_stage_swaps(add_updates(one_rank(3, 1), "at the end"), 2)
    last = "1B0 0B0 0UPDATE 0SWAP_OUT 2SWAP_IN 1UPDATE 1SWAP_OUT 2UPDATE 2SWAP_OUT"
    assert format_schedule(at_end).endswith(f" {last}\n")


def fewest_by_trying(stages, places):
    """The fewest arrivals with any choice of who goes, by trying all."""
    states = {frozenset(): 0}
    for stage in stages:
        following = {}
        for here, count in states.items():
            options = [(here, count)] if stage in here else [(here | {stage}, count + 1)]
            if len(options[0][0]) > places:
                options = [(here - {gone} | {stage}, count + 1) for gone in here]
            for state, number in options:
                following[state] = min(number, following.get(state, number))
        states = following
    return min(states.values())


@quick
@given(one_rank_schedules(), st.integers(1, 3), places)
def test_no_order_takes_fewer_swaps_with_the_same_room(schedule, resident, place):
    schedule = add_updates(lower(schedule), place)
    used = [action.stage for action in schedule.rows[0] if action.kind in USES_STAGE]
    assert num_swaps_in(add_stage_swaps(schedule, resident)) == (fewest_by_trying(used, resident),)


@quick
@given(st.data(), family_schedules(trains=False), st.integers(0, 3))
def test_every_use_finds_its_stage_and_no_rank_has_more_than_its_room(data, schedule, ahead):
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=schedule.num_stages, max_size=schedule.num_stages))
    room = data.draw(st.integers(max(sizes), sum(sizes)))
    result = add_stage_swaps(schedule, room, sizes=sizes, ahead=ahead)
    for before, row in zip(schedule.rows, result.rows, strict=True):
        assert [action for action in row if action.microbatch is not None] == list(before)
        assert row[len(row) - 1].kind is Kind.SWAP_OUT or row[len(row) - 1].kind in (Kind.SEND_F, Kind.SEND_B)
    trace = simulate(result, Costs(3, 5, 1, move=Amounts(weights=4, gradient=2, state=6)))
    for rank in range(result.num_ranks):
        changes = []
        for span in (span for span in trace.spans if span.rank == rank):
            if span.action.kind is Kind.SWAP_IN:
                changes.append((span.start_s, sizes[span.action.stage]))
            elif span.action.kind is Kind.SWAP_OUT:
                changes.append((span.end_s, -sizes[span.action.stage]))
        held = list(itertools.accumulate(size for _, size in sorted(changes)))  # at one time, what goes comes first
        assert max(held) <= room
        assert held[-1] == 0


@quick
@given(one_rank_schedules(), st.integers(2, 3), places)
def test_text_and_back(schedule, resident, place):
    result = add_stage_swaps(add_updates(lower(schedule), place), resident)
    assert parse_schedule(format_schedule(result)).rows == result.rows
    with pytest.raises(UserError, match="has no SWAP_IN"):
        format_torch_csv(result)


@quick
@given(one_rank_schedules())
def test_updates_are_where_the_setting_puts_them(schedule):
    for place in get_args(UpdatePlace):
        (row,) = add_updates(lower(schedule), place).rows
        adds = [slot for slot, action in enumerate(row) if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)]
        for slot, action in enumerate(row):
            if action.kind is Kind.UPDATE:
                own = [used for used, other in enumerate(row) if other.stage == action.stage and used != slot]
                expected = {
                    "at once": slot == max(added for added in adds if row[added].stage == action.stage) + 1,
                    "at the end": slot > max(adds),
                    "in the next step": slot == min(own) - 1,
                }
                assert expected[place]
        assert defers_updates(row) is (place == "in the next step")


def ring(stages, room, tokens):
    """Tokens one after the other, each through all stages."""
    return build_recipe(
        ring_recipe(Recipe(start=one_rank(stages, 1), residence=Residence(room, is_bytes=False)), stages, tokens)
    )


@pytest.mark.parametrize("load", [0.5, 0.9, 1.0, 1.5, 3.0])
@pytest.mark.parametrize(("stages", "room"), [(8, 2), (8, 3), (8, 5), (6, 2), (8, 8)])
def test_a_token_of_a_ring_takes_the_longer_of_computing_and_loading(stages, room, load):
    tokens = 16
    schedule, costs = ring(stages, room, tokens), Costs(1, 2, move=Amounts(weights=load))
    period = simulate(schedule, costs).end_s / tokens
    every, loads = stages * max(1.0, load), num_swaps_in(schedule)[0] / tokens
    assert max(stages, loads * load) <= period <= 1.05 * every
    if room == 2:
        assert loads == stages
        assert period == pytest.approx(every, rel=0.02)
    elif room == stages:
        assert loads == stages / tokens
    else:
        assert loads < stages
        # The fewest loads would use one place, and nothing would hide them.
        fewest = build_recipe(ring_recipe(Recipe(start=one_rank(stages, 1)), stages, tokens))
        fewest = add_stage_swaps(fewest, room, ahead=stages)
        assert num_swaps_in(fewest)[0] / tokens < loads
        assert simulate(fewest, costs).end_s / tokens > period


@quick
@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=24))
def test_the_stage_of_the_use_before_leaves_only_if_no_other_can(data, stages):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=6, max_size=6))
    places = data.draw(st.integers(max(sizes), sum(sizes)))
    stays = fewest_stays(stages, places, sizes, hides=True)
    for use, stage in enumerate(stages):
        here = [stages[stay.first] for stay in stays if stay.first <= use <= stay.last]
        assert here.count(stage) == 1
        assert sum(sizes[one] for one in here) <= places
    # So each comes before the use before its own has ended, if the two fit together.
    came = arrivals(stays, stages, places, len(stages), sizes)
    for stay, use in zip(stays, came, strict=True):
        if stay.first and sizes[stages[stay.first]] + sizes[stages[stay.first - 1]] <= places:
            assert use < stay.first


# ---------------------------------------------------------------------------------------------- what moves


def test_what_moves_is_what_the_row_does_with_the_stage():
    weights, gradient, state = Content.WEIGHTS, Content.GRADIENT, Content.STATE
    borrowed, lent = Content.BORROWED, Content.LENT_GRADIENT
    (row,) = add_stage_swaps(add_updates(one_rank(3, 2), "at the end"), 2).rows
    found = {(stay.stage, stay.first): (stay.brought, stay.taken, stay.held) for stay in stage_stays(row)}
    both, nothing, all_three = weights | borrowed, Content(0), weights | gradient | state
    assert [(stage, *found[stage, slot]) for stage, slot in sorted(found)] == [
        (0, both, nothing, both),  # forward alone: weights come, nothing has changed
        (0, both | state, weights | state | lent, both | all_three | lent),  # backward and update in one stay
        (1, both | state, weights | state | lent, both | all_three | lent),  # all three in one stay
        (2, both, gradient | lent, both | gradient | lent),  # the gradient begins with zeros, and is kept
        (2, all_three, weights | state, all_three),  # it comes back and is used up
    ]


def test_what_the_step_before_owes_comes_with_the_first_visit():
    weights, gradient, state = Content.WEIGHTS, Content.GRADIENT, Content.STATE
    borrowed, lent = Content.BORROWED, Content.LENT_GRADIENT
    (row,) = add_stage_swaps(add_updates(one_rank(3, 2), "in the next step"), 2).rows
    found = {(stay.stage, stay.first): (stay.brought, stay.taken) for stay in stage_stays(row)}
    both, changed = weights | borrowed, weights | state
    assert [(stage, *found[stage, slot]) for stage, slot in sorted(found)] == [
        (0, both | gradient | state, changed),  # the old gradient is used up
        (0, both, gradient | lent),  # the new one is kept
        (1, both | gradient | state, changed | gradient | lent),  # forward and backward in one stay
        (2, both | gradient | state, changed | gradient | lent),
    ]


def test_an_update_right_behind_the_last_backward_moves_no_gradient_at_all():
    for count in (1, 3):
        (row,) = add_stage_swaps(add_updates(one_rank(4, count), "at once"), 2).rows
        assert not any(Content.GRADIENT in content for content in stage_moves(row).values())


def test_a_gradient_that_is_added_to_in_two_visits_goes_and_comes_back():
    schedule = lower(parse_schedule("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"))
    (row,) = add_stage_swaps(add_updates(schedule, "at once"), 1).rows
    moved = [(str(row[slot]), Content.GRADIENT in content) for slot, content in sorted(stage_moves(row).items())]
    assert moved == [
        ("0SWAP_IN", False),
        ("0SWAP_OUT", False),
        ("1SWAP_IN", False),
        ("1SWAP_OUT", True),
        ("0SWAP_IN", False),
        ("0SWAP_OUT", True),
        ("1SWAP_IN", True),
        ("1SWAP_OUT", False),
        ("0SWAP_IN", True),
        ("0SWAP_OUT", False),
    ]


@pytest.mark.parametrize("residency", [None, 2])
def test_a_row_that_gathers_swaps_the_rest_of_its_stages(residency):
    """The rest, such as experts that no other rank has, is not reduced: nothing of it waits for a reduction."""
    plain = add_reduce_grad(add_unshard(one_rank(4, 3), residency, 1))
    deferred = add_updates(plain, "in the next step")
    both = add_stage_swaps(deferred, 2)
    (row,) = both.rows
    assert num_swaps_in(both) == (6,)
    outs = np.flatnonzero(row.is_kind(Kind.SWAP_OUT))
    reductions = {row[slot].stage: slot for slot in np.flatnonzero(row.is_kind(Kind.REDUCE_GRAD)).tolist()}
    behind = {int(row.stage[slot]): slot for slot in outs.tolist()}  # the last of each stage
    assert all(slot < reductions[stage] for stage, slot in behind.items())
    assert (swap_waits(row, 2, None)[outs, 1] < 0).all()
    # Where nothing is gathered, the gradient is that of the whole stage.
    (whole,) = add_stage_swaps(add_updates(add_reduce_grad(one_rank(4, 3)), "in the next step"), 2).rows
    assert (swap_waits(whole, 2, None)[whole.is_kind(Kind.SWAP_OUT), 1] >= 0).sum() == 4
    again = parse_schedule(format_schedule(both))
    assert again.rows == both.rows


# ---------------------------------------------------------------------------------------------- rules

GOOD = (
    "0SWAP_IN 1SWAP_IN 0F0 0F1 0SWAP_OUT 2SWAP_IN 1F0 1F1 2F0 2F1 2B0 2B1 2SWAP_OUT 0SWAP_IN 1B0 1B1 0B0 0B1 0UPDATE "
    "0SWAP_OUT 2SWAP_IN 1UPDATE 1SWAP_OUT 2UPDATE 2SWAP_OUT"
)


build, refused = maker(lambda _: Placement.linear(1, 3), level=Level.COMMUNICATION, max_resident=2)


# title: (old text, new text, rule, slot of the refusal, words)
FAULTS = {
    "a stage not there": ("0SWAP_IN 1B0", "1B0", "on-device-when-used", 15, "0B0 takes stage 0, which is not"),
    "an update of one not there": ("2SWAP_IN 1UPDATE 1SWAP_OUT 2UPDATE 2SWAP_OUT", "2UPDATE 1UPDATE 1SWAP_OUT",
                                   "on-device-when-used", 20, "2UPDATE takes stage 2"),
    "a stage that comes twice": ("1F0", "1SWAP_IN 1F0", "on-device-when-used", 6, "on the device already"),
    "a stage that goes twice": ("2SWAP_IN 1F0", "0SWAP_OUT 2SWAP_IN 1F0", "on-device-when-used", 5, "is not on the"),
    "a stage that stays": ("2UPDATE 2SWAP_OUT", "2UPDATE", "on-device-when-used", 20, "2SWAP_OUT is missing"),
    "a third stage": ("0SWAP_OUT 2SWAP_IN 1F0", "2SWAP_IN 0SWAP_OUT 1F0", "resident-bound", 4, "2SWAP_IN makes 3"),
    "no update of a stage": ("2SWAP_IN 1UPDATE 1SWAP_OUT 2UPDATE 2SWAP_OUT", "1UPDATE 1SWAP_OUT",
                             "update-each-stage-once", None, "2UPDATE is missing"),
    "an update twice": ("1UPDATE", "1UPDATE 1UPDATE", "update-each-stage-once", 22, "1UPDATE appears a second time"),
    "an update left out": (" 0UPDATE 0SWAP_OUT 2SWAP_IN", " 0SWAP_OUT 2SWAP_IN", "update-each-stage-once", None,
                             "0UPDATE is missing"),
    "an update too early": ("0B1 0UPDATE", "0UPDATE 0B1", "update-each-stage-once", 18, "0B1 follows 0UPDATE"),
}  # fmt: skip


@pytest.mark.parametrize("title", FAULTS)
def test_a_fault_is_refused_with_its_rule_and_its_place(title):
    old, new, rule, slot, words = FAULTS[title]
    assert GOOD.count(old) == 1
    error = refused(GOOD.replace(old, new))
    assert (error.rule, error.slot) == (rule, slot)
    assert words in str(error)


def test_the_schedule_that_the_faults_start_from_is_good():
    assert build(GOOD).max_resident == 2
    assert build(GOOD, max_resident=None).max_resident is None


def test_all_updates_are_of_one_step():
    deferred = "0UPDATE 0F0 0F1 1UPDATE 1F0 1F1 2UPDATE 2F0 2F1 2B0 2B1 1B0 1B1 0B0 0B1"
    assert build(deferred).num_stages == 3
    error = refused(deferred.replace("2UPDATE ", "").replace("2B1", "2B1 2UPDATE"))
    assert (error.rule, error.slot) == ("update-each-stage-once", 10)
    assert "2UPDATE and another update are not of the same step" in str(error)


def test_every_rule_of_stage_swaps_has_a_fault_above():
    rules = {"on-device-when-used", "resident-bound", "update-each-stage-once"}
    assert {fault[2] for fault in FAULTS.values()} == rules


def test_promises_count_in_the_sizes_of_the_stages():
    assert build(GOOD, max_resident=11, stage_sizes=(5, 6, 5)).stage_sizes == (5, 6, 5)
    assert refused(GOOD, max_resident=10, stage_sizes=(5, 6, 4)).rule == "resident-bound"
    assert refused(GOOD, stage_sizes=(1, 1)).rule == "row-for-each-rank"


def test_a_frozen_stage_is_not_updated():
    row = "0F0 1F0 1B0 1UPDATE"
    frozen = Schedule((tuple(map(Action.parse, row.split())),), Placement.linear(1, 2), 1, level=Level.COMMUNICATION,
                      first_backward_stage=1)  # fmt: skip
    assert frozen.first_backward_stage == 1
    with pytest.raises(ScheduleError, match="0UPDATE updates a stage that runs no backward"):
        frozen.with_rows([[*frozen.rows[0], Action(Kind.UPDATE, 0)]], Level.COMMUNICATION)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: add_stage_swaps(s, 0), "max_resident must be at least 1, what the largest stage takes, found 0"),
        (lambda s: add_stage_swaps(s, 4, sizes=(3, 5)), "must be at least 5, what the largest stage takes, found 4"),
        (lambda s: add_stage_swaps(s, 4, sizes=(3,)), "a size above 0 for each of 2 stages"),
        (lambda s: add_stage_swaps(s, 2, ahead=-1), "ahead must be at least 0, found -1"),
        (lambda s: add_stage_swaps(add_stage_swaps(s, 2), 2), "without SWAP_IN, SWAP_OUT"),
        (lambda s: add_updates(add_updates(s, "at once"), "at once"), "updates weights already"),
    ],
)
def test_what_cannot_be_is_reported(change, words):
    with pytest.raises(UserError, match=words):
        change(one_rank(2, 2))


def test_several_ranks_swap_for_themselves_and_update_without_the_norm():
    schedule = lower(make_schedule("breadth-first", pp=2, loops=4, num_microbatches=4))
    result = add_stage_swaps(add_updates(add_reduce_grad(schedule), "at once"), 2)
    assert num_swaps_in(result) == (6, 6)
    with pytest.raises(UserError, match="the norm of the whole gradient takes all of 2 pipeline ranks"):
        add_updates(schedule, "at the end")
    with pytest.raises(UserError, match="without RECV_TIED"):
        add_stage_swaps(add_tied(schedule), 2)
