"""Schedule files: what is written, what is refused, and whether a schedule fits a run."""

from dataclasses import replace

import pytest

from pipeloom.errors import ConfigError, ScheduleError, UserError
from pipeloom.families import Choice
from pipeloom.passes import Moves, add_reduce_grad, lower
from pipeloom.passes.lower_sharding import ReduceGrad, Unshard
from pipeloom.recipe import Recipe, Residence, build, recipe_lines, schedule_text
from pipeloom.schedule import Schedule, ScheduleFile, format_schedule, parse_schedule, read_schedule
from pipeloom.schedule.file import PROMISES
from pipeloom.schedule.text import parse_schedule_file

CHOICE = Choice(family="1f1b", pp=4, num_microbatches=8)
PLAIN = Recipe(start=CHOICE)
SHARDED = replace(PLAIN, unshard=Unshard(1, 0), reduce_grad=ReduceGrad(1))
BALANCED = replace(PLAIN, moves=Moves(balance=True))
OFFLOADED = replace(PLAIN, moves=Moves(offload=True, budget_bytes=3))
SWAPPED = Recipe(
    start=Choice(family="breadth-first", pp=1, loops=4, num_microbatches=2),
    updates="in the next step",
    residence=Residence(2, is_bytes=False),
)
TIED = replace(PLAIN, lends_tied=True)
RECIPES = (PLAIN, SHARDED, BALANCED, OFFLOADED, SWAPPED, TIED)


