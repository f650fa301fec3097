"""Ranks that take turns on the cores of a host: compared with a second clock, which advances tick by tick."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.simulation import Sharing, simulate

FORWARD, BACKWARD = 5, 7


def cores(capacity, turn_s):
    return Sharing(lambda action, rank: "cores", {"cores": capacity}, {"cores": turn_s})


class Ticks:
    """One thread a rank. ``has`` are the threads with a core, and the ticks left of their turns."""

    def __init__(self, schedule, num_cores, turn):
        self.rows, self.num_cores, self.turn = schedule.rows, num_cores, turn
        self.left = {action: FORWARD if str(action.kind) == "F" else BACKWARD for row in self.rows for action in row}
        self.at = [0] * len(self.rows)
        self.number = {action: number for number, action in enumerate(self.left)}
        graph, actions = schedule.graph, list(self.left)
        self.needs = {
            action: [actions[needed] for needed in waits if needed >= 0]
            for action, waits in zip(actions, graph.waits.tolist(), strict=True)
        }
        self.starts, self.ends, self.has, self.queue, self.now = {}, {}, {}, [], 0
        for rank in range(len(self.rows)):
            self.wake(rank)
        while self.has:
            self.now += 1
            for rank in self.has:
                self.left[self.action(rank)] -= 1
                self.has[rank] -= 1
            while due := [rank for rank in self.has if not self.has[rank] or not self.left[self.action(rank)]]:
                self.settle(min(due, key=lambda rank: self.number[self.action(rank)]))

    def action(self, rank):
        return self.rows[rank][self.at[rank]] if self.at[rank] < len(self.rows[rank]) else None

    def is_ready(self, rank):
        action = self.action(rank)
        return action is not None and all(needed in self.ends for needed in self.needs[action])

    def wake(self, rank):
        if self.is_ready(rank) and rank not in self.has and rank not in self.queue:
            self.queue.append(rank)
            self.fill()

    def fill(self):
        while self.queue and len(self.has) < self.num_cores:
            rank = self.queue.pop(0)
            self.starts.setdefault(self.action(rank), self.now)
            self.has[rank] = self.turn

    def settle(self, rank):
        rest = self.has.pop(rank)
        if self.left[self.action(rank)]:
            self.queue.append(rank)
            return self.fill()
        self.ends[self.action(rank)] = self.now
        self.at[rank] += 1
        if rest and self.is_ready(rank):
            self.starts[self.action(rank)] = self.now
            self.has[rank] = rest
        others = [one for one in range(len(self.rows)) if self.is_ready(one) and one not in self.has]
        waiting = sorted(set(others) - set(self.queue), key=lambda one: self.number[self.action(one)])
        self.queue += waiting
        return self.fill()


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["breadth-first", "depth-first", "1f1b", "gpipe"]),
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_turns_are_those_of_a_second_clock(family, pp, loops, num_microbatches, num_cores, turn):
    sizes = {"loops": loops} if family in ("breadth-first", "depth-first") else {}
    count = num_microbatches * pp if family == "depth-first" else num_microbatches
    schedule = make_schedule(family, pp=pp, num_microbatches=count, **sizes)
    trace = simulate(schedule, Costs(FORWARD, BACKWARD), cores(num_cores, turn))
    second = Ticks(schedule, num_cores, turn)
    assert {span.action: (span.start_s, span.end_s) for span in trace.spans} == {
        action: (second.starts[action], second.ends[action]) for action in second.left
    }


def test_a_rank_that_waits_for_a_core_has_not_started():
    schedule = parse_schedule("0F0 0F1\n1F0 1F1")
    trace = simulate(schedule, Costs(3, 3), cores(1, 2))
    # 0F0 has two turns, since nothing waits, and 0F1 the rest of the second one. 1F0 is ready at 3.
    spans = {str(span.action): (span.start_s, span.end_s) for span in trace.spans}
    assert spans == {"0F0": (0, 3), "0F1": (3, 8), "1F0": (4, 9), "1F1": (9, 12)}


def test_a_message_waits_for_no_turn_and_shares_the_core():
    schedule = lower(parse_schedule("0F0 0F1\n1F0 1F1"))
    sharing = replace(cores(1, 2), at_once=frozenset({Kind.SEND_F, Kind.RECV_F}))
    trace = simulate(schedule, Costs(3, 3, transfer_s=1), sharing)
    spans = {str(span.action): (span.start_s, span.end_s) for span in trace.spans}
    # Each message takes 2 beside compute, which does half as much meanwhile, but waits for no turn.
    assert (spans["1RECV_F0"], spans["1RECV_F1"]) == ((3, 5), (7, 9))
    # From 3 to 5 it does 1, the rest of a turn, and from 5 to 7 a turn of its own: 1F0 came later.
    assert spans["0F1"] == (3, 7)
    assert (spans["1F0"], spans["1F1"]) == ((7, 11), (11, 14))


def test_a_slow_core_makes_turns_and_actions_longer():
    schedule = parse_schedule("0F0 0F1\n1F0 1F1")
    fast, slow = (simulate(schedule, Costs(3, 3), cores(capacity, 2)) for capacity in (1, 0.5))
    assert [span.end_s * 2 for span in fast.spans] == [span.end_s for span in slow.spans]


@pytest.mark.parametrize("turn_s", [0.5, 100.0])
def test_with_a_core_for_each_rank_turns_change_nothing(turn_s):
    schedule = make_schedule("breadth-first", pp=3, loops=2, num_microbatches=4)
    alone, turns = simulate(schedule, Costs(1.0, 2.0)), simulate(schedule, Costs(1.0, 2.0), cores(3, turn_s))
    assert [span.start_s for span in turns.spans] == pytest.approx([span.start_s for span in alone.spans])
