"""What the pictures of ``docs/schedules`` show: for each page one schedule, small enough to read its boxes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeloom.cost.costs import Costs
from pipeloom.families import make_schedule
from pipeloom.passes import balance, lower, offload
from pipeloom.passes.lower_stage_swaps import add_stage_swaps, add_updates
from pipeloom.schedule import Schedule
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.terminal.words import count


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
    costs: Costs


def _family(name: str, pp: int, num_microbatches: int, loops: int = 1, **sizes: Any) -> Picture:
    words = [count(pp, "rank"), count(num_microbatches, "micro-batch")]
    words += [f"{loops} stages on each rank"] if loops > 1 else []
    words += [f"{key.replace('_', ' ')} {value}" for key, value in sizes.items()]
    make = partial(make_schedule, name, pp=pp, num_microbatches=num_microbatches, loops=loops, **sizes)
    return Picture(name, f"{name}: {', '.join(words)}", make, Costs(1 / loops, 2 / loops))


def _changed(page: str, title: str, schedule: Callable[[], Schedule], **costs: Any) -> Picture:
    return Picture(page, title, schedule, Costs(**({"forward_s": 1.0, "backward_s": 2.0} | costs)))


def _swapped() -> Schedule:
    plain = make_schedule("breadth-first", pp=1, loops=6, num_microbatches=4)
    return add_stage_swaps(add_updates(lower(plain), "at once"), max_resident=2)


_PLAIN = {"pp": 4, "num_microbatches": 8}
PICTURES = (
    _family("gpipe", **_PLAIN),
    _family("1f1b", **_PLAIN),
    _family("breadth-first", **_PLAIN, loops=4),
    _family("depth-first", **_PLAIN, loops=2),
    _family("hybrid", pp=4, loops=2, num_microbatches=12, group_size=6),
    _family("zb-h1", **_PLAIN),
    _family("zb-h2", pp=4, num_microbatches=12),
    _family("interleaved-zb", **_PLAIN, loops=2),
    _family("zb-v", **_PLAIN, loops=2),
    _family("v-half", **_PLAIN, loops=2),
    _family("v-min", **_PLAIN, loops=2),
    _family("dualpipe-v", pp=4, num_microbatches=10, loops=2),
    _family("zb-1p", **_PLAIN),
    _family("zb-2p", pp=4, num_microbatches=12),
    _changed(
        "balanced",
        "1f1b, balanced: 8 ranks, 12 micro-batches; moves take a forward",
        lambda: balance(make_schedule("1f1b", pp=8, num_microbatches=12)),
        evict_s=1.0,
    ),
    _changed(
        "offload",
        "1f1b, at most 3 inputs on a rank, the others on the host: 4 ranks, 8 micro-batches",
        lambda: offload(make_schedule("1f1b", **_PLAIN), budget_bytes=[3.0] * 4),
        offload_s=1.0,
    ),
    _changed(
        "recompute",
        "1f1b, keep 2 3 2 1: 4 ranks, 8 micro-batches",
        lambda: make_schedule("1f1b", **_PLAIN, keep=(2, 3, 2, 1)),
    ),
    _changed(
        "slices",
        "1f1b in four token slices: 4 ranks, 4 micro-batches",
        lambda: make_schedule("1f1b", pp=4, num_microbatches=4, num_slices=4),
        forward_s=0.25,
        backward_s=0.5,
    ),
    _changed(
        "swapping",
        "six stages through one device with room for two: 4 micro-batches",
        _swapped,
        move=Amounts(weights=1.0, gradient=1.0, state=2.0),
        update_s=1.0,
    ),
)
