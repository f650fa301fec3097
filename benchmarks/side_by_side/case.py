"""What is compared: a pipeline's sizes, its network, and who runs it in which order."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeloom.schedule import Schedule
from pipeloom.workload.boundary import Boundary

Runtime = Literal["pipeloom", "PyTorch"]
Gradient = NDArray[np.float32]

ONE_STAGE = ("GPipe", "1F1B")
"""PyTorch's schedules with one stage on each rank."""
TWO_STAGES = ("ZBVZeroBubble", "DualPipeV")
"""PyTorch's schedules with two stages on each rank, placed like a v."""
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
PYTORCH_SCHEDULES = (*ONE_STAGE, *LOOPED, *TWO_STAGES)


@dataclass(frozen=True)
class Link:
    """The network between hosts: each has an uplink and a downlink, and every packet is under way for a while.

    Attributes:
        rate_mbit: of the uplink and of the downlink.
        latency_ms: one way.
    """

    rate_mbit: float
    latency_ms: float

    def __str__(self) -> str:
        """``200 Mbit/s, 5 ms``."""
        return f"{self.rate_mbit:.4g} Mbit/s, {self.latency_ms:.3g} ms"

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes."""
        return self.rate_mbit * 1e6 / 8

    @property
    def latency_s(self) -> float:
        """One way."""
        return self.latency_ms / 1e3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline. Every contender does the same work in all; fewer stages take longer each.

    Attributes:
        name: for people.
        pp: pipeline ranks.
        dp: data-parallel replicas, with everything sharded.
        loops: stages on each rank, where a schedule allows any number.
        num_microbatches: of each replica.
        forward_s: of one of ``loops`` stages that sleep, for a micro-batch; 0 for stages that do next to nothing.
        backward_s: the same.
        width: of stages that compute; ``None`` for those that sleep.
        layers: of each of ``loops`` stages that compute.
        message_bytes: of what two stages hand over for a micro-batch.
        weight_bytes: of one of ``loops`` stages.
        link: between the ranks, each on a host of its own; ``None`` for the loopback of this host.
        receive_buffers: of pipeloom, for each directed edge.
    """

    name: str
    pp: int
    dp: int = 1
    loops: int = 2
    num_microbatches: int = 8
    forward_s: float = 0.0
    backward_s: float = 0.0
    width: int | None = None
    layers: int = 1
    message_bytes: int
    weight_bytes: int = 64
    link: Link | None = None
    receive_buffers: int = 4

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.pp * self.dp

    @property
    def ideal_s(self) -> float:
        """Compute of each rank in a step."""
        return self.num_microbatches * self.loops * (self.forward_s + self.backward_s)


@dataclass(frozen=True)
class Contender:
    """A runtime with an order.

    Attributes:
        runtime: who runs it.
        order: name of one of PyTorch's schedules, or of a family of pipeloom's; of another order for people only.
        loops: stages on each rank.
        given: the compute actions of an order that no name stands for; else ``None``.
        link: the network as it was measured, for which the order was chosen; ``None`` for that of the case.
        boundary: pipeloom's code of messages between stages; ``None``: they travel as they are.
    """

    runtime: Runtime
    order: str
    loops: int
    given: Schedule | None = None
    link: Link | None = None
    boundary: Boundary | None = None

    @property
    def label(self) -> str:
        """The order, and how its messages travel."""
        return self.order if self.boundary is None else f"{self.order}, {self.boundary}"

    def __str__(self) -> str:
        """``PyTorch LoopedBFS``."""
        return f"{self.runtime} {self.label}"


def pytorch_contender(order: str, loops: int) -> Contender:
    """PyTorch's runtime with as many loops as its schedule takes, up to ``loops``."""
    return Contender("PyTorch", order, 1 if order in ONE_STAGE else 2 if order in TWO_STAGES else loops)


@dataclass(frozen=True)
class Plan:
    """A case with those who take part.

    Attributes:
        case: what is run.
        contenders: in the order in which they alternate.
        repetitions: turns of each.
        turn: timed steps of a turn. Before several of them one more does not count: in it code and data come back to
            the caches, from which the contender before has evicted them.
        warmup: steps of each before.
        compares_gradients: whether the last step's gradients come back.
    """

    case: Case
    contenders: tuple[Contender, ...]
    repetitions: int = 5
    turn: int = 1
    warmup: int = 1
    compares_gradients: bool = False


@dataclass
class Measured:
    """What came of a contender.

    Attributes:
        contender: who.
        seconds: of every timed step.
        theory_s: what its order takes on an ideal runtime over the same network.
        compute_s: of each rank in a step.
        num_actions: of the busiest rank, communication included.
        cpu_s: processor time of all ranks in a step.
        lanes: by kind of communication, (hidden, exposed) seconds of a rank in a step, mean over ranks.
        gradients: by stage and name, if they were requested.
    """

    contender: Contender
    seconds: list[float]
    theory_s: float
    compute_s: float
    num_actions: int
    cpu_s: float
    lanes: dict[str, tuple[float, float]] = field(default_factory=dict)
    gradients: dict[str, Gradient] = field(default_factory=dict)
