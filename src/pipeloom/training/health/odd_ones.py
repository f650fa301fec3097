"""Which of several ranks that should have the same value have another one."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

Group = tuple[int, ...]
"""Ranks that make one value together, such as those of a tensor-parallel group."""


class Odd(NamedTuple):
    """Groups with a wrong value.

    Attributes:
        groups: the wrong ones; or, where no majority decides, those of which some are.
        is_decided: whether more than half of all groups have one value.
    """

    groups: tuple[Group, ...]
    is_decided: bool


def odd_ones(values: Mapping[Group, Hashable]) -> Odd | None:
    """The groups whose value is not that of the majority; ``None`` if all values are equal."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    ((most, number),) = counts.most_common(1)
    is_decided = 2 * number > len(values)
    return Odd(tuple(one for one, value in values.items() if not is_decided or value != most), is_decided)


def with_owners(odd: Odd, values: Mapping[Group, Hashable], replicas: Sequence[Sequence[Group]], owner: int) -> Odd:
    """Name the rank that has the weights, where all that computed with its copy have the same odd value.

    Args:
        odd: of ``values``.
        values: of all groups.
        replicas: the groups that computed with the same copy of the weights, in the order of the pipeline.
        owner: index of the one that has it.
    """
    found: list[Group] = []
    for groups in replicas:
        own = [one for one in groups if one in odd.groups]
        shares = len(groups) > 1 and len(own) == len(groups) and len({values[one] for one in groups}) == 1
        found += [groups[owner]] if shares else own
    return Odd(tuple(found), odd.is_decided)
