"""Pieces -> stages: cut a list of costs into contiguous stages, the slowest as fast as possible."""

from collections.abc import Sequence
from itertools import accumulate

from pipeloom.errors import UserError


def balanced_partition(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut the pieces into ``num_stages`` runs of at least one piece.

    The largest cost of a stage is as small as can be; among such cuts the sum of the squared costs is,
    so that the rest is even too. Dynamic programming over (stages, pieces), exact.

    Args:
        costs: of each piece, in order.
        num_stages: at most the number of pieces.

    Returns:
        Number of pieces of each stage.

    Raises:
        UserError: more stages than pieces.
    """
    if not 1 <= num_stages <= len(costs):
        raise UserError(f"cannot cut {len(costs)} pieces into {num_stages} stages of at least one piece each")
    total = [0.0, *accumulate(costs)]
    # best[n] = (largest stage, sum of squares, cuts) for the first n pieces in the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        left = num_stages - 1 - stage
        best = {
            end: min(
                (max(largest, cost), squares + cost * cost, (*sizes, end - begin))
                for begin, (largest, squares, sizes) in best.items()
                if begin < end
                for cost in [total[end] - total[begin]]
            )
            for end in range(stage + 1, len(costs) - left + 1)
        }
    return best[len(costs)][2]
