"""What goes through two resources one behind the other: compared with a second clock, in exact fractions."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.families import make_schedule
from pipeloom.passes import add_data_parallel, lower
from pipeloom.passes.lower_sharding import exchanges
from pipeloom.schedule import Kind, parse_schedule
from pipeloom.schedule.kinds import RECEIVE_KINDS
from pipeloom.schedule.lanes import other_end
from pipeloom.simulation import Host, Sharing, simulate

COLLECTIVES = (Kind.UNSHARD, Kind.REDUCE_GRAD)


def links(schedule, up=1.0, down=1.0):
    """Every rank has an uplink and a downlink; gathers and reductions use both of their rank."""
    owner = schedule.placement.rank_by_stage

    def uplink_of(action, rank):
        if action.kind in RECEIVE_KINDS:
            return "up", owner[other_end(action, len(owner)).stage]
        return ("up", rank) if action.kind in COLLECTIVES else None

    def downlink_of(action, rank):
        return ("down", rank) if action.kind in (*RECEIVE_KINDS, *COLLECTIVES) else None

    ranks = range(schedule.num_ranks)
    capacity = {("up", rank): up for rank in ranks} | {("down", rank): down for rank in ranks}
    return Sharing(uplink_of, capacity, onward_of=downlink_of)


def fair(capacity, needs):
    """What each gets of a capacity: none more than it needs, and the same for all that need more."""
    given, left = {}, dict(needs)
    while left:
        share = capacity / len(left)
        content = {one: need for one, need in left.items() if need <= share}
        given |= content or dict.fromkeys(left, share)
        capacity -= sum(content.values())
        left = {one: need for one, need in left.items() if one not in given}
    return given


def speed_of(capacity, users):
    """Of each of those that use a resource; ``None`` is none."""
    return Fraction(1) if capacity is None else min(Fraction(1), capacity / users)


def second_clock(schedule, seconds_of, sharing):
    """(start, end) of each action. ``out`` is what the first resource has yet to do, ``through`` the second one."""
    graph, actions = schedule.graph, [action for row in schedule.rows for action in row]
    owner = [rank for rank, row in enumerate(schedule.rows) for _ in row]
    needs = [{one for one in waits if one >= 0} for waits in graph.waits.tolist()]
    first = [sharing.resource_of(action, rank) for action, rank in zip(actions, owner, strict=True)]
    second = [sharing.onward_of(action, rank) for action, rank in zip(actions, owner, strict=True)]
    capacity = {name: Fraction(each) for name, each in sharing.capacity.items()}
    now, times, out, through, done = Fraction(0), {}, {}, {}, set()
    while len(done) < len(actions):
        for node, before in enumerate(needs):
            if node not in times and before <= done:
                times[node] = [now, None]
                out[node] = Fraction(seconds_of(actions[node]))
                through[node] = out[node] if second[node] is not None else Fraction(0)
        users = Counter(first[node] for node, left in out.items() if left)
        speed = {node: speed_of(capacity.get(first[node]), users[first[node]]) for node in out if out[node]}
        passing = {node for node, left in through.items() if left}
        onward = {}
        for name in {second[node] for node in passing}:
            here = {node for node in passing if second[node] == name}
            onward |= fair(capacity[name], {n: Fraction(1) if through[n] > out[n] else speed.get(n, 0) for n in here})
        spans = [left / speed[node] for node, left in out.items() if left]
        spans += [through[node] / onward[node] for node in passing if onward[node]]
        # A backlog ends.
        spans += [
            (through[n] - out[n]) / (onward[n] - speed.get(n, 0))
            for n in passing
            if onward[n] > speed.get(n, 0) and through[n] > out[n]
        ]
        ended = {node for node in out if not out[node] and not through[node]}
        step = Fraction(0) if ended else min(spans)
        now += step
        for node in out:
            out[node] -= step * speed.get(node, 0)
            through[node] -= step * onward.get(node, 0)
        for node in ended:
            times[node][1] = now
            done.add(node)
            del out[node], through[node]
    return [(float(start), float(end)) for start, end in (times[node] for node in range(len(actions)))]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["breadth-first", "depth-first", "1f1b", "gpipe", "zb-h1"]),
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([3, 7]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_two_resources_are_those_of_a_second_clock(family, pp, loops, rounds, shards, transfer, gather, down):
    sizes = {"loops": loops} if family in ("breadth-first", "depth-first") else {}
    schedule = lower(make_schedule(family, pp=pp, num_microbatches=rounds * pp, **sizes))
    if shards:
        schedule = add_data_parallel(schedule, *exchanges("full", residency=2, prefetch=2, gradient_buffers=None))
    costs = Costs(2, 4, transfer, gather, gather)
    sharing = links(schedule, down=down)
    spans = simulate(schedule, costs, sharing).spans
    expected = second_clock(schedule, costs.seconds, sharing)
    found = list(zip(spans.start_s.tolist(), spans.end_s.tolist(), strict=True))
    assert found == [pytest.approx(one, abs=1e-9) for one in expected]


def test_messages_from_two_sides_share_a_downlink():
    schedule = lower(make_schedule("1f1b", pp=3, num_microbatches=6))
    sharing, costs = links(schedule), Costs(1, 2, 2)
    uplinks = Sharing(sharing.resource_of, sharing.capacity)
    assert simulate(schedule, costs, sharing).end_s > simulate(schedule, costs, uplinks).end_s


def test_a_backlog_keeps_the_downlink_busy_after_its_sender_has_sent():
    schedule = lower(parse_schedule("0F0\n1F0"))
    ends = {str(s.action): s.end_s for s in simulate(schedule, Costs(1, 1, 2), links(schedule, down=0.5)).spans}
    # Sent from 1 to 3, through the downlink at half the speed from 1 to 5.
    assert ends["1RECV_F0"] == 5


def test_a_wide_downlink_changes_nothing():
    schedule = lower(make_schedule("breadth-first", pp=3, loops=2, num_microbatches=4))
    sharing = links(schedule)
    first_alone = Sharing(sharing.resource_of, sharing.capacity)
    wide = links(schedule, down=100.0)
    assert simulate(schedule, Costs(1, 2, 0.75), wide) == simulate(schedule, Costs(1, 2, 0.75), first_alone)


def test_a_resource_is_first_or_second():
    schedule = lower(parse_schedule("0F0\n1F0"))
    sharing = Sharing(lambda action, rank: "link", {"link": 1.0}, onward_of=lambda action, rank: "link")
    with pytest.raises(UserError, match="found 'link' in both"):
        simulate(schedule, Costs(1, 1, 1), sharing)


def test_launches_use_no_second_resource():
    schedule = lower(parse_schedule("0F0\n1F0"))
    host = Host(lambda _: 1.0, resource_of=lambda rank: ("down", rank))
    with pytest.raises(UserError, match="found .'down', [01]. in both"):
        simulate(schedule, Costs(1, 1, 1), links(schedule), host)


def test_nothing_is_simulated_without_capacity_or_without_an_end():
    schedule = lower(parse_schedule("0F0\n1F0"))
    with pytest.raises(UserError, match="must be above 0, found 0"):
        simulate(schedule, Costs(1, 1, 1), links(schedule, down=0))
    with pytest.raises(UserError, match="must take finite seconds"):
        simulate(schedule, Costs(1, 1, float("inf")), links(schedule))
