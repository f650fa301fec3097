"""An operation that runs beside a rank's compute, and how to wait for it."""

from torch import Tensor

from pipeloom.errors import StallError
from pipeloom.execute.clock import Mark


class UnderWay:
    """An asynchronous operation: a message, a collective, or a move.

    Attributes:
        begin: start time, set at the end. For a message the host time at which it was posted (the transfer starts
            later, when both sides are ready and the edge is free); for others a mark of their lane's clock.
        end: time of completion, in the same unit.
    """

    begin: Mark = None
    end: Mark = None

    def is_done(self) -> bool:
        """Whether its tensors may be used or freed; on CUDA by work that is issued after this call."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:  # noqa: ARG002  where the device orders everything, the host never waits
        """Wait until it is finished; ``False`` if that takes longer than ``timeout_s``."""
        return self.is_done()

    def has_passed(self) -> bool:
        """Whether it is finished, for other threads: without waiting on the host or on a stream."""
        return self.is_done()

    def take(self) -> Tensor | None:
        """After its end: the tensor of a receive, once, whose reference it drops; ``None`` for others.

        Raises:
            PeerLostError: another rank ended.
            BoundaryError: the tensor does not have the agreed spec.
        """
        return None


def finish(pending: UnderWay, timeout_s: float) -> None:
    """Wait for an operation outside a step, and drop its result.

    Raises:
        PeerLostError: another rank ended.
        StallError: it took longer than ``timeout_s``.
    """
    if not pending.is_done() and not pending.wait(timeout_s):
        raise StallError(f"timed out after {timeout_s:g} s, waiting for another rank")
    pending.take()
