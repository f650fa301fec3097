"""How tensors get from one pipeline rank to another: the interface, and the in-process transport.

A transport keeps the order of each directed edge: the n-th receive from a rank takes the n-th send of that
rank. Both are asynchronous: they return a ``Transfer`` at once.
"""

import time
from collections import defaultdict, deque
from typing import Protocol

from torch import Tensor

from pipeloom.execute.communication.boundary import TensorSpec


class Pending(Protocol):
    """Communication that a rank can wait for: a message, a collective, or a move."""

    def is_done(self) -> bool:
        """Whether its tensors may be used, or dropped by whoever sent them."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done; ``False`` if that takes longer than ``timeout_s``."""
        ...

    def take(self) -> Tensor | None:
        """Hand over the result, or raise what went wrong."""
        ...


class Transfer(Pending, Protocol):
    """A message under way.

    Attributes:
        start_s: when it was asked for; it moves later, when both sides are ready and the edge is free.
        end_s: when it was done, on the same clock.
    """

    start_s: float
    end_s: float

    def take(self) -> Tensor | None:
        """Hand over the tensor of a receive that is done, once; ``None`` for a send that is done.

        The transfer lets go of the tensor.

        Raises:
            PeerLostError: the other rank went away.
            BoundaryError: what came is not what was agreed on.
        """
        ...


def finish(transfer: Transfer, timeout_s: float) -> None:
    """Wait for a transfer outside a step, and drop what it brought.

    Raises:
        PeerLostError: the other rank went away.
    """
    transfer.is_done()
    transfer.wait(timeout_s)
    transfer.take()


class Transport(Protocol):
    """Sends and receives tensors between pipeline ranks."""

    def send(self, tensor: Tensor, peer: int) -> Transfer:
        """Send a tensor to a rank. The tensor must not change until the transfer is done."""
        ...

    def receive(self, spec: TensorSpec, peer: int) -> Transfer:
        """Receive the next tensor from a rank."""
        ...

    def close(self) -> None:
        """Let go of threads and connections; transfers under way are abandoned."""
        ...


class Post:
    """Where the ranks of one process leave tensors for each other."""

    def __init__(self) -> None:
        self.edges: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def transport(self, rank: int) -> "InProcessTransport":
        """The transport of one rank."""
        return InProcessTransport(self, rank)


class InProcessTransport:
    """All ranks in one process and one thread: deterministic, for tests, debugging and teaching."""

    def __init__(self, post: Post, rank: int) -> None:
        self._post = post
        self._rank = rank
        self._waiting: dict[int, deque[InProcessTransfer]] = defaultdict(deque)

    def send(self, tensor: Tensor, peer: int) -> Transfer:
        """Leave a copy for ``peer``; done at once."""
        # A copy, as over a network: the sender may drop or change its tensor when the send is done.
        self._post.edges[self._rank, peer].append(tensor.clone())
        transfer = InProcessTransfer(None, deque(), deque())
        transfer.finish(None)
        return transfer

    def receive(self, spec: TensorSpec, peer: int) -> Transfer:
        """Take the next tensor that ``peer`` leaves, behind the receives posted before."""
        transfer = InProcessTransfer(spec, self._post.edges[peer, self._rank], self._waiting[peer])
        self._waiting[peer].append(transfer)
        return transfer

    def close(self) -> None:
        """Nothing to let go of."""


class InProcessTransfer:
    """A message between two ranks of one process."""

    def __init__(self, spec: TensorSpec | None, arrived: deque[Tensor], queue: "deque[InProcessTransfer]") -> None:
        self._spec = spec
        self._arrived = arrived
        self._queue = queue
        self._tensor: Tensor | None = None
        self._is_done = False
        self.start_s = self.end_s = time.perf_counter()

    def is_done(self) -> bool:
        """Whether the tensor is there; hands what has arrived to the receives in their order."""
        while self._arrived and self._queue:
            self._queue.popleft().finish(self._arrived.popleft())
        return self._is_done

    def finish(self, tensor: Tensor | None) -> None:
        """End the transfer; a receive gets its tensor."""
        self._tensor = tensor
        self._is_done = True
        self.end_s = time.perf_counter()

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  nobody else can run while this rank waits
        """Whether it is done; waiting would change nothing."""
        return self.is_done()

    def take(self) -> Tensor | None:
        """Hand over the tensor, checked against the spec of the receive; ``None`` for a send."""
        assert self._is_done, "the tensor has not arrived"
        tensor, self._tensor = self._tensor, None
        if self._spec is not None and tensor is not None:
            self._spec.check(tensor, "a received tensor")
        return tensor
