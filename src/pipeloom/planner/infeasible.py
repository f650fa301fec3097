"""Diagnosis of questions without an answer: causes, missing memory, and similar questions with an answer."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import UserError
from pipeloom.planner.bounds import Floats
from pipeloom.planner.question import MOST, Question, layout_limits, why_not
from pipeloom.planner.search import search
from pipeloom.planner.space import Cut, Leaf, Sharding, arrangements, has_arrangement
from pipeloom.predict.step import SimulatedStep
from pipeloom.terminal.words import count
from pipeloom.workload.axes import IN_SENTENCES, Axes, axes, divisors


@dataclass(frozen=True)
class Closest:
    """The layout that lacks the least memory, if nothing fits.

    Attributes:
        leaf: the layout, with a single sharding level.
        least_bytes: lower bound of the memory of its fullest device, the one with the least free memory.
        room_bytes: of the device, without the headroom.
        missing_bytes: bytes of it that the device lacks; 0 if the bound fits but no schedule does.
        sequence_bytes: bytes of it that shorter sequences would not need (compared with sequences of one token).
        ways_out: (change of the question with which something fits, best step).
    """

    leaf: Leaf
    least_bytes: float
    room_bytes: float
    missing_bytes: float
    sequence_bytes: float
    ways_out: list[tuple[str, SimulatedStep]] = field(default_factory=list)


MOST_DOUBLINGS = 6
"""Most doublings of the devices, and most searches with halved sequences, to find a layout that fits."""
_EVEN = 128
"""Shorter sequences are multiples of this many tokens, so that tensor axes divide them."""
_SLACK = 1e-9
"""Relative rounding error of sums in another order."""
MOST_NUMBERS = 1000
"""Numbers of devices to try on each side of the question's."""


def closest(question: Question) -> Closest:
    """The layout that lacks the least memory, without ``ways_out``, which take searches of their own.

    Args:
        question: which has layouts, none of which fits.
    """
    leaf = _least(question)
    assert leaf is not None, "the question has layouts, and one stage's schedules have closed forms"
    held, rooms = _held_bytes(leaf), leaf.cut.memory.capacity_bytes
    fullest = int((held - rooms).argmax())
    shortest = _least(replace(_like(question, leaf), seq=leaf.cut.run.tp))
    rest = held[fullest] if shortest is None else _held_bytes(shortest)[fullest]
    return Closest(
        leaf=leaf,
        least_bytes=float(held[fullest]),
        room_bytes=float(rooms[fullest]),
        missing_bytes=max(0.0, float(held[fullest] - rooms[fullest])),
        sequence_bytes=float(held[fullest] - rest),
    )


def _least(question: Question) -> Leaf | None:
    """The layout that lacks the least memory, by branch and bound; ``None`` if there is none."""
    best: Leaf | None = None
    least = float("inf")
    for arrangement in sorted(arrangements(question)[0], key=lambda one: one.missing_bytes):
        if best is not None and arrangement.missing_bytes > least + _SLACK * abs(least):
            break
        for cut in arrangement.cuts:
            if best is not None and cut.missing_bytes > least + _SLACK * abs(least):
                continue
            for leaf in _leanest(cut):
                missing = _missing_bytes(leaf)
                if missing < least:
                    best, least = leaf, missing
    return best


def _missing_bytes(leaf: Leaf) -> float:
    return leaf.cut.memory.missing_bytes(_held_bytes(leaf))


def _like(question: Question, leaf: Leaf) -> Question:
    return question.limited(**layout_limits(leaf.cut.run, leaf.choice.family))


def ways_out(question: Question, near: Closest) -> Iterator[tuple[str, SimulatedStep]]:
    """Changes of the question with which something fits, each with its best step.

    Args:
        question: with which nothing fits.
        near: the layout that lacks the least memory.
    """
    alike = _like(question, near.leaf)
    for find in (
        partial(_without_headroom, near=near),
        _with_more_devices,
        _with_context,
        partial(_with_shorter_sequences, alike=alike),
    ):
        found = find(question)
        if found is not None:
            yield found


def _leanest(cut: Cut) -> Iterator[Leaf]:
    """Every schedule of a cut with every single sharding level, where the stage inputs have a closed form."""
    return (
        Leaf(cut, Sharding((level,), sharding.replicate), choice)
        for sharding in cut.shardings
        for level in sharding.levels
        for choice in cut.choices
        if choice.stage_inputs is not None
    )


def _held_bytes(leaf: Leaf) -> Floats:
    """For each rank a lower bound of the bytes that a device holds."""
    (level,) = leaf.sharding.levels
    return leaf.cut.memory.sharded(level, leaf.sharding.replicate).held_bytes(leaf.stage_inputs)


def _without_headroom(question: Question, near: Closest) -> tuple[str, SimulatedStep] | None:
    room = near.room_bytes
    if question.headroom == 0 or near.least_bytes > room / (1 - question.headroom):
        return None
    step = search(replace(question, headroom=0.0), 1).best
    return None if step is None else ("no headroom (--headroom 0)", step)


