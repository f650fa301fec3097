"""Every family on every placement, what a request may ask, and the registry."""

from collections import Counter
from itertools import combinations, product

import pytest
from families import fitting
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.errors import CallError, ConfigError, FamilyError
from pipeloom.families import FAMILIES, Choice, family, make_schedule
from pipeloom.schedule import PLACEMENTS, Kind, Level

ON_A_V = [name for name, known in FAMILIES.items() if known.placement == "v"]
PLAIN = {"pp": 4, "num_microbatches": 8, "loops": 1, "group_size": None, "placement": None}


def requests():
    for name, chosen in FAMILIES.items():
        for pp in (1, 2, 3, 4):
            for loops in (chosen.loops,) if chosen.loops else (1, 2, 3) if chosen.is_looped else (1,):
                for count in (1, 2, 4, 5, 7):
                    sizes = [None, *range(pp, count + 1)] if chosen.is_grouped else [None]
                    yield from ((name, pp, loops, count, size) for size in sizes)


def assert_complete(counts, chosen, number):
    """As many forwards, and as many backwards, whole or in halves, as the family defines."""
    whole, halves = counts[Kind.BACKWARD], counts[Kind.BACKWARD_INPUT]
    assert counts.total() == number + whole + 2 * halves
    assert counts[Kind.FORWARD] == number
    assert counts[Kind.BACKWARD_WEIGHT] == halves
    assert whole + halves == (number if chosen.has_backward else 0)
    assert halves == 0 or chosen.splits_backward


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_request_that_is_no_problem_makes_a_schedule(placement):
    number = 0
    for name, pp, loops, count, size in requests():
        fits = fitting(name, loops, placement)
        schedule = make_schedule(name, pp=pp, num_microbatches=count, group_size=size, **fits)
        assert schedule.placement == PLACEMENTS[fits["placement"]](pp, loops)
        assert schedule.num_microbatches == count
        assert schedule.level is Level.COMPUTE
        assert_complete(Counter(action.kind for _, _, action in schedule.actions()), FAMILIES[name], pp * loops * count)
        number += 1
    assert number > 250


def held_when_fullest(schedule, rank):
    """All that a rank holds by stage at the moments at which it holds the most inputs."""
    held, most = dict.fromkeys(schedule.placement.stages_of(rank), 0), [[0]]
    for action in schedule.rows[rank]:
        held[action.stage] += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(action.kind, -1)
        if sum(held.values()) >= sum(most[0]):
            most = [*(most if sum(held.values()) == sum(most[0]) else []), list(held.values())]
    return most


def test_the_closed_forms_for_stage_inputs_are_what_the_rows_hold():
    number = 0
    for name, pp, loops, count, size in requests():
        choice = Choice(family=name, pp=pp, loops=loops, num_microbatches=count, group_size=size)
        if FAMILIES[name].stage_inputs is not None:
            held, schedule = choice.stage_inputs, choice.make()
            assert tuple(map(sum, held)) == schedule.peak_stage_inputs, choice
            assert all(list(each) in held_when_fullest(schedule, rank) for rank, each in enumerate(held)), choice
            number += 1
    assert number > 200
    assert Choice(family="forward-only", pp=2, num_microbatches=2).stage_inputs is None
    assert Choice(family="gpipe", pp=2, num_microbatches=2, placement="v").stage_inputs == [[2], [2]]
    assert Choice(family="depth-first", pp=2, loops=2, num_microbatches=2, placement="v").stage_inputs is None


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ON_A_V), st.integers(1, 24), st.integers(1, 60))
def test_the_closed_forms_on_a_v_are_what_the_rows_hold(name, pp, count):
    choice = Choice(family=name, pp=pp, loops=2, num_microbatches=count)
    held, schedule = choice.stage_inputs, choice.make()
    assert tuple(map(sum, held)) == schedule.peak_stage_inputs
    assert all(list(each) in held_when_fullest(schedule, rank) for rank, each in enumerate(held))


def test_the_six_families_of_the_command_line_are_registered():
    assert {"gpipe", "1f1b", "depth-first", "breadth-first", "hybrid", "forward-only"} <= set(FAMILIES)


def test_every_family_has_a_summary_and_a_way_out_if_it_takes_no_loops():
    for chosen in FAMILIES.values():
        assert chosen.summary.endswith((".", ")"))
        assert chosen.is_looped or FAMILIES[chosen.instead].is_looped


def test_two_families_may_not_share_a_name():
    with pytest.raises(FamilyError, match=r"the family 'gpipe' \(.*another one of that name is in .*all_forward"):
        family("gpipe", is_looped=True)(lambda request: None)


def test_no_family_is_called_auto():
    with pytest.raises(FamilyError, match="auto stands for the family that a run's other settings choose"):
        family("auto", is_looped=True)(lambda request: None)


def test_everything_wrong_with_how_a_family_is_registered_is_in_one_message():
    with pytest.raises(FamilyError) as caught:
        family("own", is_looped=True, placement="loped")(lambda request: None)
    assert "its rule has no docstring" in str(caught.value)
    assert "there is no placement 'loped'; did you mean 'looped'?" in str(caught.value)
    assert "own" not in FAMILIES


