"""What the pictures of ``docs/schedules`` show: for each page one schedule, small enough to read its boxes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeloom.cost.costs import UniformCosts
from pipeloom.generate import make_schedule
from pipeloom.schedule import Schedule
from pipeloom.words import count


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        page: name of the page that shows it.
        title: its headline.
        schedule: makes what is drawn.
        costs: what it is drawn with.
    """

    page: str
    title: str
    schedule: Callable[[], Schedule]
    costs: UniformCosts


def _family(name: str, pp: int, num_microbatches: int, loops: int = 1, **sizes: Any) -> Picture:
    words = [count(pp, "rank"), count(num_microbatches, "micro-batch")]
    words += [f"{loops} stages on each rank"] if loops > 1 else []
    words += [f"{key.replace('_', ' ')} {value}" for key, value in sizes.items()]
    make = partial(make_schedule, name, pp=pp, num_microbatches=num_microbatches, loops=loops, **sizes)
    return Picture(name, f"{name}: {', '.join(words)}", make, UniformCosts(1 / loops, 2 / loops))


PICTURES = (
    _family("gpipe", pp=4, num_microbatches=8),
    _family("1f1b", pp=4, num_microbatches=8),
    _family("breadth-first", pp=4, loops=4, num_microbatches=8),
    _family("depth-first", pp=4, loops=2, num_microbatches=8),
    _family("hybrid", pp=4, loops=2, num_microbatches=12, group_size=6),
)
