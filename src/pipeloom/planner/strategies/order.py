"""The strategy ``order``: an order of compute actions that is searched for the layout's own seconds.

Which family is fastest depends on the network: on a slow one ranks wait for messages that the order of every family
sends too late. The search takes seconds for a layout, so it is made on request, for the few layouts with the lowest
bound of all orders.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipeloom.errors import UserError
from pipeloom.planner.candidate import Candidate, knobs_of
from pipeloom.planner.question import ORDER_TRIES
from pipeloom.planner.space import Leaf
from pipeloom.planner.strategies.strategy import STRATEGIES, SearchState, Strategy, one_rank_limit
from pipeloom.predict.orders import find_order, order_work
from pipeloom.predict.step import lowered

MOST_ACTIONS = 4_000
"""Forwards and backwards of a step; a change of a longer schedule takes too long to simulate."""


def _small(state: SearchState) -> Iterator[Leaf]:
    """For each placement of stages and sharding one leaf, which represents all orders."""
    for arrangement in state.arrangements:
        run = arrangement.run
        is_plain = not arrangement.splits and arrangement.recomputed != "some" and not run.frozen_pieces
        if arrangement.placed.placement.num_ranks == 1 or not is_plain or arrangement.time.busy_s > state.fastest_s:
            continue
        question = arrangement.question
        if question.may_count_batch and (question.balance == "batch" or run.divides_microbatches):
            continue
        for cut in arrangement.cuts:
            leaves = list(cut.leaves())
            if leaves[0].choice.num_actions <= MOST_ACTIONS:
                yield from (leaf for leaf in leaves if leaf.choice == leaves[0].choice)


def _estimate_s(leaf: Leaf) -> float:
    """Lower bound of all orders, whatever the memory."""
    candidate = _candidate(leaf)
    unlimited = (float("inf"),) * leaf.cut.placed.placement.num_ranks
    try:
        work = order_work(candidate.placed, candidate.knobs, unlimited)
    except UserError:
        return float("inf")
    least_s = work.least_s(lowered(candidate.run, candidate.software, candidate.knobs))
    return max(least_s, leaf.twig.bound_s)


def _candidate(leaf: Leaf) -> Candidate:
    """The leaf with the least sharding and the largest buffers."""
    placed = leaf.placed(leaf.sharding.levels[0])
    return Candidate(placed, knobs_of(leaf.choice, placed.run)[0], leaf)


def _build(leaf: Leaf) -> Candidate | None:
    """The candidate with the order that is found; ``None`` if none fits with any sharding."""
    tries = leaf.cut.arrangement.question.order_tries or ORDER_TRIES
    for level in leaf.sharding.levels:
        placed = leaf.placed(level)
        for knobs in knobs_of(leaf.choice, placed.run):
            candidate = Candidate(placed, knobs, leaf)
            try:
                found = find_order(candidate.placed, knobs, candidate.activation_room, tries)
            except UserError:  # no order fits
                continue
            candidate = replace(candidate, knobs=replace(knobs, found=found.schedule))
            if candidate.has_room_for(candidate.simulate().prediction):
                return candidate
    return None


STRATEGIES.add(
    "order",
    Strategy(
        summary="search an order for the seconds of the layout (on request)",
        without="the order of a family",
        applies=_small,
        estimate=_estimate_s,
        build=_build,
        is_in=lambda step: step.knobs.found is not None,
        limit=one_rank_limit,
        takes_frozen=False,
    ),
)
