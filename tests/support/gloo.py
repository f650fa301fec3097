"""Configurations run over real processes and compared with the single process."""

from functools import partial

from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.training.equivalence import compare_with_reference
from pipeloom.training.session import resolve


def differences_over_gloo(configs, num_ranks, timeout_s=60):
    """For each configuration its differences by name, all in the same processes."""
    import torch._dynamo  # noqa: F401  recomputation needs it; once here, not once in every worker

    load_data(configs[0].data, 0)
    return run_workers(partial(_compare_all, configs, timeout_s), num_ranks)[0]


def _compare_all(configs, timeout_s, rendezvous, rank, size):
    world = join_forked(rendezvous, rank, size, "cpu", timeout_s)
    found = []
    for config in configs:
        data = load_data(config.data, 0)
        found.append(compare_with_reference(resolve(config, data), world, data, num_batches=1))
    world.leave()
    return found
