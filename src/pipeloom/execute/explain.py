"""What went wrong on a rank, with the place in its row."""

from pipeloom.errors import ActionError, BoundaryError, PeerLostError, RunError, StallError
from pipeloom.schedule import Schedule
from pipeloom.schedule.window import window


def explained(schedule: Schedule, rank: int, slot: int, what: str, error: Exception) -> RunError:
    """The error with what was done and the rows around it.

    Args:
        schedule: that runs.
        rank: of the row.
        slot: place in it, or behind it.
        what: was done there.
        error: that came of it; a ``PeerLostError``, ``StallError`` or ``BoundaryError`` stays one.
    """
    place = f"rank {rank}, slot {slot}, {what}"
    rows = window(schedule.rows, rank, slot)
    if isinstance(error, (PeerLostError, StallError, BoundaryError)):
        return type(error)(f"{place}: {error}\n{rows}")
    return ActionError(f"{place} failed: {type(error).__name__}: {error}\n{rows}")
