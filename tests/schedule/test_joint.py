"""Replicas that share experts: orders in which they would wait for each other are refused before anything runs."""

import random
from copy import copy
from itertools import zip_longest

import pytest

from pipeloom import ScheduleError, parse_schedule
from pipeloom.families import make_schedule
from pipeloom.passes import add_reduce_grad, add_unshard, lower
from pipeloom.schedule import Action, Kind
from pipeloom.schedule.joint import prove_together
from pipeloom.schedule.kinds import EXCHANGES, GOES_BACK, GOES_FORTH, USES_WEIGHTS

SIZES = {"pp": 2, "loops": 2, "num_microbatches": 3}


def sharded(name):
    return add_reduce_grad(add_unshard(lower(make_schedule(name, **SIZES)), 2, 1))


def mutated(schedule, draw, swaps):
    """With some actions exchanged with one behind them in their rows; a schedule that is legal by itself."""
    while swaps:
        rows = [list(row) for row in schedule.rows]
        row = draw.choice(rows)
        slot = draw.randrange(len(row) - 1)
        other = min(len(row) - 1, slot + draw.choice((1, 1, 2, 4)))
        row[slot], row[other] = row[other], row[slot]
        try:
            schedule = schedule.with_rows(rows, schedule.level)
        except ScheduleError:
            continue
        swaps -= 1
    return schedule


def meetings(schedules, stages, size):
    """(replica, node) -> the nodes that it meets with, by place among those of its row; what has no partner: empty."""
    found = {}
    for rank in range(SIZES["pp"]):
        rows = [(int(one.facts.columns.first[rank]), one.rows[rank]) for one in schedules]
        for kinds, where, step in (
            (EXCHANGES, {0, 1, 2, 3}, len(schedules)),
            (USES_WEIGHTS, stages, size),
        ):
            own = [
                [(replica, begin + slot) for slot, one in enumerate(row) if one.kind in kinds and one.stage in where]
                for replica, (begin, row) in enumerate(rows)
            ]
            for first in range(0, len(schedules), step):
                for nodes in zip_longest(*own[first : first + step]):
                    is_whole = None not in nodes
                    keys = {schedules[one[0]].facts.action(one[1])[:2] for one in nodes if one is not None}
                    met = set(nodes) if is_whole and len(keys) == 1 else set()
                    found |= {node: met for node in nodes if node is not None}
    return found


def runs_to_its_end(schedules, stages, size):
    """Start what can start until nothing can; whether that is everything."""
    partners, done, num_nodes = meetings(schedules, stages, size), set(), 0
    last, first = {}, {}
    for replica, one in enumerate(schedules):
        num_nodes += one.graph.num_nodes
        for node in range(one.graph.num_nodes):
            action = one.facts.action(node)
            if action.stage in stages and action.kind in GOES_FORTH:
                last[replica, action.stage] = node
            if action.stage in stages and action.kind in GOES_BACK:
                first.setdefault((replica, action.stage), node)
    sums = {stage for stage in stages if all(first[key] > node for key, node in last.items() if key[1] == stage)}

    def can_start(replica, node):
        action = schedules[replica].facts.action(node)
        is_first = action.stage in sums and node == first[replica, action.stage]
        counted = [(key[0], one) for key, one in last.items() if is_first and key[1] == action.stage]
        return all(one in done for one in counted) and all(
            (replica, one) in done for one in schedules[replica].graph.needed(node)
        )

    while True:
        ready = {
            (replica, node)
            for replica, one in enumerate(schedules)
            for node in range(one.graph.num_nodes)
            if (replica, node) not in done and can_start(replica, node)
        }
        begun = {one for one in ready if one not in partners or (partners[one] and partners[one] <= ready)}
        if not begun:
            return len(done) == num_nodes
        done |= begun


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["breadth-first", "depth-first"])
def test_a_proof_holds_exactly_where_the_replicas_run_to_their_end(name, size):
    draw, found = random.Random(f"{name} {size}"), []
    whole = sharded(name)
    for _ in range(15):
        schedules = [whole, *(mutated(whole, draw, draw.choice((0, 2, 4))) for _ in range(3))]
        stages = draw.choice(({1, 3}, {0, 1, 2, 3}))
        try:
            prove_together(schedules, stages, size)
            found.append("proved")
        except ScheduleError as error:
            found.append("circle" if "rule 'together'" in str(error) and "circle" in str(error) else "order")
        assert runs_to_its_end(schedules, stages, size) or found[-1] != "proved"
        if found[-1] == "circle":
            assert not runs_to_its_end(schedules, stages, size)
    assert {"proved", "order"} <= set(found)


def test_equal_replicas_need_no_proof_and_another_order_is_refused():
    whole = sharded("breadth-first")
    prove_together([whole] * 4, {1, 3}, 2)
    with pytest.raises(ScheduleError, match="rank 1 meet in another order: replica 0 in 3F1, replica 1 in 3B0"):
        prove_together([whole, sharded("depth-first")], {0, 1, 2, 3}, 2)


# Gathers and reductions as U, S and R. In the first replica the gather of stage 3 waits for that of stage 0 which comes
# second, in the second replica it is the other way around; on each rank both have the same ones in the same order.
ROWS = (
    (
        "U0 0F0 S0 U2 2F0 S2 U0 0F1 S0 U2 2F1 2B0 2B1 R2 S2 U0 0B0 0B1 R0 S0",
        "U1 1F0 1F1 S1 U3 3F0 3F1 3B0 3B1 R3 S3 U1 1B0 1B1 R1 S1",
    ),
    (
        "U0 0F0 S0 U2 2F0 2B0 S2 U0 0F1 S0 U2 2F1 2B1 R2 S2 U0 0B0 0B1 R0 S0",
        "U1 1F0 U3 3F0 3B0 1F1 S1 3F1 3B1 R3 S3 U1 1B0 1B1 R1 S1",
    ),
)
KINDS = {"U": Kind.UNSHARD, "S": Kind.RESHARD, "R": Kind.REDUCE_GRAD}


def of_rows(texts):
    compute = [" ".join(word for word in text.split() if word[0] not in KINDS) for text in texts]
    lowered = lower(parse_schedule("\n".join(compute)))
    rows = []
    for row, text in zip(lowered.rows, texts, strict=True):
        found, words = [], text.split()
        for action in row:
            if action.kind in GOES_FORTH | GOES_BACK:
                while words[0][0] in KINDS:
                    word = words.pop(0)
                    found.append(Action(KINDS[word[0]], int(word[1:])))
                assert words.pop(0) == str(action)
            found.append(action)
        rows.append([*found, *(Action(KINDS[word[0]], int(word[1:])) for word in words)])
    return lowered.with_rows(rows, lowered.level)


def test_replicas_that_would_wait_in_a_circle_are_refused():
    some, others = map(of_rows, ROWS)
    for schedules, size in (([some, some], 1), ([others, others], 2)):
        prove_together([*map(copy, schedules)], {0, 1, 2, 3}, size)
    assert not runs_to_its_end([some, others], set(), 1)
    with pytest.raises(ScheduleError, match="replicas wait for each other in a circle, such as replica 0 with "):
        prove_together([some, others], set(), 1)
