"""Buffers of layouts for gathered weights and unreduced gradients, and the bytes of a device with them."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.memory import frozen_bytes, lasting_bytes, lent_bytes, state_bytes, unreduced_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.cost.stages import gathered_parameters
from pipeloom.planner.work import Floats
from pipeloom.predict.memory import Room
from pipeloom.schedule import Placement
from pipeloom.workload.layout import Shard
from pipeloom.workload.run import Run

LEAST_ROOM = Room(receive_buffers=0, gathered=1, unreduced=1)
"""The fewest buffers of any layout; messages of token slices are shorter than those of whole sequences."""


def buffers_of(level: Shard, stages: int, *, updates_stages: bool) -> list[tuple[int, int | None]]:
    """Numbers of gathered stages and of gradient buffers to try, the most first; ``None`` for all gradients.

    With buffers for all gradients, ``gradients`` would hold as much as ``optimizer``, and with every stage gathered
    ``full`` would hold as much as ``gradients``, and both would communicate more.

    Args:
        level: of sharding.
        stages: of each rank.
        updates_stages: whether each stage is updated within the step: it is then reduced once, before its update.
    """
    two, half = min(2, stages), max(1, stages // 2)
    sizes: list[tuple[int, int | None]] = [(stages, None)]
    if level == "gradients":
        sizes = [(stages, two), (stages, 1)]
    elif level == "full":
        sizes = [(half, two), (two, two), (two, 1), (1, 1)]
    if updates_stages:
        sizes = [(gathered, None) for gathered, _ in sizes]
    return list(dict.fromkeys(sizes))


def recomputing_buffers_of(level: Shard, stages: int, *, updates_stages: bool) -> tuple[int, int | None]:
    """Of ``buffers_of`` those of layouts that recompute some layers.

    Two gradients: one is reduced while the next is computed. More would take memory that recomputation frees.
    """
    tried = buffers_of(level, stages, updates_stages=updates_stages)
    return next((one for one in tried if one[1] == 2), tried[-1])


@lru_cache(maxsize=1024)
def stages_by_rank(placement: Placement) -> NDArray[np.int64]:
    """[rank, number] -> stage; every rank has equally many."""
    return np.array([placement.stages_of(rank) for rank in range(placement.num_ranks)])


# A search has many runs with the same state of the same stages.
@lru_cache(maxsize=4096)
def kept_state_bytes(placed: Placed, gathered: int, unreduced: int | None) -> Floats:
    """For each rank a lower bound of the bytes of its state with buffers, and of what the program reserves.

    Args:
        placed: the run; only its state matters.
        gathered: stages gathered at once, with ``full`` sharding.
        unreduced: stages with unreduced gradients at once, if gradients are sharded; ``None`` for no bound.
    """
    run, software, stages = placed.run, placed.software, stages_by_rank(placed.placement)
    held = sum(
        (_segment_bytes(placed.of(one), stages, gathered, unreduced) for one in run.segments), np.zeros(len(stages))
    )
    owner = placed.placement.rank_by_stage
    for rank in {owner[0], owner[-1]}:
        held[rank] += lent_bytes(run, software, stages[rank].tolist()).total_bytes
    return held + software.reserve_bytes


def _segment_bytes(placed: Placed, stages: NDArray[np.int64], gathered: int, unreduced: int | None) -> Floats:
    """For each rank the bytes of the state of one of ``Run.segments``, with its gathered weights and gradients."""
    run, software = placed.run, placed.software
    whole, trained = np.array(placed.rank_parameters), np.array(placed.trained_rank_parameters)
    held = lasting_bytes(run, 1.0, software) * trained + frozen_bytes(run, 1.0) * (whole - trained)
    alone = state_bytes(run, 1.0, software, "none")
    if run.sharded == "full":
        # The only rank of a copy has its frozen weights whole.
        has_shards = run.shard_size > 1 or run.adapter is None
        # Frozen weights that are not sharded are not gathered.
        by_stage = gathered_parameters(run, software) if has_shards else placed.trained_parameters
        largest = np.sort(np.array(by_stage)[stages], axis=1)[:, ::-1]
        most = gathered if software.has_reduction_lane else 1
        held = held + largest[:, :most].sum(axis=1) * alone.weights_bytes
    if wholes := _num_whole_gradients(run, software, unreduced):
        largest = np.array(placed.trained_parameters)[stages].max(axis=1)
        held = held + largest * (unreduced_bytes(run, software) * min(wholes, stages.shape[1]))
    return held


def _num_whole_gradients(run: Run, software: Software, unreduced: int | None) -> int:
    """The least number of whole gradients that a rank holds at once, beside its state."""
    if run.updates_stages:  # whose gradients are no part of the state
        return 1
    waits = software.has_reduction_lane or software.gathers_once(run.num_stages)
    return unreduced or 0 if run.sharded in ("gradients", "full") and run.shard_size > 1 and waits else 0
