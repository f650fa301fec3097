"""The one dependency relation: what an action waits for.

An action starts when its lane is free and what it waits for has ended. The verifier, the passes, the
simulator and the executor all ask here. An action waits for

- *data*: the actions whose results it uses (``data_dependencies``);
- *a buffer*: where gradient buffers are limited, the first backward of a stage's gradient waits for the
  reduction that frees its buffer (``Schedule.gradient_buffers``), and a stage that is swapped in for the swap out
  that frees its room (``Schedule.max_resident``);
- *its lane*: the action before it on the same lane of the same rank;
- *its place in the row*, if it is communication: the compute action before it in the row. A receive stands
  in the row where its buffer becomes free, a gather where its prefetch begins; they start no earlier. Compute
  never waits for the communication before it in the row unless it uses its result.
"""

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeloom.errors import UserError
from pipeloom.schedule.action import TIED_KINDS, Action, Kind
from pipeloom.schedule.kernels.waits import needs
from pipeloom.schedule.placement import Placement
from pipeloom.schedule.row import CODE

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


_LANE_PATTERN = re.compile(r"(compute|data-parallel|evict|load|to host|from host|host)|send to (\d+)|recv from (\d+)")


class Lane(NamedTuple):
    """What runs one action at a time: ``compute``, ``send`` to or ``recv`` from a peer, ``data-parallel``,
    ``evict`` to the partner and ``load`` from it, ``to host`` and ``from host`` for what is swapped there, ``host``.
    """

    name: str
    peer: int | None = None

    def __str__(self) -> str:
        """``compute``, ``send to 1``, ``recv from 0``, ``data-parallel``, ``host``."""
        return self.name if self.peer is None else f"{self.name} {'to' if self.name == 'send' else 'from'} {self.peer}"

    @classmethod
    def parse(cls, text: str) -> "Lane":
        """Read the text form.

        Raises:
            UserError: the text is no lane.
        """
        match = _LANE_PATTERN.fullmatch(text)
        if match is None:
            known = "'compute', 'data-parallel', 'evict', 'load', 'to host', 'from host', 'host', 'send to 1'"
            raise UserError(f"'{text}' is no lane: expected a text such as {known}, 'recv from 0'")
        plain, send_peer, receive_peer = match.groups()
        if plain is not None:
            return cls(plain)
        return cls("recv", int(receive_peer)) if send_peer is None else cls("send", int(send_peer))


COMPUTE_LANE = Lane("compute")
DATA_PARALLEL_LANE = Lane("data-parallel")
TO_HOST_LANE = Lane("to host")
FROM_HOST_LANE = Lane("from host")
OWN_LANES = {
    Kind.UNSHARD: DATA_PARALLEL_LANE,
    Kind.RESHARD: DATA_PARALLEL_LANE,
    Kind.REDUCE_GRAD: DATA_PARALLEL_LANE,
    Kind.EVICT: Lane("evict"),
    Kind.LOAD: Lane("load"),
    Kind.OFFLOAD: TO_HOST_LANE,
    Kind.SWAP_OUT: TO_HOST_LANE,
    Kind.RELOAD: FROM_HOST_LANE,
    Kind.SWAP_IN: FROM_HOST_LANE,
}
"""Kinds that run beside compute on a lane of their rank alone. Swaps have one for each direction, since links carry
both at once."""
HOST_LANE = Lane("host")
"""The processor that launches actions, one after the other in the order of the row. No action runs there."""


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
        case Kind.SEND_TIED | Kind.SEND_TIED_GRAD:
            return Lane("send", owner[tied_partner(action, len(owner)).stage])
        case Kind.RECV_TIED | Kind.RECV_TIED_GRAD:
            return Lane("recv", owner[tied_partner(action, len(owner)).stage])
    return OWN_LANES.get(action.kind, COMPUTE_LANE)


_TIED_PARTNER = {
    Kind.SEND_TIED: Kind.RECV_TIED,
    Kind.RECV_TIED: Kind.SEND_TIED,
    Kind.SEND_TIED_GRAD: Kind.RECV_TIED_GRAD,
    Kind.RECV_TIED_GRAD: Kind.SEND_TIED_GRAD,
}
assert _TIED_PARTNER.keys() == TIED_KINDS


def tied_action(kind: Kind, num_stages: int) -> Action:
    """The action of a kind that concerns the matrix of embedding and head: it names the first stage or the last one."""
    return Action(kind, 0 if kind in (Kind.SEND_TIED, Kind.RECV_TIED_GRAD) else num_stages - 1)


def tied_partner(action: Action, num_stages: int) -> Action:
    """The other end of a message about the matrix of embedding and head: a send's receive, a receive's send."""
    return tied_action(_TIED_PARTNER[action.kind], num_stages)


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
    assert receive.microbatch is not None
    return schedule.input_gradient(receive.stage, receive.microbatch, receive.slice)


def data_dependencies(action: Action, schedule: "Schedule") -> list[Action]:
    """The actions whose results ``action`` uses, by what they are.

    That a stage computes on gathered weights depends on the place in the row, so ``Graph`` adds it; so it does what
    the messages about a tied matrix wait for, and who waits for them (``pipeloom.schedule.tied``).
    """
    found = np.zeros(3, np.int64)
    kind, stage, microbatch, part = action
    if microbatch is None:
        return []
    facts = schedule.facts
    count = needs(CODE[kind], stage, microbatch, part, facts.shape, *facts.relation, found)
    return [facts.action_of(int(key)) for key in found[:count]]
