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
from pipeloom.schedule.action import Action
from pipeloom.schedule.kernels.waits import needs
from pipeloom.schedule.kinds import OWN_LANES, TIED_KINDS, Kind
from pipeloom.schedule.placement import Placement

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


_PLAIN_LANES = (*OWN_LANES, "host")
_LANE_PATTERN = re.compile(rf"({'|'.join(_PLAIN_LANES)})|send to (\d+)|recv from (\d+)")


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
            known = ", ".join(f"'{name}'" for name in (*_PLAIN_LANES, "send to 1", "recv from 0"))
            raise UserError(f"'{text}' is no lane: expected a text such as {known}")
        plain, send_peer, receive_peer = match.groups()
        if plain is not None:
            return cls(plain)
        return cls("recv", int(receive_peer)) if send_peer is None else cls("send", int(send_peer))


COMPUTE_LANE = Lane("compute")
DATA_PARALLEL_LANE = Lane("data-parallel")
TO_HOST_LANE = Lane("to host")
FROM_HOST_LANE = Lane("from host")
HOST_LANE = Lane("host")
"""The processor that launches actions, one after the other in the order of the row. No action runs there."""


def lane_of(action: Action, placement: Placement) -> Lane:
    """The lane of its own rank on which an action runs."""
    kind = action.kind
    if kind.lane not in ("send", "recv"):
        return Lane(kind.lane)
    owner = placement.rank_by_stage
    return Lane(kind.lane, owner[other_end(action, len(owner)).stage])


_TO_NEXT_STAGE = frozenset({Kind.SEND_F, Kind.RECV_B})
"""Messages whose other end is one stage further; that of the others between stages is one stage before."""


def other_end(action: Action, num_stages: int) -> Action:
    """The receive of a send on another rank, the send of a receive."""
    kind, stage = action.kind, action.stage
    if kind in TIED_KINDS:
        return tied_action(kind.partner, num_stages)
    return action._replace(kind=kind.partner, stage=stage + (1 if kind in _TO_NEXT_STAGE else -1))


def tied_action(kind: Kind, num_stages: int) -> Action:
    """The action of a kind that concerns the matrix of embedding and head: it names the first stage or the last one."""
    return Action(kind, 0 if kind in (Kind.SEND_TIED, Kind.RECV_TIED_GRAD) else num_stages - 1)


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
    count = needs(kind.code, stage, microbatch, part, facts.shape, *facts.relation, found)
    return [facts.action_of(int(key)) for key in found[:count]]
