"""The order of Megatron-LM's pipeline schedules, to find out whether it runs that of a schedule."""

from collections.abc import Iterator, Sequence

from pipeloom.schedule import Action, Kind
from pipeloom.terminal.words import count


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


def group_problems(pp: int, num_microbatches: int, group_size: int) -> list[str]:
    """Why Megatron-LM would refuse a group size, by its two rules."""
    found: list[str] = []
    if num_microbatches < pp:
        found.append(
            f"layout.num_microbatches {num_microbatches} is below layout.pp {pp}, but Megatron-LM's interleaved "
            "schedule needs groups of at least layout.pp"
        )
    left = num_microbatches % group_size
    if 0 < left < pp <= num_microbatches:
        found.append(
            f"layout.num_microbatches {num_microbatches} in groups of {group_size} leaves {left}, but Megatron-LM's "
            f"last group needs at least layout.pp {pp}; use a multiple of {group_size}, or schedule.family hybrid with "
            f"another group_size than {count(group_size, 'micro-batch')}"
        )
    return found
