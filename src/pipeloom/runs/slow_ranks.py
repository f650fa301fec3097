"""Ranks that compute for longer than their profile and the other ranks: how they are found, and their file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from pipeloom.errors import UserError
from pipeloom.runs.run_folder import SLOW_RANKS
from pipeloom.system.files import parse_json, read_text

_LIMIT = 1.5
"""Times the median of the other ranks from which on a rank is slow: other work on a host makes smaller differences."""


@dataclass(frozen=True)
class SlowRank:
    """A slow rank: its number, its host, and how many times as long as the others it computes."""

    rank: int
    host: str
    times: float

    def __str__(self) -> str:
        """In words."""
        return f"rank {self.rank} on {self.host} computes {self.times:.1f} times as long as the others"


def find_slow(seconds: Sequence[float], expected: Sequence[float]) -> dict[int, float]:
    """Slow ranks, with how many times as long as the others they compute.

    Each rank's seconds are divided by what is expected of it, so that uneven stages and a machine that is slow as a
    whole name no rank.

    Args:
        seconds: of compute in a step, by rank.
        expected: the same before the run; ranks with 0 are left out.
    """
    ratios = {rank: own / its for rank, (own, its) in enumerate(zip(seconds, expected, strict=True)) if its > 0}
    found: dict[int, float] = {}
    for rank, own in ratios.items():
        others = [value for other, value in ratios.items() if other != rank]
        usual = median(others) if others else 0.0
        if usual > 0 and own > _LIMIT * usual:
            found[rank] = own / usual
    return found


def slow_text(step: int, ranks: Sequence[SlowRank]) -> str:
    """Content of the file."""
    return json.dumps({"step": step, "ranks": [asdict(one) for one in ranks]}) + "\n"


def read_slow(folder: Path) -> tuple[SlowRank, ...]:
    """The slow ranks of a run; empty if there are none.

    Raises:
        UserError: the file is damaged.
    """
    file = folder / SLOW_RANKS
    if not file.is_file():
        return ()
    try:
        content = parse_json(read_text(file))
        return tuple(SlowRank(int(one["rank"]), str(one["host"]), float(one["times"])) for one in content["ranks"])
    except (ValueError, TypeError, KeyError, UserError) as error:
        raise UserError(f"cannot read {file}: expected ranks with rank, host and times; delete it") from error
