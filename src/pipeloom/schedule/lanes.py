"""Lanes of a rank, each of which runs one action at a time, and the other end of a message."""

import re
from typing import NamedTuple

from pipeloom.errors import UserError
from pipeloom.schedule.action import Action
from pipeloom.schedule.kinds import OWN_LANES, TIED_KINDS, Kind
from pipeloom.schedule.placement import Placement

_PLAIN_LANES = (*OWN_LANES, "host")
_LANE_PATTERN = re.compile(rf"({'|'.join(_PLAIN_LANES)})|send to (\d+)|recv from (\d+)")


class Lane(NamedTuple):
    """One of ``compute``, ``send`` to or ``recv`` from a peer, ``data-parallel``, ``evict`` to the partner and
    ``load`` from it, ``to host`` and ``from host`` for offloads and swaps, ``host``.
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
"""The processor that launches a rank's actions in the order of its row. No action runs there."""


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
