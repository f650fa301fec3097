"""Failures of reading and writing checkpoints, as errors of this package."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeloom.errors import PeerLostError, PipeloomError
from pipeloom.execute.processes.world import network_reason


def _failure_of_ranks() -> Any:
    """DCP's exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


@contextmanager
def failures_as(what: str, kind: type[PipeloomError]) -> Iterator[None]:
    """Turn the failure of any rank into one error on all ranks, without torch's tracebacks in its message."""
    try:
        yield
    except _failure_of_ranks() as error:  # loaded only where something has failed
        rank, (cause, _) = next(iter(error.failures.items()))
        raise kind(f"{what}: {cause if isinstance(cause, PipeloomError) else f'rank {rank}: {cause}'}") from None
    except OSError as error:
        raise kind(f"{what}: {error}") from None
    # gloo raises a plain RuntimeError for a broken connection and for a timeout.
    except RuntimeError as error:
        raise PeerLostError(f"{what}: a process exited, or did not answer in time: {network_reason(error)}") from error