def test_groups_that_do_not_divide_the_microbatches_spread_the_remainder():
    schedule = make_schedule("depth-first", pp=2, loops=2, num_microbatches=5)
    forwards = [str(action) for action in schedule.rows[1] if action.kind is Kind.FORWARD]
    assert forwards == ["1F0", "1F1", "1F2", "3F0", "3F1", "3F2", "1F3", "1F4", "3F3", "3F4"]


PROBLEMS = {
    "pp must be at least 1, found 0": ("gpipe", {"pp": 0}),
    "loops must be at least 1, found -1": ("breadth-first", {"loops": -1}),
    "the number of micro-batches must be at least 1, found 0": ("gpipe", {"num_microbatches": 0}),
    "there is no placement 'loped'; did you mean 'looped'?": ("gpipe", {"placement": "loped"}),
    "there is no schedule 'zzz'; known: ": ("zzz", {}),
    "gpipe runs one stage on each rank, found loops 2; use breadth-first": ("gpipe", {"loops": 2}),
    "1f1b runs one stage on each rank, found loops 3; use depth-first": ("1f1b", {"loops": 3}),
    "breadth-first takes no group size, found 4; use hybrid": ("breadth-first", {"group_size": 4}),
    "lie between pp 4 and the number of micro-batches 8, found 3": ("hybrid", {"group_size": 3}),
    "lie between pp 4 and the number of micro-batches 8, found 9": ("hybrid", {"group_size": 9}),
    "lie between pp 4 and the number of micro-batches 8, found 0": ("hybrid", {"group_size": 0}),
}


@pytest.mark.parametrize("sentence", PROBLEMS)
def test_a_wrong_request_gets_a_message(sentence):
    name, change = PROBLEMS[sentence]
    assert Choice(family=name, **PLAIN).problems() == [] or name == "zzz"
    (problem,) = Choice(family=name, **(PLAIN | change)).problems()
    assert sentence in problem
    with pytest.raises(ConfigError) as refused:
        make_schedule(name, **(PLAIN | change))
    assert refused.value.problems == (problem,)


def test_a_wrong_request_gets_all_problems_at_once():
    problems = Choice(family="1f1b", pp=0, num_microbatches=0, loops=2, group_size=3, placement="ring").problems()
    assert len(problems) == 5


@pytest.mark.parametrize("size", [4, 8])
def test_the_ends_of_the_group_sizes_are_allowed(size):
    assert Choice(family="hybrid", **(PLAIN | {"group_size": size})).problems() == []


def test_a_rank_keeps_the_given_number_of_inputs_whole():
    schedule = make_schedule("1f1b", pp=4, num_microbatches=6, keep=(2, 2, 2, 1))
    again = [sum(action.kind == "R" for action in row) for row in schedule.rows]
    assert again == [4, 4, 0, 0]
    assert schedule.peak_stage_inputs == (4, 3, 2, 1)


def test_keep_names_every_rank_and_at_least_one_input():
    problems = Choice(family="1f1b", pp=4, num_microbatches=6, keep=(2, 0)).problems()
    assert problems == [
        "keep must be at least 1 on every rank, found (2, 0)",
        "keep must name the stage inputs of 4 ranks, found 2 numbers",
    ]


def test_what_only_goes_forward_keeps_nothing():
    problems = Choice(family="forward-only", pp=2, num_microbatches=2, keep=(1, 1)).problems()
    assert problems == ["keep recomputes for backwards, of which forward-only has none; leave it out"]


def _rows(choice):
    """Rows and placement, for comparison."""
    schedule = choice.make()
    return schedule.placement, tuple(tuple(row) for row in schedule.rows)


@pytest.mark.parametrize("placement", [None, "v", "linear"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_families_say_where_they_make_the_same_schedule_and_nowhere_else(pp, placement):
    for loops, num_microbatches in product((1, 2, 3), (1, 2, 3, 4, 5, 8)):
        sizes = {"pp": pp, "loops": loops, "num_microbatches": num_microbatches, "placement": placement}
        plain = [
            Choice(family=name, **sizes)
            for name, known in FAMILIES.items()
            if known.has_backward and not known.is_found and known.rule.__module__.startswith("pipeloom.")
        ]  # without plug-ins that are installed here
        choices = [choice for choice in plain if not choice.problems()]
        names, rows = [choice.same_as for choice in choices], [_rows(choice) for choice in choices]
        for one, other in combinations(range(len(choices)), 2):
            pair = (choices[one], choices[other])
            assert (names[one] == names[other]) == (rows[one] == rows[other]), pair


@pytest.mark.parametrize("pp", [2, 3])
def test_groups_that_make_no_difference_are_those_of_depth_first(pp):
    for loops, num_microbatches in product((1, 2, 3), (2, 3, 4, 6)):
        sizes = {"pp": pp, "loops": loops, "num_microbatches": num_microbatches}
        expected = _rows(Choice(family="depth-first", **sizes))
        for group_size in range(pp, num_microbatches + 1):
            choice = Choice(family="hybrid", group_size=group_size, **sizes)
            assert (choice.same_as != "hybrid") == (_rows(choice) == expected), choice


def test_a_declaration_without_what_it_needs_states_what_that_must_be():
    with pytest.raises(CallError) as caught:
        family("nameless", splits_backward=2)
    assert caught.value.problems == (
        "the argument 'is_looped' is missing; it must be True or False",
        "splits_backward must be True or False, found 2",
    )
