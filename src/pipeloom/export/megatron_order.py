"""The order of Megatron-LM's pipeline schedules, to find out whether it runs that of a schedule."""

from collections.abc import Iterator, Sequence

from pipeloom.schedule import Action, Kind


def order_of_rank(rank: int, pp: int, loops: int, num_microbatches: int, group_size: int) -> Iterator[Action]:
    """Megatron-LM's actions of a pipeline rank, in order (core 0.16, ``pipeline_parallel/schedules.py``).

    Groups of N = ``group_size`` micro-batches, the last one smaller, go through all V stages of the rank. Rank r warms
    up with P - r - 1 forwards if V = 1, else with 2 (P - r - 1) + (V - 1) N.
    """
    groups = [
        range(begin, min(begin + group_size, num_microbatches)) for begin in range(0, num_microbatches, group_size)
    ]
    local = [loop * pp + rank for loop in range(loops)]
    forwards = [Action(Kind.FORWARD, stage, m) for group in groups for stage in local for m in group]
    backwards = [Action(Kind.BACKWARD, stage, m) for group in groups for stage in reversed(local) for m in group]
    to_end = pp - rank - 1
    # As in get_pp_rank_microbatches of Megatron-LM's schedules.py.
    num_warmup = min(to_end if loops == 1 else 2 * to_end + (loops - 1) * group_size, len(forwards))
    yield from forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - num_warmup :]


def is_megatrons(rows: Sequence[Sequence[Action]], loops: int, num_microbatches: int, group_size: int) -> bool:
    """Whether rows are in Megatron-LM's order."""
    return all(
        list(row) == list(order_of_rank(rank, len(rows), loops, num_microbatches, group_size))
        for rank, row in enumerate(rows)
    )
