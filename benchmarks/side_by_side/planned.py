"""What ``pipeloom profile`` measures between the hosts, and the order that ``plan`` chooses for it."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pipeloom.catalog import load_cluster
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.errors import PipeloomError
from pipeloom.planner.plan import make_question
from pipeloom.planner.question import Question
from pipeloom.planner.search import search
from pipeloom.predict.step import SimulatedStep, compute_schedule
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run
from side_by_side.case import Case, Contender, Link
from side_by_side.hosts import INTERFACE, shaped_hosts

TRIES = 300
"""Changes of an order for each of the layouts that the planner tries."""
_BUDGET_S = 30
_PATIENCE_S = 240
_WIDTHS = (256, 128)


def profiled(case: Case) -> Cluster:
    """The cluster that ``pipeloom profile`` measures on the hosts of a case, one process on each.

    Raises:
        PipeloomError: a process failed.
    """
    assert case.link is not None, "hosts have a network"
    with shaped_hosts(case.num_ranks, case.link) as hosts, tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        file = Path(folder) / "hosts.toml"
        words = ["profile", "--device", "cpu", "--budget-s", str(_BUDGET_S), "--output", str(file)]
        running = [_start(host, words, rank, case.num_ranks) for rank, host in enumerate(hosts)]
        texts = [process.communicate(timeout=_PATIENCE_S)[0] for process in running]
        if any(process.returncode for process in running):
            raise PipeloomError(f"pipeloom profile failed: {texts[0][-2000:]}")
        return load_cluster(str(file))


def _start(host: str, words: list[str], rank: int, size: int) -> "subprocess.Popen[str]":
    """One process of a launcher that starts one on each host."""
    launched = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "pipeloom", *words]
    return subprocess.Popen(
        command, env={**os.environ, **launched}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def question_of(case: Case, cluster: Cluster) -> Question:
    """The question which order of how many stages trains a model whose layers are the stages of a case.

    Messages and weights of a layer have the case's bytes, as closely as sizes of a transformer allow. Its seconds are
    in the cluster's file as if ``pipeloom profile --model`` had measured the sleeps. A host is one device, whose cores
    sleeping stages do not use.
    """
    shape, seq = _shape(case)
    run = Run(shape=shape, seq=seq, precision="fp32").of_measured_pieces
    nothing = 1e-9, 1e-9
    pieces = MeasuredPieces(run=run, embedding=nothing, layer=(case.forward_s, case.backward_s), head=nothing)
    update = MeasuredUpdate(fixed_s=0.0, parameter_s=0.0, precision="fp32")
    hosts = replace(cluster, devices_per_node=1, cores_per_node=0, pieces=(pieces,), update=update)
    return make_question(
        shape,
        hosts,
        num_devices=case.num_ranks,
        global_batch=case.num_microbatches * case.dp,
        seq=seq,
        software="pipeloom-gloo",
        dtype="float32",
        tp=(1,),
        pp=(case.pp,),
        dp=(case.dp,),
        micro_batch=(1,),
        # Contenders of pipeloom keep all gathered stages and reduce each once: the exchanges of a sharded optimizer.
        shards=("optimizer" if case.dp > 1 else "none",),
        recompute=("none",),
        strategies=("none", "order"),
    )


def _shape(case: Case) -> tuple[ModelShape, int]:
    """A llama with the bytes of a case in float32, and the tokens of a sequence."""
    values, weights = case.message_bytes // 4, case.weight_bytes // 4
    width = next(one for one in _WIDTHS if 4 * one * one < weights or one == _WIDTHS[-1] or case.dp == 1)
    inner = max(1, (weights - 4 * width * width) // (3 * width))
    shape = ModelShape(
        layers=case.pp * case.loops,
        hidden=width,
        heads=4,
        kv_heads=4,
        ffn=inner,
        family="llama",
        vocab=8,
        tied=False,
        name="sleeping layers",
    )
    return shape, values // width


def chosen(case: Case, cluster: Cluster, tries: int = TRIES) -> SimulatedStep:
    """The fastest step of the plan.

    Raises:
        PipeloomError: no layout fits.
    """
    best = search(replace(question_of(case, cluster), order_tries=tries), 1).best
    if best is None:
        raise PipeloomError(f"no layout of '{case.name}' fits the hosts")
    return best


def as_planned(case: Case, cluster: Cluster, tries: int = TRIES) -> Contender:
    """pipeloom's executor with the order that the planner chose for the measured cluster."""
    step = chosen(case, cluster, tries)
    found = step.knobs.found
    schedule = compute_schedule(step.knobs.choice) if found is None else found
    name = step.knobs.choice.family if found is None else "found order"
    link = Link(cluster.inter.bytes_per_s * 8 / 1e6, cluster.inter.latency_s * 1e3)
    placed = f", {step.run.placement}" if step.run.placement != "looped" else ""
    return Contender("pipeloom", f"as planned: {name}{placed}", step.run.loops, schedule, link)
