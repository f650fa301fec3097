"""What moves of activations run on."""

from typing import Protocol

import torch

from pipeloom.execute.clock import Clock
from pipeloom.execute.lanes import Lane, Neighborhood, StreamLane, ThreadLane
from pipeloom.schedule import Kind


class MoveLanes(Protocol):
    """What a rank's swaps run on.

    Attributes:
        waits: whether lanes wait by themselves, each in a thread of its own, or are pushed on.
    """

    waits: bool

    @property
    def device(self) -> torch.device:
        """Where stages live."""
        ...

    def of_kind(self, kind: Kind) -> Lane:
        """The lane of a kind's actions."""
        ...

    def service(self, name: str) -> Lane:
        """A lane for what is done for another rank."""
        ...


class InProcessMoveLanes:
    """Of a rank that shares its process with all others.

    Args:
        lanes: of all ranks.
        clock: what spans are measured with.
    """

    waits = False

    def __init__(self, lanes: Neighborhood, clock: Clock) -> None:
        self.device = torch.device("cpu")
        self._lanes = lanes
        self._clock = clock

    def of_kind(self, kind: Kind) -> Lane:
        """The lane of a kind's actions."""
        return self.service(kind.value)

    def service(self, name: str) -> Lane:  # noqa: ARG002  nobody sees its name
        """A lane for what is done for another rank."""
        return self._lanes.lane(self._clock)


class ProcessMoveLanes:
    """Of a process: threads on a CPU; on CUDA streams, and threads with streams for what is done for others.

    Args:
        clock: what spans are measured with.
        device: where stages live.
    """

    waits = True

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.device = device
        self._clock = clock

    def of_kind(self, kind: Kind) -> Lane:
        """The lane of a kind's actions."""
        if self.device.type == "cuda":
            return StreamLane(self._clock, self.device.index)
        return ThreadLane(self._clock, kind.value)

    def service(self, name: str) -> Lane:
        """A lane for what is done for another rank."""
        is_cuda = self.device.type == "cuda"
        return ThreadLane(self._clock, name, torch.cuda.Stream(self.device) if is_cuda else None)
