"""Compares the least memory that a run needs with what the machine has, before anything starts."""

import os
from collections import Counter
from math import inf

import torch

from pipeloom.checkpoint.kept_files import NUM_STATES, check_room, head_bytes
from pipeloom.config import RunConfig
from pipeloom.errors import HostError
from pipeloom.execute.processes.world import is_first, is_launched
from pipeloom.model.adapted_outline import num_parameters
from pipeloom.predict.need import Parts, need_by_pipeline_rank, reference_bytes
from pipeloom.system.host_memory import Available, address_space, available_memory
from pipeloom.system.temporary import remove_abandoned
from pipeloom.terminal.words import count, format_bytes

_ADVICE = {
    "processes": "use a smaller layout.pp, layout.dp or layout.tp, or more hosts",
    "tokens of the batch": "use a smaller layout.num_microbatches, layout.microbatch_size or data.seq_len",
    "the schedule": "use a smaller layout.num_microbatches, layout.loops or layout.pp",
    "activations": "use a smaller layout.microbatch_size or data.seq_len, or layout.recompute full",
    "the reference's weights and gradients": "use a smaller model",
    "logits": "use a smaller layout.microbatch_size, data.seq_len or model.vocab_size",
}
_OF_STATE = (
    "use a smaller model or more hosts, or keep its stages in files (layout.pp 1, schedule.device_budget and "
    "schedule.swap_folder)"
)


def check_memory(config: RunConfig, *, verifies: bool = False, trains: bool = True) -> None:
    """Refuse a run whose ranks on this host need more memory than there is; under a launcher, once on each host.

    What killed runs of this user left in memory is removed first.

    Args:
        config: valid, with a resolved model.
        verifies: whether the run compares gradients with a reference: it has no optimizer state, but its first host
            holds a whole model.
        trains: whether the run has gradients and activations for backwards.

    Raises:
        HostError: names what is needed, what is available, the largest part, and what to change.
    """
    # Only the first process of each host checks: one message, and memory is counted once.
    if os.environ.get("LOCAL_RANK", "0") != "0" and is_launched():
        return
    remove_abandoned()  # the states of a killed run may take most of the memory
    if config.model.adapted is not None:
        _check_adapted(config, config.model.adapted, verifies=verifies, trains=trains)
        return
    needs, processes = need_by_pipeline_rank(config, verifies=verifies, trains=trains), processes_here(config)
    on_cpu = config.training.device == "cpu"
    by_rank = {rank: needs[rank].host | (needs[rank].device if on_cpu else {}) for rank in processes}
    names = next(iter(by_rank.values()))
    on_host = {name: sum(by_rank[rank][name] * number for rank, number in processes.items()) for name in names}
    # The reference runs on rank 0 alone, so its host needs memory for a whole model.
    if verifies and is_first() and on_cpu:
        on_host |= reference_bytes(config)
    _refuse_beyond(on_host, available_memory(), _processes(processes.total()))
    largest = max(by_rank.values(), key=lambda parts: sum(parts.values()))
    _refuse_beyond(largest, address_space(), "a process of this run takes")
    # With a device budget the schedule itself stays within it.
    if not on_cpu and config.schedule.budget_bytes is None:
        # Total memory of a device, not free memory: other processes may end, and only a run that can never fit is
        # refused (decision 33).
        whole = (torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count()))
        fullest = max(processes, key=lambda rank: sum(needs[rank].device.values()))
        there = Available(min(whole, default=inf), "there")
        _refuse_beyond(needs[fullest].device, there, f"a device of pipeline rank {fullest} takes")


def _check_adapted(config: RunConfig, text: str, *, verifies: bool, trains: bool) -> None:
    """As ``check_memory``, for layers without closed forms: one copy of the state, of which each rank has a share."""
    if config.training.device != "cpu":
        return
    processes = processes_here(config).total()
    here = processes / config.layout.num_ranks
    number = num_parameters(text)
    size = number * getattr(torch, config.training.known_dtype).itemsize
    parts = {"weights": size * here}
    if trains:
        parts["gradients"] = size * here * config.least_gradients
    if trains and not verifies:
        parts["the optimizer's state"] = number * config.optimizer.rule.state_bytes * here
    if verifies and is_first():
        parts["the reference's weights and gradients"] = 2 * size
    _refuse_beyond(parts, available_memory(), _processes(processes))


def check_kept(config: RunConfig) -> None:
    """Refuse a run whose states in shared memory (``restart.times``) do not fit there; no-op without.

    Raises:
        HostError: names what is needed and what is free.
    """
    if not config.restart.times:
        return
    if config.model.adapted is not None:
        size = getattr(torch, config.training.known_dtype).itemsize + config.optimizer.rule.state_bytes
        state = num_parameters(config.model.adapted) * size
    else:
        parts = need_by_pipeline_rank(config)
        by_rank = [one.device["weights"] + one.device["the optimizer's state"] for one in parts]
        state = sum(by_rank[rank] * number for rank, number in processes_here(config).items())
    check_room(NUM_STATES * state + head_bytes(config.layout.num_ranks))


def processes_here(config: RunConfig) -> Counter[int]:
    """Number of this host's processes by pipeline rank."""
    layout = config.layout
    if not is_launched():
        # Without a launcher all processes are on this host.
        return Counter(dict.fromkeys(range(layout.pp), layout.stage_devices))
    first = int(os.environ["RANK"]) - int(os.environ.get("LOCAL_RANK", "0"))
    here = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return Counter(layout.coordinates(rank).pipeline for rank in here)


def _processes(number: int) -> str:
    return f"{count(number, 'process')} of this run {'takes' if number == 1 else 'take'}"


def _refuse_beyond(parts: Parts, available: Available, who: str) -> None:
    needed = sum(parts.values())
    if needed <= available.size_bytes:
        return
    largest = max(parts, key=lambda name: parts[name])
    raise HostError(
        f"not enough memory: {who} at least {format_bytes(needed, rounds_up=True)}, "
        f"{format_bytes(available.size_bytes)} are {available.source}; the largest part is {largest}, "
        f"{format_bytes(parts[largest])}; {_ADVICE.get(largest, _OF_STATE)}"
    )
