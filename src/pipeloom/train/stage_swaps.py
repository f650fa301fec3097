"""A model that is larger than what it may take of its device: how large its stages are, and when they come and go."""

from functools import cache
from tempfile import TemporaryFile

import torch
from torch import Tensor

from pipeloom.config import RunConfig
from pipeloom.errors import UserError
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.stage_store import LentMatrix, StageStore
from pipeloom.execute.stages.weights import master_dtype
from pipeloom.model import stage_pieces
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.train.stages import stage_of


def stage_amounts(config: RunConfig) -> tuple[Amounts, ...]:
    """For each stage the bytes of what there is of it.

    Args:
        config: resolved.
    """
    assert config.layout.partition is not None
    return _amounts(config, config.layout.partition)


def piece_bytes(config: RunConfig) -> tuple[int, ...]:
    """For each piece of the model, embedding, layers, head, the bytes of all that there is of it.

    Args:
        config: with the model resolved.
    """
    return tuple(int(one.total) for one in _amounts(config, (1,) * (config.model.num_layers + 2)))


@cache
def _amounts(config: RunConfig, partition: tuple[int, ...]) -> tuple[Amounts, ...]:
    dtype = getattr(torch, config.training.known_dtype)
    narrow, wide = dtype.itemsize, master_dtype(dtype).itemsize
    kept = len(config.optimizer.rule.state) + (narrow < wide)  # the weights in wide numbers are a part of the state
    found: list[Amounts] = []
    for pieces in stage_pieces(partition):
        stage = stage_of(config, pieces, "meta")
        count = sum(parameter.numel() for parameter in stage.parameters())
        lent = config.model.hidden_size * (config.model.vocab_size or 0) if stage.borrows else 0
        found.append(
            Amounts(
                weights=count * narrow,
                gradient=count * wide,
                state=count * wide * kept,
                borrowed=lent * narrow,
                lent_gradient=lent * wide,
            )
        )
    return tuple(found)


def make_store(config: RunConfig) -> StageStore | None:
    """The store of a run that swaps stages.

    Raises:
        UserError: its folder cannot be written to.
    """
    budget, folder = config.schedule.budget_bytes, config.schedule.swap_folder
    if budget is None:
        return None
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"schedule.swap_folder: cannot write to {folder}: {error.strerror or error}") from None
    return StageStore(budget, folder)


def lend_matrix(
    store: StageStore, borrower: int, like: Tensor, gradient_dtype: torch.dtype, world: World
) -> LentMatrix:
    """Room for the matrix that the last stage borrows, and for its gradient."""
    weights = torch.zeros(like.shape, dtype=like.dtype, device=world.device)
    return LentMatrix(store, borrower, weights, torch.zeros(like.shape, dtype=gradient_dtype, device=world.device))
