"""Orders from which families are built."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from pipeloom.schedule import Action, Kind, Row


def in_turn(forwards: Row, backwards: Row, num_warmup: int) -> Row:
    """Some forwards, then forward and backward in turn, then the rest of the backwards."""
    rest = forwards[num_warmup:]
    return forwards[:num_warmup] + rest.alternate(backwards[: len(rest)]) + backwards[len(rest) :]


def numbered(steps: Iterable[tuple[Kind, int]]) -> Row:
    """Actions by kind and stage, for which each stage takes its micro-batches in ascending order.

    A gradient of weights belongs to the oldest gradient of the input of its stage that waits for it.
    """
    forwards: dict[int, int] = defaultdict(int)
    backwards: dict[int, int] = defaultdict(int)
    waiting: dict[int, deque[int]] = defaultdict(deque)
    actions: list[Action] = []
    for kind, stage in steps:
        if kind is Kind.BACKWARD_WEIGHT:
            actions.append(Action(kind, stage, waiting[stage].popleft()))
            continue
        counts = forwards if kind is Kind.FORWARD else backwards
        if kind is Kind.BACKWARD_INPUT:
            waiting[stage].append(counts[stage])
        actions.append(Action(kind, stage, counts[stage]))
        counts[stage] += 1
    return Row.of(actions)


def up_to(rows: Sequence[Row], num_microbatches: int) -> list[Row]:
    """A schedule for more micro-batches without those that are too many, which is a schedule, too."""
    return [row.take(row.microbatch < num_microbatches) for row in rows]
