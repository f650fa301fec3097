"""Whether replicas that meet within a step can wait for each other in a circle.

Each replica's schedule is verified by itself. Replicas also meet: in gathers and reductions on their data-parallel
lanes, in sums of the loads of experts, and, where they share experts, in the middle of forwards and backwards. Here the
actions of a meeting are one node of a graph of all replicas: it starts when each of them can start, and ends for all
at the same time.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from pipeloom.errors import ScheduleError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import EXCHANGES, GOES_BACK, GOES_FORTH, USES_WEIGHTS, Kind
from pipeloom.schedule.schedule import Schedule

RULE = "together"
"""The name by which a refusal calls the rule."""

_Node = tuple[int, int]
"""A replica, and a node of its schedule's graph; replica -1: a sum of loads."""


def prove_together(schedules: Sequence[Schedule], stages: Collection[int], size: int) -> None:
    """Check that replicas which share experts meet in one order, and that none waits in a circle.

    Args:
        schedules: of each position on the data axis, on one placement.
        stages: that have experts.
        size: of the groups of neighbors that share them.

    Raises:
        ScheduleError: they do not.
    """
    if all(one is schedules[0] for one in schedules):
        # In a graph of equal rows each node is one of every replica, so a circle would be one of a single replica.
        return
    graph = _Joint({node: nodes[0] for nodes in _meetings(schedules, frozenset(stages), size) for node in nodes})
    for replica, one in enumerate(schedules):
        for node in range(one.graph.num_nodes):
            graph.add((replica, node), [(replica, needed) for needed in one.graph.needed(node)])
    for number, (before, after) in enumerate(_sums(schedules, stages)):
        graph.add((-1, number), before)
        for node in after:
            graph.add(node, [(-1, number)])
    stuck = graph.stuck()
    if stuck:
        replica, node = min(one for one in stuck if one[0] >= 0)
        action = schedules[replica].facts.action(node)
        raise _refusal(f"replicas wait for each other in a circle, such as replica {replica} with {action}")


class _Joint:
    """The graph of all replicas.

    Args:
        first_of: node -> the one that stands for its meeting.
    """

    def __init__(self, first_of: Mapping[_Node, _Node]) -> None:
        self._first_of = first_of
        self._followers: dict[_Node, list[_Node]] = defaultdict(list)
        self._num_open: dict[_Node, int] = {}

    def add(self, node: _Node, needed: Sequence[_Node]) -> None:
        """Add a node, or let it wait for more."""
        own = self._first_of.get(node, node)
        self._num_open[own] = self._num_open.get(own, 0) + len(needed)
        for one in needed:
            self._followers[self._first_of.get(one, one)].append(own)

    def stuck(self) -> list[_Node]:
        """The nodes in circles, and those that wait for one (Kahn's algorithm)."""
        num_open = dict(self._num_open)
        ready = [node for node, number in num_open.items() if number == 0]
        while ready:
            del num_open[node := ready.pop()]
            for follower in self._followers[node]:
                num_open[follower] -= 1
                if num_open[follower] == 0:
                    ready.append(follower)
        return list(num_open)


def _meetings(schedules: Sequence[Schedule], stages: frozenset[int], size: int) -> Iterator[list[_Node]]:
    """For each meeting of actions its nodes.

    Raises:
        ScheduleError: replicas meet in another order.
    """
    every = range(len(schedules))
    for rank in range(schedules[0].num_ranks):
        yield from _met(schedules, rank, every, lambda action: action.kind in EXCHANGES)
        for begin in every[::size]:
            group = range(begin, begin + size)
            yield from _met(schedules, rank, group, lambda a: a.kind in USES_WEIGHTS and a.stage in stages)


def _met(
    schedules: Sequence[Schedule], rank: int, replicas: Sequence[int], meets: Callable[[Action], bool]
) -> Iterator[list[_Node]]:
    """The n-th actions that meet in each replica's row, for each n."""
    found = [_nodes(schedules[replica], rank, meets) for replica in replicas]
    keys = [[(action.kind, action.stage) for _, action in one] for one in found]
    for replica, own in zip(replicas, keys, strict=True):
        if own != keys[0]:
            slot = next((n for n, (a, b) in enumerate(zip(own, keys[0], strict=False)) if a != b), None)
            what = "meet another number of times"
            if slot is not None:
                one, other = found[0][slot][1], found[replica - replicas[0]][slot][1]
                what = f"meet in another order: replica {replicas[0]} in {one}, replica {replica} in {other}"
            raise _refusal(f"the replicas of pipeline rank {rank} {what}")
    for nodes in zip(*found, strict=True):
        yield [(replica, node) for replica, (node, _) in zip(replicas, nodes, strict=True)]


def _sums(schedules: Sequence[Schedule], stages: Collection[int]) -> Iterator[tuple[list[_Node], list[_Node]]]:
    """For each sum of the loads of a stage's experts what it waits for, and what waits for it.

    Sums start behind the last forward of their stage. Where a backward precedes it, none waits for the sum.

    Raises:
        ScheduleError: replicas start sums in another order.
    """
    for rank in range(schedules[0].num_ranks):
        last = [_by_stage(one, rank, stages, GOES_FORTH) for one in schedules]
        begun = [_by_stage(one, rank, stages, GOES_BACK, first=True) for one in schedules]
        orders = [sorted(one, key=one.__getitem__) for one in last]
        if any(order != orders[0] for order in orders):
            raise _refusal(
                f"the replicas of pipeline rank {rank} end the forwards of stages with experts in another order"
            )
        for stage in orders[0]:
            before = [(replica, one[stage]) for replica, one in enumerate(last)]
            after = [(replica, one[stage]) for replica, one in enumerate(begun) if stage in one]
            if all(node > other for (_, node), (_, other) in zip(after, before, strict=False)):
                yield before, after


def _by_stage(
    schedule: Schedule, rank: int, stages: Collection[int], kinds: Collection[Kind], *, first: bool = False
) -> dict[int, int]:
    """Stage -> node of its last action of these kinds, or of its first one."""
    found = _nodes(schedule, rank, lambda action: action.kind in kinds and action.stage in stages)
    return {action.stage: node for node, action in (reversed(found) if first else found)}


def _nodes(schedule: Schedule, rank: int, takes: Callable[[Action], bool]) -> list[tuple[int, Action]]:
    begin = int(schedule.facts.columns.first[rank])
    return [(begin + slot, action) for slot, action in enumerate(schedule.rows[rank]) if takes(action)]


def _refusal(message: str) -> ScheduleError:
    return ScheduleError(RULE, message, rank=None, slot=None, window="")
