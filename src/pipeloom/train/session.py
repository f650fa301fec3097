"""Runs a job on all ranks: in processes of its own, or as one of those that a launcher started."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeloom.config import RunConfig
from pipeloom.errors import UserError
from pipeloom.execute.launch import run_workers
from pipeloom.execute.world import World, is_launched, join_forked, join_launched, launched_size
from pipeloom.train.data import Data, load_data

Job = Callable[[RunConfig, World, Data], Any]
"""What every rank does; the configuration has its model resolved."""


def run_on_all_ranks(config: RunConfig, job: Job, patience_s: float = 30.0) -> Any:
    """Run ``job`` on every rank.

    Args:
        config: tells how many ranks, and where they compute.
        job: picklable where processes cannot be forked.
        patience_s: communication outside the pipeline may wait this much longer than a stall takes to be
            reported; more than the longest that one rank works while the others wait for it.

    Returns:
        Rank 0's result; under a launcher, this rank's.

    Raises:
        UserError: the launcher started another number of processes than the layout needs.
        WorkerError: a process of its own failed.
    """
    if is_launched():
        return _run_launched(config, job, patience_s)
    # imported once here, not once in every worker: optimizers import it on first use
    import torch._dynamo  # noqa: F401

    work = partial(_work, config, job, patience_s=patience_s)
    return run_workers(work, config.layout.num_ranks, config.training.threads)[0]


def resolve(config: RunConfig, data: Data) -> RunConfig:
    """The configuration with every derived size of the model filled in, from the tokenizer's size."""
    return replace(config, model=config.model.resolve(data.tokenizer.vocab_size))


def _run_launched(config: RunConfig, job: Job, patience_s: float) -> Any:
    if launched_size() != config.layout.num_ranks:
        raise UserError(
            f"layout.pp {config.layout.pp} needs {config.layout.num_ranks} processes, the launcher started "
            f"{launched_size()}; change --layout.pp or the number of processes"
        )
    torch.set_num_threads(config.training.threads)
    timeout_s = config.training.stall_timeout_s + patience_s
    return _join_in(config, job, join_launched(config.training.device, timeout_s))


def _work(config: RunConfig, job: Job, rendezvous: Path, rank: int, num_ranks: int, *, patience_s: float) -> Any:
    timeout_s = config.training.stall_timeout_s + patience_s
    return _join_in(config, job, join_forked(rendezvous, rank, num_ranks, config.training.device, timeout_s))


def _join_in(config: RunConfig, job: Job, world: World) -> Any:
    data = load_data(config.data, config.training.seed)
    result = job(resolve(config, data), world, data)
    world.leave()
    return result
