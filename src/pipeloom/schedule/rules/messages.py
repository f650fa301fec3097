"""Rules of what goes from rank to rank, or to the host: messages, a tied matrix, and moves of what is kept."""

import numpy as np

from pipeloom.schedule.action import Action
from pipeloom.schedule.compiled import kernel
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.kernels import order
from pipeloom.schedule.kinds import (
    ADDS_TO_GRADIENT,
    LOAD_OF,
    MOVE_KINDS,
    SEND_KINDS,
    TIED_KINDS,
    TIED_SEND_KINDS,
    Kind,
)
from pipeloom.schedule.lanes import Lane, tied_action
from pipeloom.schedule.row import Bools
from pipeloom.schedule.rules.fault import Fault, Nodes, TextOf, fault_at, with_missing


def messages_complete(facts: Facts) -> Fault | None:
    """Each tensor that changes rank has one send and one receive; no other tensor has any."""
    superfluous, missing = list[tuple[Nodes, TextOf]](), list[Action]()
    for kind, wanted in _wanted_messages(facts).items():
        node, is_wanted = facts.node_of[kind.code], wanted[:, None, None]
        found = node[(node >= 0) & ~is_wanted]
        superfluous.append((found, lambda action, _: f"{action} moves a tensor that does not change rank"))
        is_missing = (node < 0) & is_wanted
        if is_missing.any():
            missing += [Action(kind, *place) for place in np.argwhere(is_missing).tolist()]
    return with_missing(facts, fault_at(facts, *superfluous), sorted(missing, key=str))


def _wanted_messages(facts: Facts) -> dict[Kind, Bools]:
    """For each kind of message the stages that have one for every micro-batch."""
    goes_on = facts.crosses
    arrives = np.append(False, goes_on[:-1])
    goes_back = arrives & (np.arange(len(goes_on)) > facts.first_backward_stage)
    returns = np.append(goes_back[1:], False)
    return {Kind.SEND_F: goes_on, Kind.RECV_F: arrives, Kind.SEND_B: goes_back, Kind.RECV_B: returns}


def send_after_compute(facts: Facts) -> Fault | None:
    """A send follows the compute action whose result it sends."""
    ways = list[tuple[Nodes, TextOf]]()
    for kind, made in ((Kind.SEND_F, facts.node_of[Kind.FORWARD.code]), (Kind.SEND_B, facts.input_gradients)):
        sent = facts.node_of[kind.code]
        early = sent[(sent >= 0) & (made > sent)]
        ways.append((early, lambda a, _: f"{a} precedes {facts.needs(a)[0]}, whose result it sends"))
    return fault_at(facts, *ways)


def receive_before_compute(facts: Facts) -> Fault | None:
    """A receive precedes the compute action that uses it."""
    ways = list[tuple[Nodes, TextOf]]()
    for kind, user in ((Kind.RECV_F, facts.node_of[Kind.FORWARD.code]), (Kind.RECV_B, facts.input_gradients)):
        taken = facts.node_of[kind.code]
        late = taken[(taken >= 0) & (user < taken)]
        ways.append((late, lambda a, _: f"{a} follows {_user_of(facts, a)}, which uses it"))
    return fault_at(facts, *ways)


def _user_of(facts: Facts, action: Action) -> Action:
    """The action that uses what a receive takes, or what a move brings back."""
    _, stage, microbatch, part = action
    again = facts.node_of[Kind.RECOMPUTE.code, stage, microbatch, part]
    if action.kind is Kind.RECV_F:
        return action._replace(kind=Kind.FORWARD)
    is_again = action.kind in MOVE_KINDS and again >= 0
    return facts.action(int(again if is_again else facts.input_gradients[stage, microbatch, part]))


def sends_match_receives(facts: Facts) -> Fault | None:
    """On each directed edge between two ranks, tensors are received in the order in which they are sent."""
    # Messages of one edge have no names on the wire: the nth receive gets what the nth send sent.
    numbers = kernel(order.number_on_lanes, len(facts.lane))(facts.lane, len(facts.lanes))
    wrong = list[Nodes]()
    for kind in SEND_KINDS:
        sent, taken = facts.node_of[kind.code], facts.node_of[kind.partner.code]
        sent, taken = (sent[:-1], taken[1:]) if kind is Kind.SEND_F else (sent[1:], taken[:-1])
        crosses = facts.crosses[:-1]
        wrong.append(taken[crosses][numbers[sent[crosses]] != numbers[taken[crosses]]])
    for kind in TIED_SEND_KINDS & facts.tied_nodes.keys():
        sent, taken = (np.array(facts.tied_nodes[one]) for one in (kind, kind.partner))
        wrong.append(taken[numbers[sent] != numbers[taken]])

    def text_of(action: Action, node: int) -> str:
        rank, lane = facts.lanes[facts.lane[node]]
        sends = facts.lanes.index((lane.peer, Lane("send", rank)))
        sent = int(np.flatnonzero(facts.lane == sends)[numbers[node]])
        return f"{action} takes what rank {lane.peer} sends as {facts.action(sent)} at that point"

    return fault_at(facts, (np.concatenate(wrong), text_of))


