"""Placement of parameters in equal shards of a flat buffer, where some must not be cut."""

from collections.abc import Sequence
from heapq import heapreplace


def pack(sizes: Sequence[int], before: int, num_shards: int) -> tuple[int, list[int]]:
    """Place parameters in shards, none of them in two.

    The largest first, each in the emptiest shard (Graham 1969).

    Args:
        sizes: elements of each parameter.
        before: elements at the begin of the buffer, which may be cut anywhere.
        num_shards: number of equal shards.

    Returns:
        Elements of a shard, and where each parameter begins.
    """
    share = -(-(before + sum(sizes)) // num_shards)
    while True:
        used = [min(share, max(0, before - share * shard)) for shard in range(num_shards)]
        begins = [0] * len(sizes)
        emptiest = sorted((size, shard) for shard, size in enumerate(used))
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            size, shard = emptiest[0]
            begins[index] = share * shard + size
            used[shard] = size + sizes[index]
            heapreplace(emptiest, (used[shard], shard))
        if max(used) <= share:
            return share, begins
        share = max(used)
