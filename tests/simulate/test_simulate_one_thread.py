"""A rank's thread posts messages and computes on shared cores: compared with a second clock, written as threads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import COMPUTE_KINDS, RECEIVE_KINDS, SEND_KINDS
from pipeloom.simulation import Host, Sharing, simulate

POSTS_S = {Kind.FORWARD: 0.125, Kind.SEND_F: 0.5, Kind.RECV_F: 0.375, Kind.SEND_B: 0.25, Kind.RECV_B: 0.0625}


def host(resource="cores"):
    return Host(lambda action: POSTS_S.get(action.kind, 0.0), run_ahead=1, resource_of=lambda _: resource)


def cores(capacity):
    return Sharing(lambda action, _: "cores" if action.kind in COMPUTE_KINDS else None, {"cores": capacity})


class Threads:
    """One thread a rank. Each requests work on the cores, or waits; the loop advances to the next thing that ends."""

    def __init__(self, schedule, costs, capacity):
        self.costs, self.placement, self.now, self.ends, self.starts = costs, schedule.placement, 0.0, {}, {}
        self.receives, self.last = {}, {}  # when each was posted; when the last one over an edge arrives
        self.threads = {rank: self.thread(rank, row) for rank, row in enumerate(schedule.rows)}
        self.left = dict.fromkeys(self.threads, 0.0)  # seconds of work; infinite for one that waits
        self.resume()
        while self.threads:
            busy = [rank for rank in self.threads if self.left[rank] < float("inf")]
            speed = min(1.0, capacity / max(1, len(busy)))
            arrivals = [end - self.now for end in self.ends.values() if end > self.now]
            step = min([self.left[rank] / speed for rank in busy] + arrivals)
            self.now += step
            for rank in busy:
                self.left[rank] -= step * speed
            self.resume()

    def resume(self):
        """Continue threads that have finished their work, and those that wait, until none gets further."""
        again = True
        while again:
            again = False
            for rank in [rank for rank in self.threads if not 1e-12 < self.left[rank] < float("inf")]:
                waited, self.left[rank] = self.left[rank], next(self.threads[rank], None)
                again |= self.left[rank] != waited or waited < float("inf")
                if self.left[rank] is None:
                    del self.threads[rank], self.left[rank]

    def thread(self, rank, row):
        for action in row:
            yield POSTS_S.get(action.kind, 0.0)
            if action.kind in COMPUTE_KINDS:
                while any(self.ends.get(needed, float("inf")) > self.now for needed in self.inputs(rank, action)):
                    yield float("inf")
                self.starts[action] = self.now
                yield self.costs.seconds(action)
            self.post(action)

    def inputs(self, rank, action):
        kind, stage, microbatch, part = action
        owner, last = self.placement.rank_by_stage, len(self.placement.rank_by_stage) - 1
        if kind is Kind.FORWARD:
            near, receive = (stage - 1, Kind.RECV_F) if stage else (None, None)
        else:
            near, receive = (stage + 1, Kind.RECV_B) if stage < last else (None, None)
        if near is None:
            return [] if kind is Kind.FORWARD else [Action(Kind.FORWARD, stage, microbatch, part)]
        return [
            Action(kind, near, microbatch, part) if owner[near] == rank else Action(receive, stage, microbatch, part)
        ]

    def post(self, action):
        kind = action.kind
        if kind in COMPUTE_KINDS or kind in SEND_KINDS:
            self.ends[action] = self.now
        if kind in RECEIVE_KINDS:
            self.receives[action] = self.now
        if kind in SEND_KINDS | RECEIVE_KINDS:
            self.match()

    def match(self):
        """Give each posted receive whose send is posted its arrival, in the order of posting."""
        for action, posted in list(self.receives.items()):
            kind, stage, microbatch, part = action
            near, sends = (stage - 1, Kind.SEND_F) if kind is Kind.RECV_F else (stage + 1, Kind.SEND_B)
            sent = self.ends.get(Action(sends, near, microbatch, part))
            owner = self.placement.rank_by_stage
            edge = owner[near], owner[stage]
            if sent is None:
                continue
            begin = max(posted, sent, self.last.get(edge, 0.0))
            self.ends[action] = self.last[edge] = begin + self.costs.seconds(action)
            del self.receives[action]


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["gpipe", "1f1b", "breadth-first", "depth-first"]),
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(1, 5),
    st.sampled_from([0.75, 1.0, 1.7, 2.0, 9.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_the_simulator_and_threads_written_by_hand_agree(family, pp, loops, count, capacity, transfer_s):
    loops = loops if family.endswith("first") else 1
    schedule = lower(make_schedule(family, pp=pp, loops=loops, num_microbatches=count * pp))
    costs = Costs(1.0, 2.3, transfer_s)
    trace = simulate(schedule, costs, cores(capacity), host())
    threads = Threads(schedule, costs, capacity)
    found = {s.action: (s.start_s, s.end_s) for rank in range(pp) for s in trace.compute(rank)}
    assert list(found) == [one for row in schedule.rows for one in row if one.kind in COMPUTE_KINDS]
    for action, (start_s, end_s) in found.items():
        assert start_s == pytest.approx(threads.starts[action], abs=1e-9), action
        assert end_s == pytest.approx(threads.ends[action], abs=1e-9), action


def test_posting_takes_a_core_from_the_compute_of_another_rank():
    schedule = parse_schedule("0F0 0F1\n1F0 1F1")
    sends = Host(lambda action: 1.0 if action.stage == 0 else 0.0, run_ahead=1, resource_of=lambda _: "cores")
    ends = {
        str(s.action): s.end_s
        for rank in (0, 1)
        for s in simulate(schedule, Costs(1, 1), cores(1), sends).compute(rank)
    }
    # Launch of 0F0 until 1, 0F0 until 2; then launch of 0F1 and 1F0 share until 4; 0F1 until 5; 1F1 until 6.
    assert ends == pytest.approx({"0F0": 2, "0F1": 5, "1F0": 4, "1F1": 6})


def test_a_host_that_shares_nothing_with_anyone_is_refused():
    with pytest.raises(UserError, match="expected sharing with the capacity of what launches use"):
        simulate(parse_schedule("0F0 0B0"), Costs(1, 1), host=host())
