"""The schedules that a question's layouts may have, and what each holds in closed form."""

from dataclasses import replace
from functools import lru_cache
from math import ceil

import numpy as np

from pipeloom.families import FAMILIES, Choice
from pipeloom.planner.work import Floats, InFlight

GROUP_FACTORS = (1.25, 2, 4, 8, 16)
"""Group sizes of the hybrid, as multiples of the pipeline ranks; the number of micro-batches is searched, too."""


@lru_cache(maxsize=65536)
def schedules_of(
    families: tuple[str, ...], pp: int, loops: int, placement: str, num_microbatches: int
) -> tuple[Choice, ...]:
    """Distinct schedules of a placement; unless it is looped, only those with closed forms of their stage inputs."""
    found: list[Choice] = []
    for name in families:
        family = FAMILIES[name]
        if (loops > 1 and not family.is_looped) or family.loops not in (None, loops):
            continue
        if family.placement not in (None, placement):
            continue
        plain = Choice(
            family=name,
            pp=pp,
            loops=loops,
            num_microbatches=num_microbatches,
            placement=None if placement == "looped" else placement,
        )
        if family.is_grouped:
            sizes = _group_sizes(pp, num_microbatches) if loops > 1 and placement == "looped" else ()
            found += [replace(plain, group_size=size) for size in sizes]
        elif placement in ("looped", family.placement) or plain.stage_inputs is not None:
            found.append(plain)
    found = _different(found)
    if pp * loops == 1 and all(choice.stage_inputs is not None for choice in found):
        # One stage takes as long in any order, so only the one that holds least is kept.
        return tuple(sorted(found, key=lambda choice: sum(map(sum, choice.stage_inputs or ())))[:1])
    return tuple(found)


def _different(choices: list[Choice]) -> list[Choice]:
    """Choices without those that have the same schedule as another family's."""
    names, found = {choice.family for choice in choices}, list[Choice]()
    for choice in choices:
        name = choice.same_as
        if name == choice.family or name not in names:
            found.append(choice)
            names.add(name)
    return found


def _group_sizes(pp: int, num_microbatches: int) -> tuple[int, ...]:
    """Group sizes above that of depth-first, up to all micro-batches."""
    sizes = {ceil(pp * factor) for factor in GROUP_FACTORS} | {num_microbatches}
    return tuple(sorted(size for size in sizes if pp < size <= num_microbatches))


@lru_cache(maxsize=65536)
def inputs_of(choice: Choice) -> Floats | None:
    """[rank, number of its stage] stage inputs at a rank's peak; ``None`` without a closed form."""
    held = choice.stage_inputs
    return None if held is None else np.array(held, np.float64)


@lru_cache(maxsize=4096)
def in_flight_of(choices: tuple[Choice, ...]) -> InFlight:
    """What schedules of the same stages hold at their peaks."""
    found, ones = [inputs_of(choice) for choice in choices], np.ones((choices[0].pp, choices[0].loops))
    inputs = np.array([ones if own is None else own for own in found])
    order = np.argsort(-inputs, axis=2, kind="stable")
    descending = np.maximum(np.take_along_axis(inputs, order, axis=2), 1e-9)
    return InFlight(inputs, np.array([own is not None for own in found]), order, descending)