def written(recipe):
    return parse_schedule_file(schedule_text(recipe, build(recipe)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_file_has_the_schedule_with_its_promises_and_how_it_was_made(recipe):
    read = written(recipe)
    assert read.schedule == build(recipe)
    assert read.recipe == recipe_lines(recipe, read.schedule)
    again = replace(recipe, given=read)
    assert build(again) is read.schedule
    assert schedule_text(again, read.schedule) == schedule_text(recipe, read.schedule)


def test_a_file_of_any_order_is_executed_if_it_does_the_work_of_the_run():
    other = add_reduce_grad(lower(Choice(family="gpipe", pp=4, num_microbatches=8).make()))
    given = parse_schedule_file(format_schedule(other))
    assert build(replace(PLAIN, reduce_grad=ReduceGrad(None), given=given)) == other


def misfit(recipe, given):
    with pytest.raises(ConfigError) as refused:
        build(replace(recipe, given=given))
    return refused.value.problems


def of_any_order(recipe):
    return replace(written(recipe), recipe={})


@pytest.mark.parametrize(
    ("recipe", "given", "problems"),
    [
        (
            replace(PLAIN, start=replace(CHOICE, num_microbatches=6), receive_buffers=1),
            written(PLAIN),
            ["receive_buffers: 2 in the file, 1 in the run", "micro-batches: 8 in the file, 6 in the run"],
        ),
        (
            replace(PLAIN, start=replace(CHOICE, pp=2)),
            of_any_order(PLAIN),
            ["pipeline ranks: 4 in the file, 2 in the run", "stages: 4 in the file, 2 in the run"],
        ),
        (
            replace(PLAIN, start=replace(CHOICE, num_slices=2)),
            of_any_order(PLAIN),
            ["token slices: 1 in the file, 2 in the run"],
        ),
        (TIED, of_any_order(PLAIN), ["rank 0: 0SEND_TIED is missing, which the run has"]),
        (PLAIN, of_any_order(TIED), ["rank 0, slot 2: 0SEND_TIED, which the run does not have"]),
        (
            replace(SHARDED, reduce_grad=None),
            of_any_order(replace(SHARDED, reduce_grad=ReduceGrad(None))),
            ["rank 0, slot 34: 0REDUCE_GRAD, which the run does not have"],
        ),
        (
            SHARDED,
            written(PLAIN),
            [
                "residency: nothing in the file, 1 in the run",
                "prefetch: nothing in the file, 0 in the run",
                "gradient_buffers: nothing in the file, 1 in the run",
            ],
        ),
        (PLAIN, of_any_order(BALANCED), ["rank 0, slot 6: 0EVICT1, but the run has no schedule.balance"]),
        (OFFLOADED, of_any_order(PLAIN), ["pipeline rank 0 moves nothing and holds 4, 1 more than its 3"]),
        (
            OFFLOADED,
            replace(written(OFFLOADED), schedule=build(PLAIN)),
            ["pipeline rank 0 moves nothing and holds 4, 1 more than its 3"],
        ),
        (
            replace(SWAPPED, residence=Residence(3, is_bytes=False)),
            of_any_order(SWAPPED),
            ["max_resident: 2 in the file, 3 in the run"],
        ),
        (
            replace(SWAPPED, updates="at once"),
            of_any_order(SWAPPED),
            ["rank 0: updates belong to another step than those of the run"],
        ),
    ],
)
def test_what_does_not_fit_is_named(recipe, given, problems):
    assert list(misfit(recipe, given)) == problems


def test_rows_of_a_family_are_those_of_the_family_and_the_first_other_place_is_named():
    given = written(BALANCED)
    gpipe = lower(Choice(family="gpipe", pp=4, num_microbatches=8).make())
    lying = replace(given, schedule=gpipe)
    assert misfit(BALANCED, lying) == ("rank 0, slot 10: 0F4, where the run has 0B0",)


def test_evictions_need_a_partner():
    given = written(BALANCED)
    alone = replace(given, schedule=replace(given.schedule, partners=None))
    (problem,) = misfit(BALANCED, alone)
    assert "but the file has no line `partners`" in problem


def test_rows_without_messages_are_refused():
    given = ScheduleFile(CHOICE.make(), {})
    (problem,) = misfit(PLAIN, given)
    assert problem.startswith("its rows have no messages between ranks; `pipeloom schedule FILE --communication")


def test_everything_that_is_wrong_in_a_file_is_named_at_once(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(
        "# mine\nmax_gathered = 1 2\nrecipe.Family = x\nmax_stage_input = 3\n0F0 zero\npartners = 1234567890123456\n"
        "partners = 0\n"
    )
    with pytest.raises(UserError) as refused:
        read_schedule(file)
    *lines, last = str(refused.value).splitlines()
    assert last.startswith("row 0, cell 1: 'zero' is no action")
    assert lines == [
        f"{file}: line 2: max_gathered must be one whole number of at most 15 digits, found '1 2'",
        "line 3: expected a name such as recipe.family, found 'recipe.Family'",
        f"line 4: there is no promise 'max_stage_input'; did you mean 'max_stage_inputs'? known: {', '.join(PROMISES)}",
        "line 6: partners must be whole numbers of at most 15 digits, found '1234567890123456'",
        "line 6: partners must precede the rows",
        "line 7: partners is there a second time",
        "line 7: partners must precede the rows",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "partners = 7 0",
        "partners = 1",
        "partners = 999999999999999 0",
        "max_stage_inputs = 0 0",
        "max_stage_inputs = 9",
        "stage_sizes = 1",
        "max_gathered = 0\n0UNSHARD",
        "gradient_buffers = 0\n0REDUCE_GRAD",
        "max_resident = 0\n0SWAP_IN",
    ],
)
def test_promises_that_the_rows_break_are_refused_by_a_rule(line):
    line, _, first = line.partition("\n")
    with pytest.raises(ScheduleError):
        parse_schedule(f"{line}\n{first} 0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n")


def test_every_promise_of_a_schedule_is_in_its_text():
    whole = replace(build(SWAPPED), max_gathered=4, gradient_buffers=4, stage_sizes=(1, 1, 1, 1), partners=(0,))
    assert parse_schedule(format_schedule(whole)) == whole
    assert isinstance(whole, Schedule)
