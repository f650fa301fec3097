"""Measured costs: how long this machine takes for each stage, alone and when all ranks compute at once."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch
from torch import Tensor

from pipeloom.cost.costs import StageCosts
from pipeloom.execute.boundary import TensorSpec
from pipeloom.execute.stage import Objective, Stage
from pipeloom.execute.transport import Transfer, Transport
from pipeloom.execute.world import World

_REPEATS = 5
_CROWD_S = 0.6
_MESSAGES = 24


@dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
        costs: seconds of each stage, computing alone; of a transfer, while the ranks that have no part in it compute.
        host_by_rank: ranks of the same name share a host.
        capacity_by_host: ranks that the host serves at full speed when all its ranks compute at once; below
            their number where they share cores, caches or memory.
    """

    costs: StageCosts
    host_by_rank: tuple[str, ...]
    capacity_by_host: dict[str, float]


@dataclass(frozen=True)
class _Part:
    """What one rank measured: its host, (forward, backward) seconds of its stages, slowdown in the crowd."""

    host: str
    alone: dict[int, tuple[float, float]]
    slowdown: float
    transfer_s: float


def profile_stages(
    world: World,
    stages: Mapping[int, Stage],
    transport: Transport,
    *,
    outputs: Sequence[TensorSpec],
    tokens: Tensor,
    objective: Objective,
) -> Profile | None:
    """Time forward and backward of one micro-batch for every stage of the pipeline.

    The ranks take turns, so that each is timed alone; then two exchange tensors while the others compute; then all
    compute and exchange at once, which tells how much they slow each other down. Gradients that this leaves behind are
    dropped. Every rank calls it.

    Args:
        world: this process among the others.
        stages: this rank's.
        transport: to the other ranks.
        outputs: the agreed spec of every stage's output.
        tokens: stage 0's input.
        objective: applied to the last stage's output.

    Returns:
        The profile on rank 0, ``None`` elsewhere.
    """
    runs = {index: _runner(stage, outputs, tokens, objective, world.device) for index, stage in stages.items()}
    alone: dict[int, tuple[float, float]] = {}
    for turn in range(world.size):
        if turn == world.rank:
            alone = {index: _time(run) for index, run in runs.items()}
        world.wait_for_all()
    transfer_s = _time_transfer(world, transport, outputs[0], runs)
    slowdown = _crowd(world, transport, outputs[0], runs, alone)
    for stage in stages.values():
        for parameter in stage.module.parameters():
            parameter.grad = None
    parts: list[_Part] | None = world.gather(_Part(socket.gethostname(), alone, slowdown, transfer_s))
    return None if parts is None else _joined(parts, world.device.type == "cuda")


def _joined(parts: Sequence[_Part], has_own_device: bool) -> Profile:
    by_stage = {index: times for part in parts for index, times in part.alone.items()}
    hosts = [part.host for part in parts]
    capacity: dict[str, float] = {}
    for host in set(hosts):
        slowdowns = [part.slowdown for part in parts if part.host == host]
        num_ranks = len(slowdowns)
        capacity[host] = num_ranks if has_own_device else min(num_ranks, num_ranks * num_ranks / sum(slowdowns))
    costs = StageCosts(
        forward_s=tuple(by_stage[index][0] for index in sorted(by_stage)),
        backward_s=tuple(by_stage[index][1] for index in sorted(by_stage)),
        transfer_s=parts[0].transfer_s,
    )
    return Profile(costs, tuple(hosts), capacity)


Run = Callable[[], tuple[float, float]]
"""One forward and backward; seconds of each."""


def _runner(
    stage: Stage, outputs: Sequence[TensorSpec], tokens: Tensor, objective: Objective, device: torch.device
) -> Run:
    tensor = tokens if stage.index == 0 else _random(outputs[stage.index - 1], device)
    is_last = stage.index == len(outputs) - 1
    gradient = None if is_last else _random(outputs[stage.index], device) * 1e-6

    def run() -> tuple[float, float]:
        begin = _now(device)
        stage.forward(0, tensor, objective if is_last else None, trains=True)
        middle = _now(device)
        stage.backward(0, gradient)
        return middle - begin, _now(device) - middle

    return run


def _random(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.randn(spec.shape, dtype=spec.dtype, device=device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _time(run: Run) -> tuple[float, float]:
    run()  # allocates, and fills caches
    times = [run() for _ in range(_REPEATS)]
    return median(forward for forward, _ in times), median(backward for _, backward in times)


def _time_transfer(world: World, transport: Transport, spec: TensorSpec, runs: Mapping[int, Run]) -> float:
    """Seconds of one tensor between ranks 0 and 1, half of there and back, while all other ranks compute.

    0 on other ranks, or with one rank. On a host whose cores are all busy a message is taken up late, so the time on
    an idle host would be too short.
    """
    if world.size == 1:
        return 0.0
    world.wait_for_all()
    if world.rank > 1:
        _keep_busy(runs, _CROWD_S / 2)
        return 0.0
    peer, tensor = 1 - world.rank, torch.zeros(spec.shape, dtype=spec.dtype, device=world.device)
    times: list[float] = []
    for _ in range(_MESSAGES):
        begin = _now(world.device)
        for is_send in (world.rank == 0, world.rank != 0):
            _finish(transport.send(tensor, peer) if is_send else transport.receive(spec, peer), world)
        times.append((_now(world.device) - begin) / 2)
    return mean(times[_MESSAGES // 4 :])


def _finish(transfer: Transfer, world: World) -> None:
    transfer.is_done()
    transfer.wait(world.timeout.total_seconds())
    transfer.take()


def _keep_busy(runs: Mapping[int, Run], seconds: float) -> None:
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for run in runs.values():
            run()


def _crowd(
    world: World,
    transport: Transport,
    spec: TensorSpec,
    runs: Mapping[int, Run],
    alone: Mapping[int, tuple[float, float]],
) -> float:
    """Time of this rank's stages while all ranks compute and send their outputs on, by their time alone.

    A tensor goes to the next rank for each forward and back for each backward, as in a step; what the threads
    that move them take from the cores is part of the slowdown.
    """
    mean_s = world.sum([sum(map(sum, alone.values()))])[0] / world.size
    tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=world.device)
    peers = [peer for peer in (world.rank - 1, world.rank + 1) if 0 <= peer < world.size]
    num_rounds = max(1, round(_CROWD_S / (mean_s * max(1, world.size / 2))))
    expected = found = 0.0
    under_way: list[Transfer] = []
    world.wait_for_all()
    for _ in range(num_rounds):
        for index, run in runs.items():
            exchanged = [transport.receive(spec, peer) for peer in peers]
            expected += sum(alone[index])
            found += sum(run())
            exchanged += [transport.send(tensor, peer) for peer in peers]
            for transfer in under_way:
                _finish(transfer, world)
            under_way = exchanged
    for transfer in under_way:
        _finish(transfer, world)
    return found / expected