def swaps_in_turn(facts: Facts) -> Fault | None:
    """What is evicted is loaded again: once, after its forward, and before the backward that needs it."""
    if not facts.has(*MOVE_KINDS):
        return None
    made, again = facts.node_of[Kind.FORWARD.code], facts.node_of[Kind.RECOMPUTE.code]
    user = np.where(again >= 0, again, facts.input_gradients)
    is_frozen = (np.arange(facts.shape[0]) < facts.first_backward_stage)[:, None, None]
    is_offloaded = facts.node_of[Kind.OFFLOAD.code] >= 0
    ways = list[tuple[Nodes, TextOf]]()
    for kind, load in LOAD_OF.items():
        out, back = facts.node_of[kind.code], facts.node_of[load.code]
        has_both = (out >= 0) & (back >= 0)
        for node in (out, back):
            ways.append((node[(node >= 0) & ~has_both], _alone_text))
            ways.append((node[has_both & is_frozen], lambda action, _: f"{action} keeps what no backward needs"))
        # Counted once, at the eviction.
        has_rival = has_both & ~is_frozen & is_offloaded & (kind is Kind.EVICT)
        is_outside = has_both & ~is_frozen & ~has_rival & ~((made < out) & (out < back))
        is_late = has_both & ~is_frozen & (user < back)
        ways += [(out[has_rival], _rival_text), (out[is_outside], _outside_text)]
        ways.append((back[is_late], lambda a, _: f"{a} follows {_user_of(facts, a)}, which needs it"))
    return fault_at(facts, *ways)


def _alone_text(action: Action, _: int) -> str:
    return f"{action} has no partner: {action._replace(kind=action.kind.partner)} is missing"


def _rival_text(action: Action, _: int) -> str:
    rival = action._replace(kind=Kind.OFFLOAD)
    return f"{action} and {rival} are both there: it goes to the partner or to the host"


def _outside_text(action: Action, _: int) -> str:
    made, back = (action._replace(kind=kind) for kind in (Kind.FORWARD, action.kind.partner))
    return f"{action} is not between {made} and {back}"


def evicts_to_another(facts: Facts) -> Fault | None:
    """Where partners are named, a rank that evicts has another one."""
    partners = facts.promises.partners
    if partners is None:
        return None
    is_alone = np.array(partners) == np.arange(len(partners))
    evicts = facts.where(Kind.EVICT)
    return fault_at(
        facts,
        (
            evicts[is_alone[facts.ranks[evicts]]],
            lambda action, node: f"{action} has nowhere to go: rank {facts.ranks[node]} has no partner",
        ),
    )


def tied_messages_complete(facts: Facts) -> Fault | None:
    """If a tied matrix is sent at all, its weights go from the first stage to the last and its gradient back, each
    once; the gradient not at all if the matrix is frozen, and neither if both stages are on one rank.
    """
    if not facts.tied_nodes:
        return None
    is_frozen = facts.first_backward_stage > 0
    seen, wrong = set[Action](), dict[int, str]()
    for node in facts.where(*TIED_KINDS).tolist():
        action = facts.action(node)
        wanted = tied_action(action.kind, facts.shape[0])
        if facts.owner[0] == facts.owner[-1]:
            wrong[node] = f"{action} moves a matrix that does not change rank"
        elif action != wanted:
            wrong[node] = f"{action} must name stage {wanted.stage}"
        elif action in seen:
            wrong[node] = f"{action} appears a second time"
        elif action.kind in _OF_GRADIENT and is_frozen:
            wrong[node] = f"{action} is superfluous: stage 0 runs no backward"
        seen.add(action)
    expected = [tied_action(kind, facts.shape[0]) for kind in sorted(TIED_KINDS)]
    has_gradient = any(one.kind in _OF_GRADIENT for one in seen)
    missing = [one for one in expected if one not in seen and (one.kind not in _OF_GRADIENT or has_gradient)]
    fault = fault_at(facts, (np.array([*wrong]), lambda _, node: wrong[node]))
    return with_missing(facts, fault, missing)


_OF_GRADIENT = (Kind.SEND_TIED_GRAD, Kind.RECV_TIED_GRAD)


def tied_weights_in_time(facts: Facts) -> Fault | None:
    """A tied matrix is sent while its stage is gathered, and received before the head's first forward."""
    if not facts.tied_nodes:
        return None
    sent, taken = facts.where(Kind.SEND_TIED), facts.where(Kind.RECV_TIED)
    changes, gathers = facts.nodes(0, Kind.UNSHARD, Kind.RESHARD), facts.nodes(0, Kind.UNSHARD)
    before = np.searchsorted(changes, sent) - 1
    is_sharded = (before < 0) | ~np.isin(changes[before], gathers) if len(gathers) else np.zeros(len(sent), np.bool_)
    first = facts.nodes(facts.shape[0] - 1, Kind.FORWARD)[0]
    return fault_at(
        facts,
        (sent[is_sharded], lambda action, _: f"{action} sends weights of stage 0 while they are sharded"),
        (taken[first < taken], lambda action, _: f"{action} follows {facts.action(first)}, which uses it"),
    )


def tied_gradient_in_time(facts: Facts) -> Fault | None:
    """A head's gradient is sent when it is complete, and received before the last reduction of the first stage's."""
    if not facts.tied_nodes:
        return None
    sent, taken = facts.where(Kind.SEND_TIED_GRAD), facts.where(Kind.RECV_TIED_GRAD)
    last_added = max(facts.nodes(facts.shape[0] - 1, *ADDS_TO_GRADIENT).tolist(), default=-1)
    last_reduced = max(facts.nodes(0, Kind.REDUCE_GRAD).tolist(), default=len(facts.ranks))
    return fault_at(
        facts,
        (
            sent[last_added > sent],
            lambda action, _: f"{action} precedes {facts.action(last_added)}, which adds to it",
        ),
        (
            taken[last_reduced < taken],
            lambda action, _: f"{action} follows the last {facts.action(last_reduced)}, which has to reduce it",
        ),
    )
