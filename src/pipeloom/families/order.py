"""Orders from which families are built."""

from collections.abc import Sequence

import numpy as np

from pipeloom.schedule import Kind, Row


def in_turn(forwards: Row, backwards: Row, num_warmup: int) -> Row:
    """Some forwards, then forward and backward in turn, then the rest of the backwards."""
    rest = forwards[num_warmup:]
    return forwards[:num_warmup] + rest.alternate(backwards[: len(rest)]) + backwards[len(rest) :]


def numbered(steps: Sequence[tuple[Kind, int]]) -> Row:
    """Actions by kind and stage, for which each stage takes its micro-batches in ascending order.

    A gradient of weights belongs to the oldest gradient of the input of its stage that waits for it.
    """
    number = {step: n for n, step in enumerate(dict.fromkeys(steps))}
    which = np.array([number[step] for step in steps])
    kind = np.array([kind.code for kind, _ in number], np.int32)[which]
    stage = np.array([stage for _, stage in number], np.int32)[which]
    microbatch = np.zeros_like(kind)
    for own in {stage for _, stage in number}:
        for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT)):
            places = np.flatnonzero((stage == own) & np.isin(kind, [one.code for one in kinds]))
            microbatch[places] = np.arange(len(places))
        inputs, weights = (
            np.flatnonzero((stage == own) & (kind == one.code)) for one in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        # The n-th of one is for the micro-batch of the n-th of the other: oldest first.
        microbatch[weights] = microbatch[inputs]
    return Row(kind, stage, microbatch, np.zeros_like(kind))


def up_to(rows: Sequence[Row], num_microbatches: int) -> list[Row]:
    """A schedule for more micro-batches without those that are too many, which is a schedule, too."""
    # Leaving whole micro-batches out keeps every order between the others, so no new deadlock can come of it.
    return [row.take(row.microbatch < num_microbatches) for row in rows]
