"""What a rule returns: the first place where it is broken, what is wrong there, and how often it is broken."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule.action import Action
from pipeloom.schedule.facts import Facts

Nodes = NDArray[np.signedinteger[Any]]
TextOf = Callable[[Action, int], str]
"""What is wrong with an action, which is at a node."""


class Fault(NamedTuple):
    """Where a rule is broken first.

    Attributes:
        message: what is wrong there.
        rank: of the row, if one row is to blame.
        slot: place in the row, if one action is to blame.
        count: how often the rule is broken.
    """

    message: str
    rank: int | None = None
    slot: int | None = None
    count: int = 1


Rule = Callable[[Facts], Fault | None]
"""Takes rows that obey the rules before it in the list; returns ``None`` if they obey this one, too."""


def first_of(messages: list[str]) -> Fault | None:
    """A fault of the whole schedule."""
    return Fault(messages[0], count=len(messages)) if messages else None


def fault_at(facts: Facts, *ways: tuple[Nodes, TextOf]) -> Fault | None:
    """The fault at the first place where a rule is broken.

    Args:
        facts: whose rule it is.
        ways: in which it may be broken: the nodes where it is, in any order, and what is wrong there. Where one node
            breaks it in several ways, the first of them is reported.
    """
    found = [(int(nodes.min()), text_of) for nodes, text_of in ways if len(nodes)]
    if not found:
        return None
    node, text_of = min(found, key=lambda way: way[0])
    return Fault(text_of(facts.action(node), node), *facts.place(node), sum(len(nodes) for nodes, _ in ways))


def with_missing(facts: Facts, fault: Fault | None, missing: Sequence[Action]) -> Fault | None:
    """A fault where rows have too much, else where they lack an action; counted together."""
    if fault is None and missing:
        fault = Fault(f"{missing[0]} is missing", int(facts.owner[missing[0].stage]), count=0)
    return fault and fault._replace(count=fault.count + len(missing))
