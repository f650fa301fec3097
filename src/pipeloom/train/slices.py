"""Token slices that suit this machine: measured at a few lengths and contexts, chosen by the dynamic programme."""

from dataclasses import replace
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from pipeloom.config import RunConfig
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.slices import SliceCosts
from pipeloom.execute.timing import now
from pipeloom.execute.world import World
from pipeloom.families import Choice
from pipeloom.model import KeyValueCache, Transformer, stage_pieces
from pipeloom.passes import lower
from pipeloom.planner.slice_lengths import LatencyTable, default_unit, judged_slices
from pipeloom.simulate import simulate
from pipeloom.train.stages import stage_of

_REPEATS = 5
_MOST_UNITS = 64
Point = tuple[int, int, float]
"""Tokens of a slice, tokens before it, seconds of its forward and backward."""


def with_known_slices(config: RunConfig, world: World) -> RunConfig:
    """The configuration with lengths in place of ``auto``, the same on every rank. Every rank calls it.

    The others wait while rank 0 measures and chooses, as long as communication may take (``World.timeout``).

    Args:
        config: resolved.
        world: this process among the others.
    """
    if config.layout.token_slices != "auto":
        return config
    room = config.data.seq_len
    own = list(_chosen(config, world.device)) if world.rank == 0 else []
    lengths = world.sum([float(length) for length in own] + [0.0] * (room - len(own)))
    known = tuple(int(length) for length in lengths if length)
    return replace(config, layout=replace(config.layout, token_slices=known))


def _chosen(config: RunConfig, device: torch.device) -> tuple[int, ...]:
    """The lengths with which this rank's schedule would be fastest if all stages were like the one that is timed."""
    layout, choice, num_tokens = config.layout, config.choice(), config.data.seq_len
    seconds = fitted(measured(config, device))
    table = LatencyTable(seconds, num_tokens, default_unit(num_tokens, layout.tp, _MOST_UNITS))

    def step_s(lengths: tuple[int, ...]) -> float:
        return _step_s(choice, config.schedule.receive_buffers, table, lengths)

    found, _ = judged_slices(table, layout.pp, layout.num_microbatches * layout.loops, step_s)
    return found.lengths


def _step_s(choice: Choice, receive_buffers: int, table: LatencyTable, lengths: tuple[int, ...]) -> float:
    bounds = np.cumsum([0, *lengths]) // table.unit
    slices = table.slicing(bounds.tolist())
    stages = choice.pp * choice.loops
    parts = [StageCosts((s / 3,) * stages, (2 * s / 3,) * stages) for s in slices.seconds]
    schedule = lower(replace(choice, num_slices=len(lengths)).make(), receive_buffers)
    return simulate(schedule, SliceCosts(parts[0], tuple(parts))).end_s


class _Fit:
    """Seconds of a slice of l tokens behind c: ``fixed + token l + pair l (c + l / 2)``, none of them negative."""

    def __init__(self, fixed_s: float, token_s: float, pair_s: float) -> None:
        self.fixed_s, self.token_s, self.pair_s = fixed_s, token_s, pair_s

    def __call__(self, length: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.fixed_s + self.token_s * length + self.pair_s * length * (before + length / 2)


def fitted(points: list[Point]) -> _Fit:
    """The latency that is nearest to some measured points, by relative errors."""
    length, before, seconds = np.array(points, np.float64).T
    columns = np.stack([np.ones_like(length), length, length * (before + length / 2)], axis=1) / seconds[:, None]
    used = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(columns[:, used], np.ones_like(seconds), rcond=None)
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    values = dict(zip(used, found.tolist(), strict=True))
    return _Fit(values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))


def measured(config: RunConfig, device: torch.device) -> list[Point]:
    """Forward and backward of the stage with most layers, at a few lengths, at the beginning and the end of sequences.

    All of it on this rank, without the ranks that it shares matrices with.
    """
    layout, num_tokens = config.layout, config.data.seq_len
    assert layout.partition is not None
    assert config.model.vocab_size is not None
    pieces = max(stage_pieces(layout.partition), key=len)
    stage = stage_of(config, pieces, device)
    stage.set_recompute(layout.recompute_by_layer(config.model.num_layers))
    if stage.borrows:
        stage.borrow(
            torch.zeros(config.model.vocab_size, config.model.hidden_size, dtype=_dtype(config), device=device)
        )
    lengths = sorted({max(1, num_tokens // share) for share in (1, 2, 4, 8)})
    places = [(length, before) for length in lengths for before in sorted({0, num_tokens - length})]
    return [(*place, _seconds(stage, config, place, device)) for place in places]


def _dtype(config: RunConfig) -> torch.dtype:
    return getattr(torch, config.training.known_dtype)


def _seconds(stage: Transformer, config: RunConfig, place: tuple[int, int], device: torch.device) -> float:
    """Median seconds of a slice behind others."""
    length, before = place
    times: list[float] = []
    for _ in range(_REPEATS + 1):
        cache = KeyValueCache(config.data.seq_len)
        with torch.no_grad():
            if before:
                stage(_input(stage, config, before, device), cache)
        tensor = _input(stage, config, length, device)
        begin = now(device)
        output = stage(tensor, cache)
        output.backward(torch.ones_like(output))
        times.append(now(device) - begin)
    return median(times[1:])


def _input(stage: Transformer, config: RunConfig, num_tokens: int, device: torch.device) -> torch.Tensor:
    sequences = config.layout.microbatch_size
    if stage.has_embedding:
        return torch.zeros(sequences, num_tokens, dtype=torch.int64, device=device)
    return torch.randn(sequences, num_tokens, config.model.hidden_size, dtype=_dtype(config), device=device)
