"""Chooses the lengths of token slices for ``layout.token_slices = "auto"``.

Slices are timed at a few lengths and contexts; the planner's dynamic program chooses from the fit.
"""

from dataclasses import replace

import numpy as np
import torch

from pipeloom.config import RunConfig
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.slices import SliceCosts
from pipeloom.execute.processes.world import World
from pipeloom.measure.slices import Point, fitted, measured
from pipeloom.model import Transformer, stage_pieces
from pipeloom.passes import lower
from pipeloom.planner.slice_lengths import LatencyTable, default_unit, judged_slices
from pipeloom.simulation import simulate
from pipeloom.training.stages import stage_of

_MOST_UNITS = 64


def with_known_slices(config: RunConfig, world: World) -> RunConfig:
    """Replace ``auto`` by slice lengths, the same on every rank. Collective.

    Rank 0 measures and chooses; the other ranks wait for it, at most ``World.timeout``.
    """
    if config.layout.token_slices != "auto":
        return config
    lengths = world.from_first(_chosen(config, world.device) if world.rank == 0 else None)
    return replace(config, layout=replace(config.layout, token_slices=lengths))


def _chosen(config: RunConfig, device: torch.device) -> tuple[int, ...]:
    """The lengths with the shortest simulated step, if all stages took as long as the timed one."""
    layout, choice, num_tokens = config.layout, config.choice(), config.data.seq_len
    seconds = fitted(measured_points(config, device))
    table = LatencyTable(seconds, num_tokens, default_unit(num_tokens, layout.tp, _MOST_UNITS))

    def step_s(lengths: tuple[int, ...]) -> float:
        bounds = np.cumsum([0, *lengths]) // table.unit
        slices, stages = table.slicing(bounds.tolist()), layout.num_stages
        parts = [StageCosts((s / 3,) * stages, (2 * s / 3,) * stages) for s in slices.seconds]
        schedule = lower(replace(choice, num_slices=len(lengths)).make(), config.schedule.receive_buffers)
        return simulate(schedule, SliceCosts(parts[0], tuple(parts))).end_s

    found, _ = judged_slices(table, layout.pp, layout.num_microbatches * layout.num_loops, step_s)
    return found.lengths


def measured_points(config: RunConfig, device: torch.device) -> list[Point]:
    """Time slices in the stage with the most layers; (tokens, tokens before them, seconds) of each."""
    layout, model, dtype = config.layout, config.model, getattr(torch, config.training.known_dtype)
    assert layout.partition is not None
    assert model.vocab_size is not None
    stage = stage_of(config, max(stage_pieces(layout.partition), key=len), device)
    stage.set_recompute(layout.recompute_by_layer(model.num_layers))
    if stage.borrows:
        stage.borrow(torch.zeros(model.vocab_size, model.hidden_size, dtype=dtype, device=device))

    def make(num_tokens: int) -> torch.Tensor:
        shape = layout.microbatch_size, num_tokens
        if stage.has_embedding:
            return torch.zeros(shape, dtype=torch.int64, device=device)
        return torch.randn(*shape, model.hidden_size, dtype=dtype, device=device)

    assert isinstance(stage, Transformer), "the configuration refuses slices of others"
    return measured(stage, make, config.data.seq_len)
