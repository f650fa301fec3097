"""Times token slices: those of a schedule, and slices of a few lengths and contexts with a fit through them.

The planner's dynamic program chooses slice lengths from the fit (``training/slices.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.slices import moved
from pipeloom.execute.communication.boundary import TokenSlices
from pipeloom.execute.stages.stage import Portion, Stage
from pipeloom.measure.rehearsal import Rehearsal, Times
from pipeloom.measure.stages import Profile, timed
from pipeloom.measure.stopwatch import median_seconds
from pipeloom.model import KeyValueCache, Transformer

_REPEATS = 5


def profile_slices(rehearsal: Rehearsal) -> dict[int, list[Times]] | None:
    """Time every slice of one micro-batch in every stage, one tensor-parallel group after the other. Collective.

    The halves of split backwards are timed separately.

    Args:
        rehearsal: of slices.

    Returns:
        On rank 0, by stage of the first pipeline, the times of each slice; ``None`` elsewhere.
    """
    own = {index: rehearsal.in_turns(partial(_time, rehearsal, stage)) for index, stage in rehearsal.visits()}
    every: list[dict[int, list[Times]]] | None = rehearsal.world.gather(own)
    return None if every is None else {i: t for rank in rehearsal.layout.pipelines()[0] for i, t in every[rank].items()}


def _time(rehearsal: Rehearsal, stage: Stage) -> list[Times]:
    """Medians over a few micro-batches: all forwards, then all backwards."""
    runs = {number: rehearsal.run_of(stage, number) for number in range(len(rehearsal.tokens))}
    clock, times = rehearsal.clock, list[list[Times]]()
    for _ in range(_REPEATS + 1):
        forward_s: list[float] = []
        for number, run in runs.items():
            begin = clock()
            run.forward(Portion(0, number))
            forward_s.append(clock() - begin)
        # In reverse: earlier slices get gradients of their keys and values from later ones.
        backward_s = [run.backward(Portion(0, number), clock) for number, run in reversed(runs.items())]
        times.append([Times(one, *both) for one, both in zip(forward_s, reversed(backward_s), strict=True)])
    # Without the first micro-batch, which allocates memory and warms caches.
    return [Times.medians(of_slice) for of_slice in zip(*times[1:], strict=True)]


def with_slices(profile: Profile, times: Mapping[int, Sequence[Times]], slices: TokenSlices) -> Profile:
    """The profile with costs of slices.

    Args:
        profile: of whole micro-batches; messages and moves of a slice take their share of its seconds.
        times: by stage, of each slice.
        slices: lengths of the slices.
    """
    whole, stages = profile.costs, sorted(times)
    parts: list[StageCosts] = []
    for number, length in enumerate(slices.lengths):
        share = length / slices.num_tokens
        part = replace(moved(whole, whole, share), transfer_s=whole.transfer_s * share)
        parts.append(timed(part, [times[stage][number] for stage in stages]))
    return replace(profile, slices=tuple(parts))


Point = tuple[int, int, float]
"""Tokens of a slice, tokens before it, seconds of its forward and backward."""


class Latency(NamedTuple):
    """Seconds of a slice of l tokens after c others: ``fixed + token l + pair l (c + l / 2)``; no term is negative."""

    fixed_s: float
    token_s: float
    pair_s: float

    def __call__(self, length: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of slices of ``length`` tokens after ``before`` tokens."""
        return self.fixed_s + self.token_s * length + self.pair_s * length * (before + length / 2)


def fitted(points: list[Point]) -> Latency:
    """Non-negative least-squares fit of the latency to measured points, in relative errors."""
    length, before, seconds = np.array(points, np.float64).T
    columns = np.stack([np.ones_like(length), length, length * (before + length / 2)], axis=1) / seconds[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(columns[:, used], np.ones_like(seconds), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    values = np.zeros(3)
    values[used] = found
    return Latency(*values.tolist())


def measured(stage: Transformer, make: Callable[[int], Tensor], num_tokens: int) -> list[Point]:
    """Time forward and backward of slices of a few lengths, at the beginning and the end of sequences.

    Runs on this rank alone, without tensor parallelism.

    Args:
        stage: on its device, with a borrowed matrix if it needs one.
        make: makes a stage input of so many tokens.
        num_tokens: of a sequence.
    """
    lengths = sorted({max(1, num_tokens // share) for share in (1, 2, 4, 8)})
    places = [(length, before) for length in lengths for before in sorted({0, num_tokens - length})]
    return [(length, before, _seconds(stage, num_tokens, make(before), make(length))) for length, before in places]


def _seconds(stage: Transformer, room: int, context: Tensor, tensor: Tensor) -> float:
    """Median seconds of a slice after a context, whose untimed forward precedes each run."""
    caches: list[KeyValueCache] = []

    def prepare() -> None:
        caches[:] = [KeyValueCache(room)]
        with torch.no_grad():
            if context.shape[1]:
                stage(context, caches[0])

    def once() -> None:
        output = stage(tensor, caches[0])
        output.backward(torch.ones_like(output))

    return median_seconds(once, _REPEATS, tensor.device, prepare)
