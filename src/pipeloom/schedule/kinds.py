"""The table of kinds of actions, one row for each.

Sets of kinds, lanes, nominal seconds, numbers in arrays and kernels, PyTorch's names, words and colors are derived from
it. It imports nothing of the package, so that kernels can take their numbers from it.
"""

from enum import Enum, StrEnum
from typing import Literal, get_args


class Group(Enum):
    """Groups of kinds. The executor has a part for each group, and a rule concerns one group."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    MOVE_OUT = "move out"
    """Activations of a micro-batch move out of the rank."""
    MOVE_BACK = "move back"
    COLLECTIVE = "collective"
    """Over the data-parallel ranks."""
    TIED_SEND = "tied send"
    """Of the matrix that embedding and head share: it belongs to the first stage, the last one borrows it."""
    TIED_RECEIVE = "tied receive"
    STAGE_SWAP = "stage swap"
    """A whole stage, with weights, gradients and optimizer state, moves to the device or to the host."""
    UPDATE = "update"


class Scope(Enum):
    """What an action names in addition to its stage: a micro-batch, or nothing."""

    MICROBATCH = "micro-batch"
    STAGE = "stage"


OwnLane = Literal["compute", "data-parallel", "evict", "load", "to host", "from host"]
"""Lanes of a rank other than those of its edges, in the order of their numbers. Links are full duplex: each direction
has a lane."""
OWN_LANES: tuple[OwnLane, ...] = get_args(OwnLane)

_COMPUTE, _SEND, _RECEIVE = Group.COMPUTE, Group.SEND, Group.RECEIVE
_OUT, _BACK, _COLLECTIVE = Group.MOVE_OUT, Group.MOVE_BACK, Group.COLLECTIVE
_TIED_SEND, _TIED_RECEIVE, _SWAP, _UPDATE = Group.TIED_SEND, Group.TIED_RECEIVE, Group.STAGE_SWAP, Group.UPDATE
_ACTIVATION, _STAGE = Scope.MICROBATCH, Scope.STAGE


class Kind(StrEnum):
    """What an action does. The value is the letter in an action's text; PyTorch's runtime has the same, or none.

    Examples:
        >>> from pipeloom import Kind
        >>> Kind("F"), Kind.BACKWARD_INPUT.words
        (<Kind.FORWARD: 'F'>, 'backward for the input')

    Attributes:
        code: its number in arrays and kernels, the number of its row. Compute comes first, then what names a
            micro-batch, then what names a stage: kernels compare codes.
        group: the kinds that are handled alike.
        scope: what an action names in addition to its stage.
        lane: where it runs; a send or a receive on the lane of its edge.
        nominal_s: seconds without a cost model: a forward takes 1, a backward 2, a move of activations 1.
        color: its color in pictures, a name of ``plotting/palette.py``.
        in_torch: whether PyTorch's runtime has it (torch 2.13, ``_ComputationType``).
        partner_letter: of the kind at the other end of a message, or of the move back from a move out.
        words: its name in reports.
    """

    code: int
    group: Group
    scope: Scope
    lane: OwnLane | Literal["send", "recv"]
    nominal_s: float
    color: str
    in_torch: bool
    partner_letter: str
    words: str

    def __new__(  # noqa: PLR0917  a row of the table has one place for each column
        cls,
        letter: str,
        group: Group,
        scope: Scope,
        lane: OwnLane | Literal["send", "recv"],
        nominal_s: float,
        color: str,
        in_torch: int,
        partner_letter: str,
        words: str,
    ) -> "Kind":
        """A row of the table."""
        kind = str.__new__(cls, letter)
        kind._value_ = letter
        kind.code = len(cls.__members__)
        kind.group, kind.scope, kind.lane, kind.nominal_s = group, scope, lane, float(nominal_s)
        kind.color, kind.in_torch, kind.partner_letter, kind.words = color, bool(in_torch), partner_letter, words
        return kind

    # fmt: off
    # letter, group, scope, lane, nominal seconds, color, in PyTorch, partner, words
    FORWARD = "F", _COMPUTE, _ACTIVATION, "compute", 1, "forward", 1, "", "forward"
    BACKWARD = "B", _COMPUTE, _ACTIVATION, "compute", 2, "backward", 1, "", "backward"
    BACKWARD_INPUT = "I", _COMPUTE, _ACTIVATION, "compute", 1, "input-gradient", 1, "", "backward for the input"
    BACKWARD_WEIGHT = "W", _COMPUTE, _ACTIVATION, "compute", 1, "weight-gradient", 1, "", "backward for the weights"
    # From the stage's input, which is all that the forward itself kept for the backward.
    RECOMPUTE = "R", _COMPUTE, _ACTIVATION, "compute", 1, "recompute", 0, "", "forward again"
    SEND_F = "SEND_F", _SEND, _ACTIVATION, "send", 0, "message", 1, "RECV_F", "send of the output"
    RECV_F = "RECV_F", _RECEIVE, _ACTIVATION, "recv", 0, "message", 1, "SEND_F", "receive of the input"
    SEND_B = "SEND_B", _SEND, _ACTIVATION, "send", 0, "message", 1, "RECV_B", "send of the gradient"
    RECV_B = "RECV_B", _RECEIVE, _ACTIVATION, "recv", 0, "message", 1, "SEND_B", "receive of the gradient"
    EVICT = "EVICT", _OUT, _ACTIVATION, "evict", 1, "move", 0, "LOAD", "eviction of activations"
    LOAD = "LOAD", _BACK, _ACTIVATION, "load", 1, "move", 0, "EVICT", "load of evicted activations"
    OFFLOAD = "OFFLOAD", _OUT, _ACTIVATION, "to host", 1, "move", 0, "RELOAD", "offload of activations to the host"
    RELOAD = "RELOAD", _BACK, _ACTIVATION, "from host", 1, "move", 0, "OFFLOAD", "reload of activations from the host"
    UNSHARD = "UNSHARD", _COLLECTIVE, _STAGE, "data-parallel", 0, "gather", 1, "", "gather of the weights"
    RESHARD = "RESHARD", _COLLECTIVE, _STAGE, "data-parallel", 0, "gather", 1, "", "release of the weights"
    REDUCE_GRAD = "REDUCE_GRAD", _COLLECTIVE, _STAGE, "data-parallel", 0, "reduce", 1, "", "reduction of the gradient"
    SEND_TIED = "SEND_TIED", _TIED_SEND, _STAGE, "send", 0, "message", 0, "RECV_TIED", "send of the tied matrix"
    RECV_TIED = "RECV_TIED", _TIED_RECEIVE, _STAGE, "recv", 0, "message", 0, "SEND_TIED", "receive of the tied matrix"
    SEND_TIED_GRAD = (
        "SEND_TIED_GRAD", _TIED_SEND, _STAGE, "send", 0, "message", 0,
        "RECV_TIED_GRAD", "send of the tied matrix's gradient",
    )
    RECV_TIED_GRAD = (
        "RECV_TIED_GRAD", _TIED_RECEIVE, _STAGE, "recv", 0, "message", 0,
        "SEND_TIED_GRAD", "receive of the tied matrix's gradient",
    )
    SWAP_IN = "SWAP_IN", _SWAP, _STAGE, "from host", 0, "move", 0, "", "stage from the host"
    SWAP_OUT = "SWAP_OUT", _SWAP, _STAGE, "to host", 0, "move", 0, "", "stage to the host"
    UPDATE = "UPDATE", _UPDATE, _STAGE, "compute", 0, "update", 0, "", "optimizer step"
    # fmt: on

    @property
    def partner(self) -> "Kind":
        """The receive of a send and the reverse; the move back of a move out and the reverse."""
        return Kind(self.partner_letter)


KINDS: tuple[Kind, ...] = tuple(Kind)
"""Kinds by their code."""


def _of(*groups: Group) -> frozenset[Kind]:
    return frozenset(kind for kind in Kind if kind.group in groups)


COMPUTE_KINDS = _of(Group.COMPUTE)
COMPUTE_LANE_KINDS = frozenset(kind for kind in Kind if kind.lane == "compute")
USES_WEIGHTS = COMPUTE_KINDS - {Kind.BACKWARD_WEIGHT}
"""Kinds that use the stage's weights; a weight gradient uses only activations and output gradients."""
ADDS_TO_GRADIENT = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Kinds that add to the stage's gradient."""
GOES_FORTH = frozenset({Kind.FORWARD})
"""Kinds of the one forward of a micro-batch; a recomputation repeats it."""
GOES_BACK = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""Kinds that begin the backward of a micro-batch."""
CHANGES_GRADIENT = ADDS_TO_GRADIENT | {Kind.REDUCE_GRAD, Kind.RECV_TIED_GRAD}
"""Kinds behind which the stage's gradient is another one."""
USES_STAGE = COMPUTE_KINDS | {Kind.UPDATE, Kind.REDUCE_GRAD}
"""Kinds that use the stage's weights or its gradient."""
SEND_KINDS, RECEIVE_KINDS = _of(Group.SEND), _of(Group.RECEIVE)
LOAD_OF = {kind: kind.partner for kind in Kind if kind.group is Group.MOVE_OUT}
"""Move out -> move back, for both tiers: the partner and the host."""
OUT_OF = {load: out for out, load in LOAD_OF.items()}
MOVE_KINDS = _of(Group.MOVE_OUT, Group.MOVE_BACK)
"""Kinds that move activations."""
PARTNER_MOVES, HOST_MOVES = (Kind.EVICT, Kind.LOAD), (Kind.OFFLOAD, Kind.RELOAD)
"""The moves of each tier: out, and back."""
STAGE_SWAP_KINDS = _of(Group.STAGE_SWAP)
COLLECTIVE_KINDS = _of(Group.COLLECTIVE)
EXCHANGES = COLLECTIVE_KINDS - {Kind.RESHARD}
"""Those in which the replicas of a stage wait for each other."""
TIED_SEND_KINDS, TIED_RECEIVE_KINDS = _of(Group.TIED_SEND), _of(Group.TIED_RECEIVE)
TIED_KINDS = TIED_SEND_KINDS | TIED_RECEIVE_KINDS
STAGE_KINDS = frozenset(kind for kind in Kind if kind.scope is Scope.STAGE)
"""Kinds whose actions name no micro-batch."""

NUM_COMPUTE, NUM_KEYED = len(COMPUTE_KINDS), len(Kind) - len(STAGE_KINDS)
"""Codes below them: compute; what names a micro-batch, so that an action has a key."""

# Kernels and rules compare codes with these two numbers, so the order of the rows is part of the table.
assert set(KINDS[:NUM_COMPUTE]) == COMPUTE_KINDS
assert set(KINDS[NUM_KEYED:]) == STAGE_KINDS
assert all(kind.partner.partner is kind for kind in Kind if kind.partner_letter)
