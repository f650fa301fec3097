"""The order of Megatron-LM's pipeline schedules, to compare with: what it can run, and what only resembles it."""

from collections.abc import Iterator, Sequence

from pipeloom.schedule import Action, Kind
from pipeloom.terminal.words import count


def order_of_rank(rank: int, pp: int, loops: int, num_microbatches: int, group_size: int) -> Iterator[Action]:
    """What Megatron-LM does on a pipeline rank, in order (core 0.16, ``pipeline_parallel/schedules.py``).

    Groups of ``group_size`` micro-batches, the last one of what is left, go through all local stages. A rank begins
    with P - r - 1 forwards without loops, and else with 2 (P - r - 1) + (V - 1) N of them.
    """
    groups = [
        range(begin, min(begin + group_size, num_microbatches)) for begin in range(0, num_microbatches, group_size)
    ]
    local = [loop * pp + rank for loop in range(loops)]
    forwards = [Action(Kind.FORWARD, stage, m) for group in groups for stage in local for m in group]
    backwards = [Action(Kind.BACKWARD, stage, m) for group in groups for stage in reversed(local) for m in group]
    to_end = pp - rank - 1
    # As get_pp_rank_microbatches in Megatron-LM's schedules.py counts them.
    num_warmup = min(to_end if loops == 1 else 2 * to_end + (loops - 1) * group_size, len(forwards))
    yield from forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - num_warmup :]


def is_megatrons(rows: Sequence[Sequence[Action]], loops: int, num_microbatches: int, group_size: int) -> bool:
    """Whether rows are what Megatron-LM does."""
    return all(
        list(row) == list(order_of_rank(rank, len(rows), loops, num_microbatches, group_size))
        for rank, row in enumerate(rows)
    )


def group_problems(pp: int, num_microbatches: int, group_size: int) -> list[str]:
    """Why Megatron-LM would refuse a group size: its own two rules."""
    found: list[str] = []
    if num_microbatches < pp:
        found.append(
            f"layout.num_microbatches {num_microbatches} is below layout.pp {pp}, and Megatron-LM's looped schedules "
            "take groups of at least that many"
        )
    left = num_microbatches % group_size
    if 0 < left < pp <= num_microbatches:
        found.append(
            f"layout.num_microbatches {num_microbatches} in groups of {group_size} leaves {left}: Megatron-LM takes "
            f"what is left as a group only where it is at least layout.pp {pp}; use a multiple of {group_size}, or "
            f"schedule.family hybrid with another group_size than {count(group_size, 'micro-batch')}"
        )
    return found
