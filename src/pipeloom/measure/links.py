"""Times messages between processes, and collectives, of several sizes, with the transport and the groups of a run."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import get_args

import torch

from pipeloom.cost.hardware import Collective
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.collectives import Note, own_group
from pipeloom.execute.communication.group import Finish, Group
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.communication.under_way import finish
from pipeloom.execute.processes.world import World
from pipeloom.measure.findings import Collectives, Messages, Timing, size_text
from pipeloom.measure.host import num_devices
from pipeloom.measure.stopwatch import Run, Sample, Stopwatch, now, sample_of

SIZES = {
    "cpu": tuple(2**exponent for exponent in (12, 15, 18, 21, 24)),
    "cuda": tuple(2**exponent for exponent in (12, 15, 18, 21, 24, 27, 30)),
}
"""Bytes of a message: 4 KiB to 16 MiB, on CUDA to 1 GiB."""

Pairs = Sequence[tuple[int, int]]
"""Pairs of ranks that exchange messages, all at the same time; no rank is in two pairs."""


def group_sizes(per_host: int) -> list[int]:
    """Group sizes to measure collectives with: powers of two, and all ranks of a host."""
    return sorted({*(2**n for n in range(1, per_host.bit_length()) if 2**n <= per_host), per_host} - {0, 1})


def num_links(device: torch.device, num_processes: int, per_host: int) -> int:
    """Number of measurements for so many processes in total and on each host."""
    num_p2p = (per_host > 1) + (num_processes > per_host)
    return len(SIZES[device.type]) * (num_p2p + len(get_args(Collective)) * len(group_sizes(per_host)))


def measure_messages(watch: Stopwatch, pairs: Pairs, between: str) -> Messages:
    """Time messages: half of a round trip. Rank 0 is in a pair; ranks in no pair take part in synchronization only.

    Args:
        watch: repeats them.
        pairs: of ranks.
        between: description of the pairs, for the progress display.
    """
    world = watch.world
    specs = {size: TensorSpec((size // 4,), torch.float32) for size in SIZES[world.device.type]}
    edges = {edge: list(specs.values()) for pair in pairs for edge in (pair, pair[::-1])}
    mine = next((pair for pair in pairs if world.rank in pair), None)
    points: list[tuple[float, Timing]] = []
    with closing(Transport(world.rank, edges, world.device, world.timeout)) as transport:
        for size, spec in specs.items():
            sample: Sample = _nothing
            if mine is not None:
                there_and_back = partial(_there_and_back, world, transport)
                # Rank 0 begins a sample; its partner begins when the broadcast arrives, one or two latencies later. A
                # message there and back that is not timed waits for that.
                meet = partial(there_and_back, specs[min(specs)], mine)
                clock = partial(now, world.device)
                sample = sample_of(partial(there_and_back, spec, mine), clock, factor=0.5, before=meet)
            points.append((float(size), watch.time(f"messages of {size_text(size)} between {between}", sample)))
    return Messages(len(pairs), tuple(points))


def _there_and_back(world: World, transport: Transport, spec: TensorSpec, pair: tuple[int, int]) -> None:
    first, second = pair
    is_first, tensor = world.rank == first, spec.empty(world.device)
    peer = second if is_first else first
    for sends in (is_first, not is_first):
        message = transport.send(tensor, peer) if sends else transport.receive(spec, peer)
        finish(message, world.timeout.total_seconds())


def measure_collectives(watch: Stopwatch, num_ranks: int, per_host: int) -> tuple[Collectives, ...]:
    """Time all collectives among the first ``num_ranks`` ranks; the others take part in synchronization only.

    Args:
        watch: repeats them.
        num_ranks: size of the group.
        per_host: processes on each host.
    """
    world, device, num_cores = watch.world, watch.world.device, num_devices("cpu")
    group, takes_part = own_group([range(num_ranks)], world, Note(None, "collective")), world.rank < num_ranks
    clock, factor = partial(now, device), 1.0
    if device.type == "cpu" and per_host > num_cores:  # CPU time, which excludes other programs
        clock, factor = time.process_time, max(1.0, num_ranks / num_cores)
    found: list[Collectives] = []
    for kind in get_args(Collective):
        points: list[tuple[float, Timing]] = []
        for wanted in SIZES[device.type]:
            # Every rank has a shard of the same size, rounded up; the point has the size that was really moved.
            shard = -(-wanted // (4 * num_ranks))
            sample = sample_of(_collective(kind, shard, num_ranks, device, group), clock, factor=factor)
            what = f"{kind} of {size_text(wanted)} among {num_ranks}"
            points.append((4.0 * shard * num_ranks, watch.time(what, sample if takes_part else _nothing)))
        found.append(Collectives(kind, num_ranks, tuple(points)))
    return tuple(found)


def _collective(kind: Collective, shard: int, num_ranks: int, device: torch.device, group: Group) -> Run:
    whole, part = torch.zeros(shard * num_ranks, device=device), torch.zeros(shard, device=device)
    starts: dict[Collective, Callable[[], Finish]] = {
        "all_reduce": lambda: group.all_reduce(whole),
        "all_gather": lambda: group.gather(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter(part, whole),
    }

    def run() -> None:
        finish = starts[kind]()
        finish()

    return run


def _nothing(runs: int) -> float:  # noqa: ARG001
    """The sample of a rank that is not in the group."""
    return 1.0
