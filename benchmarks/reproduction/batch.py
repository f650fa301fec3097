"""Figure 3 of the paper: the best configuration of each method at each batch, on 64 V100."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from pipeloom.cost.software import Software
from pipeloom.workload.axes import axes, divisors
from pipeloom.workload.layout import Recompute, Shard
from pipeloom.workload.run import Run
from reproduction.fastest import fastest, loop_counts
from reproduction.machine import (
    CLUSTER,
    MEGATRON,
    MODELS,
    NUM_DEVICES,
    OWN,
    Candidate,
    Row,
    base_run,
    candidate,
    described,
    with_messages,
)

BATCHES = (8, 9, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TPS = divisors(CLUSTER.devices_per_node)
REPLICATED: tuple[Shard, ...] = ("none", "optimizer")
SHARDED: tuple[Shard, ...] = ("none", "optimizer", "full")


@dataclass(frozen=True)
class Setting:
    """What a configuration is searched for.

    Attributes:
        model: name.
        batch: sequences of a step, on the paper's 64 devices.
        factor: by what devices, replicas and batch are multiplied.
        recompute: what may be recomputed.
    """

    model: str
    batch: int
    factor: int = 1
    recompute: tuple[Recompute, ...] = ("full",)

    def runs(self, shards: tuple[Shard, ...]) -> Iterator[Run]:
        """Every way to lay the batch out on all devices, with one stage for each rank."""
        base, factor = replace(base_run(self.model), global_batch=self.batch * self.factor), self.factor
        for sizes in axes(NUM_DEVICES, TPS):
            if self.batch % sizes.dp == 0:
                laid = replace(base, tp=sizes.tp, pp=sizes.pp, dp=sizes.dp * factor)
                for size, kind in product(divisors(self.batch // sizes.dp), self.recompute):
                    for shard in shards if laid.dp > 1 else ("none",):
                        yield replace(laid, micro_batch=size, recompute=kind, shard=shard)


def looped(run: Run) -> Iterator[Run]:
    """A run with every number of loops."""
    for loops in loop_counts(run.shape.layers, run.pp):
        yield replace(run, loops=loops)


def breadth_first(setting: Setting, own: Software, _: Software) -> Iterator[Candidate]:
    """Any number of loops and any sharding, overlapped."""
    for run in setting.runs(SHARDED):
        if run.pp > 1:
            yield from (candidate(each, own, "breadth-first") for each in looped(run))


def depth_first(setting: Setting, _: Software, megatron: Software) -> Iterator[Candidate]:
    """Megatron-LM's interleaved schedule: more than two ranks, M divisible by them (its ``arguments.py``)."""
    for run in setting.runs(REPLICATED):
        if run.pp > 2 and run.num_microbatches % run.pp == 0:
            yield from (candidate(each, megatron, "depth-first") for each in looped(run) if each.loops > 1)


def one_forward_one_backward(setting: Setting, _: Software, megatron: Software) -> Iterator[Candidate]:
    """Megatron-LM without loops."""
    for run in setting.runs(REPLICATED):
        if run.pp > 1 and run.shape.layers % run.pp == 0:
            yield candidate(run, megatron, "1f1b")


def gpipe(setting: Setting, own: Software, _: Software) -> Iterator[Candidate]:
    """The overlapped program without loops; a stage is gathered whole."""
    for run in setting.runs(SHARDED):
        if run.pp > 1 and run.shape.layers % run.pp == 0:
            yield candidate(run, own, "gpipe")


def no_pipeline(setting: Setting, own: Software, _: Software) -> Iterator[Candidate]:
    """Data and tensor parallelism alone: every layer a stage of the one rank, micro-batches in both orders."""
    for run in setting.runs(SHARDED):
        if run.pp == 1:
            layered = replace(run, loops=run.shape.layers)
            yield from (candidate(layered, own, family) for family in ("breadth-first", "depth-first"))


Method = Callable[[Setting, Software, Software], Iterator[Candidate]]
METHODS: dict[str, Method] = {
    "breadth-first": breadth_first,
    "depth-first": depth_first,
    "1F1B": one_forward_one_backward,
    "GPipe": gpipe,
    "no pipeline": no_pipeline,
}


def best(model: str, messages: str, method: str, batch: int) -> Row | None:
    """The best configuration of a method; ``None`` if none fits."""
    own, megatron = with_messages(OWN, messages), with_messages(MEGATRON, messages)
    step = fastest(METHODS[method](Setting(model, batch), own, megatron))
    if step is None:
        return None
    keys = {"model": model, "messages": messages, "method": method, "batch": str(batch)}
    return {**keys, "batch_per_device": f"{batch / NUM_DEVICES:g}", **described(step)}


def points() -> list[tuple[str, str, str, int]]:
    """Model, messages, method and batch of every point; without a pipeline there are no messages."""
    return [
        (model, messages, method, batch)
        for model in MODELS
        for messages in ("cut", "whole")
        for method in METHODS
        for batch in BATCHES
        if not (method == "no pipeline" and messages == "whole")
    ]
