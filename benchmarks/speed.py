"""Actions a second of each verb on a schedule: ``make speed``.

On one core, with the loops compiled beforehand. An action of the table is one of the lowered schedule, its
communication included, for every verb.
"""

import time
from typing import NamedTuple

import pytest

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.summary import communication, summarize
from pipeloom.cost.costs import Costs
from pipeloom.families import Choice
from pipeloom.passes import add_reduce_grad, add_unshard, lower
from pipeloom.schedule import Schedule
from pipeloom.simulation import simulate
from pipeloom.trace import Trace

COSTS = Costs(1.0, 2.0, 0.25, 0.5, 1.5)
SIZES = {
    "4 ranks x 4 loops x 64": {"pp": 4, "loops": 4, "num_microbatches": 64},
    "64 ranks x 2 loops x 512": {"pp": 64, "loops": 2, "num_microbatches": 512},
    "64 ranks x 16 loops x 512": {"pp": 64, "loops": 16, "num_microbatches": 512},
}
FAMILIES = ("breadth-first", "depth-first")


class Case(NamedTuple):
    """A schedule at every level, and its trace."""

    choice: Choice
    made: Schedule
    lowered: Schedule
    trace: Trace


VERBS = {
    "make and verify": lambda case: case.choice.make(),
    "lower and verify": lambda case: lower(case.made),
    "simulate": lambda case: simulate(case.lowered, COSTS),
    "price: all of these": lambda case: simulate(lower(case.choice.make()), COSTS).end_s,
    "shard, reduce and verify": lambda case: add_reduce_grad(add_unshard(case.lowered, 2, 1)),
    "account and report": lambda case: (
        summarize(case.trace),
        account_bubble(case.lowered, case.trace),
        communication(case.trace),
    ),
}


@pytest.fixture(scope="module")
def cases():
    """Cases by family and size, made before any clock runs."""
    found = {}
    for family in FAMILIES:
        for name, sizes in SIZES.items():
            choice = Choice(family=family, **sizes)
            made = choice.make()
            lowered = lower(made)
            found[family, name] = Case(choice, made, lowered, simulate(lowered, COSTS))
    return found


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.timeout(300)
def test_speed(benchmark, cases, family, name, verb):
    """Time a verb on a schedule that remembers nothing."""
    case, act = cases[family, name], VERBS[verb]

    def forgetful():
        return (case._replace(made=fresh(case.made), lowered=fresh(case.lowered)),), {}

    act(*forgetful()[0])  # compile
    begin = time.perf_counter()
    act(*forgetful()[0])
    rounds = max(3, min(50, int(1.5 / (time.perf_counter() - begin))))
    benchmark.pedantic(act, setup=forgetful, rounds=rounds, iterations=1)
    benchmark.extra_info.update(family=family, size=name, verb=verb, num_actions=case.lowered.num_actions)


def fresh(schedule: Schedule) -> Schedule:
    """The schedule without what it remembers."""
    kept = object.__new__(Schedule)
    for field in Schedule.__dataclass_fields__:
        object.__setattr__(kept, field, getattr(schedule, field))
    return kept