def _with_more_devices(question: Question) -> tuple[str, SimulatedStep] | None:
    for doubling in range(1, MOST_DOUBLINGS + 1):
        number = question.num_devices * 2**doubling
        if question.cluster.lack(number) is not None:
            return None
        step = search(replace(question, num_devices=number), 1).best
        if step is not None:
            return f"{number} devices", step
    return None


def _with_context(question: Question) -> tuple[str, SimulatedStep] | None:
    other = question.with_context_axis
    step = None if other is None else search(other, 1).best
    return None if step is None else ("a context axis (--cp)", step)


def _with_shorter_sequences(question: Question, alike: Question) -> tuple[str, SimulatedStep] | None:
    """The longest of the halved sequences with which something fits.

    Args:
        question: with which nothing fits.
        alike: the same, limited to the layout that lacks the least memory; lengths for which it does not fit are not
            searched.
    """
    tried, seq = 0, _half(question.seq)
    while seq >= 1 and tried < MOST_DOUBLINGS:
        least = _least(replace(alike, seq=seq))
        if least is None or _missing_bytes(least) <= 0:
            tried += 1
            step = search(replace(question, seq=seq), 1).best
            if step is not None:
                return f"sequences of {seq:,} tokens", step
        seq = _half(seq)
    return None


def _half(seq: int) -> int:
    """Half of a length, or a little less."""
    half = seq // 2
    return half - half % _EVEN if half > _EVEN else half


def no_layout(question: Question, excluded: Counter[str]) -> UserError:
    """The error for a question without layouts: causes, and similar batches and numbers of devices with layouts."""
    problems = [f"{cause}: {count(number, 'combination')} of axes" for cause, number in excluded.most_common()]
    for name in IN_SENTENCES:
        sizes = getattr(question.limits, name)
        if sizes is not None and all(question.num_devices % size for size in sizes if size > 0):
            found = ", ".join(map(str, sizes))
            problems.append(f"{name} must divide the number of devices, {question.num_devices}, found {found}")
    if question.limits.names:
        problems.append(f"limits are set on {', '.join(question.limits.names)}; leave some of them out")
    # Where axes divide both, other devices and batches have as few schedules.
    is_divided = has_arrangement(question)
    if is_divided:
        problems.append("the axes divide both, but no family that is searched has a schedule with such stages on them")
    batches = list[int]() if is_divided else _near_batches(question)
    if batches:
        problems.append(f"the batch may be {' or '.join(map(str, batches))} instead of {question.global_batch}")
    numbers = list[int]() if is_divided else near_devices(question)
    if numbers:
        problems.append(f"there may be {' or '.join(map(str, numbers))} devices instead of {question.num_devices}")
    what = f"{count(question.num_devices, 'device')} and a batch of {count(question.global_batch, 'sequence')}"
    return UserError("\n  - ".join([f"no layout divides {what}:", *problems]))


def _near_batches(question: Question) -> list[int]:
    """The next smaller and the next larger batch that a data axis divides."""
    batch, number = question.global_batch, question.num_devices
    # A batch that every data axis divides, so that only the model restricts the axes.
    anything = replace(question, global_batch=number)
    sizes = {
        sizes.dp
        for sizes in axes(number, divisors(number), question.context_sizes)
        if question.limits.allows(**sizes._asdict()) and why_not(anything, sizes) is None
    }
    below = max((batch // dp * dp for dp in sizes), default=0)
    above = min((-(-batch // dp) * dp for dp in sizes), default=0)
    near = [number for number in dict.fromkeys((below, above)) if 0 < number <= MOST]
    return [number for number in near if has_arrangement(replace(question, global_batch=number))]


def near_devices(question: Question) -> list[int]:
    """The next smaller and the next larger number of devices that have a layout, in whole nodes if possible.

    The candidates are products of the axes that model and batch allow, since there may be millions of numbers.
    """
    limits, batch, number = question.limits, question.global_batch, question.num_devices
    most = min(2 * number, question.cluster.num_devices or 2 * number, MOST)
    tps = [
        tp for tp in range(1, question.shape.heads + 1) if limits.allows(tp=tp) and not why_not(question, Axes(tp=tp))
    ]
    pps = [
        pp for pp in range(1, question.shape.layers + 3) if limits.allows(pp=pp) and not why_not(question, Axes(pp=pp))
    ]
    dps = [dp for dp in divisors(batch) if limits.allows(dp=dp)]
    replicas = np.unique(np.multiply.outer(question.context_sizes, np.array(dps, np.int64)))
    products = np.unique(np.multiply.outer(np.multiply.outer(tps, pps), replicas))

    def first(numbers: NDArray[np.int64]) -> int | None:
        few = numbers[:MOST_NUMBERS].tolist()
        return next((other for other in few if has_arrangement(replace(question, num_devices=other))), None)

    host = question.cluster.host_size
    near = list[int | None]()
    for side in (products[products < number][::-1], products[(products > number) & (products <= most)]):
        # Clusters allocate whole hosts.
        whole = side[side % host == 0] if number > host else side[:0]
        near.append(first(whole) or first(side))
    return [other for other in near if other is not None]
