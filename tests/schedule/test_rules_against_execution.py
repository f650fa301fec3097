"""The rules refuse a reordered schedule exactly if running it, token by token, gets stuck.

The executor here does not use the package's dependencies: each rank takes its row from left to right; tensors are
tokens; each directed edge between two ranks is a queue that a receive, once posted, takes from in order.
"""

from collections import defaultdict

import hypothesis.strategies as st
from hypothesis import given, settings

from pipeloom.errors import ScheduleError
from pipeloom.families import make_schedule
from pipeloom.passes import add_tied, lower
from pipeloom.schedule import Level

PLACEMENTS = st.sampled_from(["looped", "v", "linear"])
FAMILIES = st.sampled_from(["breadth-first", "depth-first", "forward-only"])
quick = settings(max_examples=150, deadline=None)


class Run:
    """One run of rows; ``finishes`` is whether every action could be done and every tensor was the right one."""

    def __init__(self, rows, placement, *, has_messages):
        self.rows, self.owner, self.has_messages = rows, placement.rank_by_stage, has_messages
        self.is_tied = any(action.kind == "SEND_TIED" for row in rows for action in row)
        self.done = set()
        self.sent = defaultdict(list)  # edge -> texts of what was sent, in order
        self.posted = defaultdict(list)  # edge -> receives, in order
        self.is_wrong = False

    def finishes(self):
        position = [0] * len(self.rows)
        moved = True
        while moved and not self.is_wrong:
            moved = False
            for rank, row in enumerate(self.rows):
                while position[rank] < len(row) and self.step(row[position[rank]], rank):
                    position[rank] += 1
                    moved = True
        all_taken = all(self.sent[edge] == self.posted[edge] for edge in {*self.sent, *self.posted})
        return not self.is_wrong and position == [len(row) for row in self.rows] and all_taken

    def step(self, action, rank):
        kind, stage, microbatch, _ = action
        match kind.value:
            case "F":
                ready = stage == 0 or self.has(("F", stage - 1, microbatch), stage - 1, rank)
                if self.is_tied and stage == len(self.owner) - 1:
                    ready = ready and self.has(("TIED",), 0, rank)
            case "B":
                is_last = stage == len(self.owner) - 1
                ready = ("F", stage, microbatch) in self.done and (
                    is_last or self.has(("B", stage + 1, microbatch), stage + 1, rank)
                )
            case "SEND_TIED":
                self.sent[rank, self.owner[-1]].append(("TIED",))
                return True
            case "RECV_TIED":
                self.posted[self.owner[0], rank].append(("TIED",))
                return True
            case "SEND_TIED_GRAD":
                backwards = [action for row in self.rows for action in row if action[:2] == ("B", stage)]
                self.is_wrong |= any(tuple(action[:3]) not in self.done for action in backwards)
                self.sent[rank, self.owner[0]].append(("TIED_GRAD",))
                return True
            case "RECV_TIED_GRAD":
                self.posted[self.owner[-1], rank].append(("TIED_GRAD",))
                return True
            case "SEND_F" | "SEND_B":
                tensor = (kind.value[-1], stage, microbatch)
                self.is_wrong |= tensor not in self.done
                peer = self.owner[stage + 1 if kind.value == "SEND_F" else stage - 1]
                self.sent[rank, peer].append(tensor)
                return True
            case _:
                source = stage - 1 if kind.value == "RECV_F" else stage + 1
                self.posted[self.owner[source], rank].append((kind.value[-1], source, microbatch))
                return True
        if ready:
            self.done.add((kind.value, stage, microbatch))
        return ready

    def has(self, tensor, source_stage, rank):
        """Whether a tensor of another stage is here: made here, handed over, or received."""
        edge = (self.owner[source_stage], rank)
        if not self.has_messages or edge[0] == rank:
            return tensor in self.done
        if tensor not in self.posted[edge]:
            return False
        number = self.posted[edge].index(tensor)
        if number >= len(self.sent[edge]):
            return False
        self.is_wrong |= self.sent[edge][number] != tensor
        return self.sent[edge][number] == tensor


@st.composite
def reordered(draw, *, with_messages, tied=False):
    """A good schedule, and its rows with two different actions of one row exchanged."""
    pp, loops, count = draw(st.integers(1 + with_messages, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    schedule = make_schedule(draw(FAMILIES), pp=pp, loops=loops, num_microbatches=count, placement=draw(PLACEMENTS))
    if with_messages:
        schedule = lower(schedule, draw(st.integers(1, 3)))
    if tied:
        schedule = add_tied(schedule)
    rows = [list(row) for row in schedule.rows]
    row = rows[draw(st.integers(0, len(rows) - 1))]
    first = draw(st.integers(0, len(row) - 1))
    second = min(len(row) - 1, first + draw(st.integers(1, 4)))
    row[first], row[second] = row[second], row[first]
    return schedule, rows


def is_accepted(schedule, rows):
    try:
        schedule.__class__(
            tuple(map(tuple, rows)),
            schedule.placement,
            schedule.num_microbatches,
            level=schedule.level,
            first_backward_stage=schedule.first_backward_stage,
        )
    except ScheduleError:
        return False
    return True


@quick
@given(reordered(with_messages=False))
def test_compute_rows_are_accepted_exactly_if_they_run_to_the_end(case):
    schedule, rows = case
    assert Run(schedule.rows, schedule.placement, has_messages=False).finishes()
    assert is_accepted(schedule, rows) == Run(rows, schedule.placement, has_messages=False).finishes()


@quick
@given(reordered(with_messages=True))
def test_rows_with_messages_are_accepted_exactly_if_they_run_to_the_end(case):
    schedule, rows = case
    assert schedule.level is Level.COMMUNICATION
    assert Run(schedule.rows, schedule.placement, has_messages=True).finishes()
    assert is_accepted(schedule, rows) == Run(rows, schedule.placement, has_messages=True).finishes()


@quick
@given(reordered(with_messages=True, tied=True))
def test_rows_with_a_tied_matrix_are_accepted_exactly_if_they_run_to_the_end(case):
    schedule, rows = case
    assert Run(schedule.rows, schedule.placement, has_messages=True).finishes()
    assert is_accepted(schedule, rows) == Run(rows, schedule.placement, has_messages=True).finishes()


def test_the_executor_itself_can_get_stuck_and_can_take_a_wrong_tensor():
    schedule = make_schedule("gpipe", pp=2, num_microbatches=2)
    stuck = [schedule.rows[0][::-1], schedule.rows[1]]
    assert not Run(stuck, schedule.placement, has_messages=False).finishes()
    lowered = lower(schedule)
    crossed = [
        action._replace(microbatch=1 - action.microbatch) if action.kind == "SEND_F" else action
        for action in lowered.rows[0]
    ]
    assert not Run([crossed, lowered.rows[1]], schedule.placement, has_messages=True).finishes()
