"""What waits for the messages about a tied matrix, and what they wait for.

Where embedding and head are one matrix, it belongs to the first stage. The last stage borrows its weights for a step
and gives back its gradient: a message each, if the two stages are on different ranks.
"""

import numpy as np

from pipeloom.schedule.facts import Facts
from pipeloom.schedule.kinds import Kind
from pipeloom.schedule.row import Ints


def tied_waits(facts: Facts) -> Ints:
    """For each node what it waits for on account of a tied matrix; -1 for nothing.

    The weights wait for the gather of the first stage before them, and the last stage's first forward waits for the
    weights. The first stage's last reduction waits for the head's gradient. That this gradient is complete follows
    from its place in the row, behind the last backward that adds to it.
    """
    waits = np.full(len(facts.ranks), -1, np.int32)
    node_of = {kind: nodes[0] for kind, nodes in facts.tied_nodes.items()}

    def wait(node: int, needed: int) -> None:
        if node >= 0 and needed >= 0:
            waits[node] = needed

    sent, taken = node_of.get(Kind.SEND_TIED, -1), node_of.get(Kind.RECV_TIED, -1)
    gathers = _nodes(facts, Kind.UNSHARD, 0)
    wait(sent, max(gathers[gathers < sent].tolist(), default=-1))
    wait(taken, sent)
    wait(min(_nodes(facts, Kind.FORWARD, facts.placement.num_stages - 1).tolist(), default=-1), taken)
    taken = node_of.get(Kind.RECV_TIED_GRAD, -1)
    wait(taken, node_of.get(Kind.SEND_TIED_GRAD, -1))
    wait(max(_nodes(facts, Kind.REDUCE_GRAD, 0).tolist(), default=-1), taken)
    return waits


def _nodes(facts: Facts, kind: Kind, stage: int) -> Ints:
    """The numbers of a stage's actions of a kind, ascending."""
    kinds, stages = facts.columns.kind, facts.columns.stage
    return np.flatnonzero((kinds == kind.code) & (stages == stage)).astype(np.int32)
