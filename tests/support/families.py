"""Sizes in which a family makes schedules."""

import hypothesis.strategies as st

from pipeloom.families import FAMILIES
from pipeloom.schedule import PLACEMENTS

TRAINING = [name for name, family in FAMILIES.items() if family.has_backward]
"""Every family that trains."""
SOME = ("1f1b", "depth-first", "breadth-first", "zb-h1", "zb-v")
"""One of each kind, for what does not look at the order: with and without loops, whole and split backwards, on a V."""


def fitting(name, loops=1, placement=None):
    """Loops and placement as wanted where the family takes them, otherwise its own."""
    chosen = FAMILIES[name]
    if not chosen.is_looped:
        loops = 1
    return {"loops": chosen.loops or loops, "placement": chosen.placement or placement}


@st.composite
def named_sizes(draw, most_loops=3, names=None):
    """A family by name, with loops and a placement that it takes; none that searches for its rows, which takes long."""
    name = draw(st.sampled_from(sorted(name for name in names or FAMILIES if not FAMILIES[name].is_found)))
    return name, fitting(name, draw(st.integers(1, most_loops)), draw(st.sampled_from(sorted(PLACEMENTS))))
