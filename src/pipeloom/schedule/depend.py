"""The one dependency relation: what an action waits for.

An action starts when its lane is free and what it waits for has ended. The verifier, the passes, the
simulator and the executor all ask here. An action waits for

- *data*: the actions whose results it uses (``data_dependencies``);
- *a buffer*: where gradient buffers are limited, the first backward of a stage's gradient waits for the
  reduction that frees its buffer (``Schedule.gradient_buffers``);
- *its lane*: the action before it on the same lane of the same rank;
- *its place in the row*, if it is communication: the compute action before it in the row. A receive stands
  in the row where its buffer becomes free, a gather where its prefetch begins; they start no earlier. Compute
  never waits for the communication before it in the row unless it uses its result.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pipeloom.errors import UserError
from pipeloom.schedule.action import COMPUTE_KINDS, STAGE_KINDS, Action, Kind
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.sharding import gradient_waits

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


_LANE_PATTERN = re.compile(r"(compute|data-parallel)|send to (\d+)|recv from (\d+)")


class Lane(NamedTuple):
    """What runs one action at a time: ``compute``, ``send`` to or ``recv`` from a peer, ``data-parallel``."""

    name: str
    peer: int | None = None

    def __str__(self) -> str:
        """``compute``, ``send to 1``, ``recv from 0``, ``data-parallel``."""
        return self.name if self.peer is None else f"{self.name} {'to' if self.name == 'send' else 'from'} {self.peer}"

    @classmethod
    def parse(cls, text: str) -> "Lane":
        """Read the text form.

        Raises:
            UserError: the text is no lane.
        """
        match = _LANE_PATTERN.fullmatch(text)
        if match is None:
            known = "'compute', 'data-parallel', 'send to 1', 'recv from 0'"
            raise UserError(f"'{text}' is no lane: expected a text such as {known}")
        plain, send_peer, receive_peer = match.groups()
        if plain is not None:
            return cls(plain)
        return cls("recv", int(receive_peer)) if send_peer is None else cls("send", int(send_peer))


COMPUTE_LANE = Lane("compute")
DATA_PARALLEL_LANE = Lane("data-parallel")


def lane_of(action: Action, placement: Placement) -> Lane:
    """The lane of its own rank on which an action runs."""
    owner, stage = placement.rank_by_stage, action.stage
    match action.kind:
        case Kind.SEND_F:
            return Lane("send", owner[stage + 1])
        case Kind.SEND_B:
            return Lane("send", owner[stage - 1])
        case Kind.RECV_F:
            return Lane("recv", owner[stage - 1])
        case Kind.RECV_B:
            return Lane("recv", owner[stage + 1])
        case Kind.UNSHARD | Kind.RESHARD | Kind.REDUCE_GRAD:
            return DATA_PARALLEL_LANE
    return COMPUTE_LANE


def matching_send(receive: Action) -> Action:
    """The send on the other rank whose tensor ``receive`` takes."""
    if receive.kind is Kind.RECV_F:
        return receive._replace(kind=Kind.SEND_F, stage=receive.stage - 1)
    return receive._replace(kind=Kind.SEND_B, stage=receive.stage + 1)


def matching_receive(send: Action) -> Action:
    """The receive on the other rank that takes the tensor of ``send``."""
    if send.kind is Kind.SEND_F:
        return send._replace(kind=Kind.RECV_F, stage=send.stage + 1)
    return send._replace(kind=Kind.RECV_B, stage=send.stage - 1)


def consumer_of(receive: Action, schedule: "Schedule") -> Action:
    """The compute action on the same rank that uses the tensor of ``receive``."""
    if receive.kind is Kind.RECV_F:
        return receive._replace(kind=Kind.FORWARD)
    return schedule.input_gradient(*receive[1:])


def data_dependencies(action: Action, schedule: "Schedule") -> list[Action]:
    """The actions whose results ``action`` uses, by what they are.

    That a stage computes on gathered weights depends on the place in the row, so ``Graph`` adds it.
    """
    kind, stage, microbatch, part = action
    match kind:
        case Kind.FORWARD:
            return _forward(action, schedule)
        case Kind.BACKWARD | Kind.BACKWARD_INPUT:
            return _backward(action, schedule)
        case Kind.BACKWARD_WEIGHT:
            return [action._replace(kind=Kind.BACKWARD_INPUT)]
        case Kind.SEND_F:
            return [action._replace(kind=Kind.FORWARD)]
        case Kind.SEND_B:
            return [schedule.input_gradient(stage, microbatch, part)]
        case Kind.RECV_F | Kind.RECV_B:
            return [matching_send(action)]
    return []


def _forward(action: Action, schedule: "Schedule") -> list[Action]:
    needs = []
    if action.stage > 0:
        if _received(action.stage - 1, schedule):
            needs.append(action._replace(kind=Kind.RECV_F))
        else:
            needs.append(action._replace(stage=action.stage - 1))
    if action.slice > 0:  # keys and values of the earlier slice, on the same stage
        needs.append(action._replace(slice=action.slice - 1))
    return needs


def _backward(action: Action, schedule: "Schedule") -> list[Action]:
    _, stage, microbatch, part = action
    needs = [Action(Kind.FORWARD, stage, microbatch, part)]
    if stage + 1 < schedule.num_stages:
        if _received(stage, schedule):
            needs.append(Action(Kind.RECV_B, stage, microbatch, part))
        else:
            needs.append(schedule.input_gradient(stage + 1, microbatch, part))
    if part + 1 < schedule.num_slices:  # gradients for keys and values from the later slice
        needs.append(schedule.input_gradient(stage, microbatch, part + 1))
    return needs


def _received(stage: int, schedule: "Schedule") -> bool:
    """Whether the tensor between ``stage`` and ``stage + 1`` arrives by a receive."""
    return schedule.level != "compute" and schedule.placement.crosses(stage)


class Graph:
    """A schedule's actions as numbered nodes, row by row, with what each waits for.

    Attributes:
        actions: the action of each node.
        ranks: the pipeline rank of each node.
        waits: for each node the nodes that have to end before it starts: data, lane, place in the row, gradient buffer.
        missing: (node, action) for each dependency that the schedule lacks.
    """

    def __init__(self, schedule: "Schedule") -> None:
        self.actions = [action for row in schedule.rows for action in row]
        self.ranks = [rank for rank, row in enumerate(schedule.rows) for _ in row]
        self.waits: list[list[int]] = [[] for _ in self.actions]
        self.missing: list[tuple[int, Action]] = []
        self._first_node = _offsets([len(row) for row in schedule.rows])
        self._add_data(schedule)
        self._add_lanes_and_places(schedule)
        self._add_gradient_buffers(schedule)

    def place(self, node: int) -> tuple[int, int]:
        """Rank and slot of a node."""
        rank = self.ranks[node]
        return rank, node - self._first_node[rank]

    def _add_data(self, schedule: "Schedule") -> None:
        node_of = {action: node for node, action in enumerate(self.actions) if action.kind not in STAGE_KINDS}
        for node, action in enumerate(self.actions):
            for needed in data_dependencies(action, schedule):
                if needed in node_of:
                    self.waits[node].append(node_of[needed])
                else:
                    self.missing.append((node, needed))

    def _add_lanes_and_places(self, schedule: "Schedule") -> None:
        node = 0
        for row in schedule.rows:
            last_on_lane: dict[Lane, int] = {}
            last_unshard: dict[int, int] = {}
            for action in row:
                lane = lane_of(action, schedule.placement)
                earlier = {last_on_lane.get(lane)}
                if action.kind in COMPUTE_KINDS:
                    earlier.add(last_unshard.get(action.stage))
                else:
                    earlier.add(last_on_lane.get(COMPUTE_LANE))
                self.waits[node].extend(other for other in earlier if other is not None)
                last_on_lane[lane] = node
                if action.kind is Kind.UNSHARD:
                    last_unshard[action.stage] = node
                node += 1

    def _add_gradient_buffers(self, schedule: "Schedule") -> None:
        if schedule.gradient_buffers is None:
            return
        for rank, row in enumerate(schedule.rows):
            offset = self._first_node[rank]
            for slot, reduction in gradient_waits(row, schedule.gradient_buffers):
                self.waits[offset + slot].append(offset + reduction)

    @cached_property
    def followers(self) -> list[list[int]]:
        """For each node the nodes that wait for it."""
        followers: list[list[int]] = [[] for _ in self.actions]
        for node, nodes in enumerate(self.waits):
            for needed in nodes:
                followers[needed].append(node)
        return followers

    @cached_property
    def order(self) -> list[int]:
        """Nodes so that each comes after all that it waits for; nodes on or behind a cycle are left out."""
        num_open = [len(nodes) for nodes in self.waits]
        ready = [node for node, count in enumerate(num_open) if count == 0]
        for node in ready:  # grows while it is read
            for follower in self.followers[node]:
                num_open[follower] -= 1
                if num_open[follower] == 0:
                    ready.append(follower)
        return ready

    def cycle(self) -> list[int]:
        """Nodes of one cycle, each waiting for the next; empty if there is none."""
        stuck = set(range(len(self.actions))).difference(self.order)
        if not stuck:
            return []
        path, seen = [min(stuck)], {min(stuck): 0}
        while True:
            following = next(needed for needed in self.waits[path[-1]] if needed in stuck)
            if following in seen:
                return path[seen[following] :]
            seen[following] = len(path)
            path.append(following)


def _offsets(lengths: Sequence[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets
