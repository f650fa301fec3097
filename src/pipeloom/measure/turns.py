"""Times for how long the operating system lets a process run while others wait for its core."""

from collections.abc import Callable

_SHORTEST_GAP_S = 2e-4
"""Between two readings of the clock, if another process ran meanwhile; an interrupt takes less."""


def turns_of(clock: Callable[[], float], seconds: float) -> list[float]:
    """Read a clock for some seconds, and divide them where the process did not run.

    Examples:
        >>> from itertools import accumulate
        >>> ticks = [0.0, *[1e-4] * 20, 4e-3, *[1e-4] * 40, 4e-3, *[1e-4] * 20]
        >>> [round(turn, 6) for turn in turns_of(iter(accumulate(ticks)).__next__, 0.015)]
        [0.004]

    Returns:
        Seconds of each turn, without the first and the last one, which are cut off.
    """
    last = begin = clock()
    end = begin + seconds
    turns: list[float] = []
    while last < end:
        now = clock()
        if now - last > _SHORTEST_GAP_S:
            turns.append(last - begin)
            begin = now
        last = now
    return turns[1:]
