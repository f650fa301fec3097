"""What to tell somebody whose question has no answer: what divides, what is missing, what would fit."""

from collections import Counter
from dataclasses import dataclass, replace

from pipeloom.errors import UserError
from pipeloom.planner.bounds import Floats
from pipeloom.planner.question import Question, axes, divisors
from pipeloom.planner.search import search
from pipeloom.planner.space import Leaf, Sharding, arrangements, why_not
from pipeloom.predict.step import SimulatedStep
from pipeloom.words import count


@dataclass(frozen=True)
class Closest:
    """Where nothing fits: the layout that comes closest.

    Attributes:
        leaf: that layout, with everything shared out that can be.
        least_bytes: that it needs at least on its fullest device, the one with the least room left.
        missing_bytes: of them that a device does not have; 0 if only a bound says that it would fit.
        sequence_bytes: of them those that shorter sequences would not need.
        ways_out: changes of the question with which something fits, each with its best step.
    """

    leaf: Leaf
    least_bytes: float
    missing_bytes: float
    sequence_bytes: float
    ways_out: tuple[tuple[str, SimulatedStep], ...]


MOST_DOUBLINGS = 6
"""How often devices are doubled, and sequences halved that bounds allow, to find something that fits."""
_EVEN = 128
"""Shorter sequences are multiples of so many tokens, which tensor axes divide."""


def closest(question: Question) -> Closest:
    """The layout that needs the least memory, and the smallest changes with which something fits.

    Args:
        question: which has layouts, none of which fits.
    """
    leaf = _least(question)
    assert leaf is not None
    held, rooms = _held_bytes(leaf), leaf.cut.memory.rooms
    fullest = int((held - rooms).argmax())
    alike = _only(question, leaf)
    shortest = _least(replace(alike, seq=leaf.cut.run.tp))
    rest = held[fullest] if shortest is None else _held_bytes(shortest)[fullest]
    ways_out = [found for found in (_with_more_devices(question), _with_shorter_sequences(question, alike)) if found]
    return Closest(
        leaf=leaf,
        least_bytes=float(held[fullest]),
        missing_bytes=max(0.0, float(held[fullest] - rooms[fullest])),
        sequence_bytes=float(held[fullest] - rest),
        ways_out=tuple(ways_out),
    )


def _least(question: Question) -> Leaf | None:
    """The layout that lacks least; ``None`` if there is none."""
    return min(_leanest(question), key=_missing_bytes, default=None)


def _missing_bytes(leaf: Leaf) -> float:
    return leaf.cut.memory.missing_bytes(_held_bytes(leaf))


def _only(question: Question, leaf: Leaf) -> Question:
    """The question with no other layout than one, but for its sharding."""
    run = leaf.cut.run
    return question.limited(
        tp=(run.tp,),
        pp=(run.pp,),
        dp=(run.dp,),
        loops=(run.loops,),
        micro_batch=(run.micro_batch,),
        families=(leaf.choice.family,),
        sequence_parallel=(run.sequence_parallel,),
    )


def _leanest(question: Question) -> list[Leaf]:
    """Every schedule of every cut, with every level of sharding by itself."""
    return [
        Leaf(cut, Sharding((level,), sharding.replicate), choice)
        for arrangement in arrangements(question)[0]
        for cut in arrangement.cuts()
        for sharding in cut.shardings
        for level in sharding.levels
        for choice in cut.choices
        if choice.stage_inputs is not None
    ]


def _held_bytes(leaf: Leaf) -> Floats:
    """For each rank what its devices hold at least."""
    (level,) = leaf.sharding.levels
    return leaf.cut.memory.sharded(level, leaf.sharding.replicate).held_bytes(leaf.stage_inputs)


def _with_more_devices(question: Question) -> tuple[str, SimulatedStep] | None:
    for doubling in range(1, MOST_DOUBLINGS + 1):
        number = question.num_devices * 2**doubling
        if question.cluster.lack(number) is not None:
            return None
        step = search(replace(question, num_devices=number), 1).best
        if step is not None:
            return f"{number} devices", step
    return None


def _with_shorter_sequences(question: Question, alike: Question) -> tuple[str, SimulatedStep] | None:
    """The longest sequences of the halved lengths with which something fits.

    Args:
        question: with which nothing fits.
        alike: the same, limited to the layout that needs least: lengths with which its bound is too large are passed
            over.
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
    """The error for a question that no layout divides: why, and which numbers near it would be divided."""
    problems = [f"{cause}: {count(number, 'combination')} of axes" for cause, number in excluded.most_common()]
    if question.limits.names:
        problems.append(f"limits are set on {', '.join(question.limits.names)}; leave some of them out")
    batches = _near_batches(question)
    if batches:
        problems.append(f"the batch may be {' or '.join(map(str, batches))} instead of {question.global_batch}")
    numbers = _near_devices(question)
    if numbers:
        problems.append(f"there may be {' or '.join(map(str, numbers))} devices instead of {question.num_devices}")
    what = f"{question.num_devices} devices and a batch of {question.global_batch} sequences"
    return UserError("\n  - ".join([f"no layout divides {what}:", *problems]))


def _data_axes(question: Question, num_devices: int) -> set[int]:
    """Sizes of the data axis that model and devices allow, whatever the batch."""
    anything = replace(question, num_devices=num_devices, global_batch=num_devices)
    return {
        dp
        for tp, pp, dp in axes(num_devices, divisors(num_devices))
        if question.limits.allows(tp=tp, pp=pp, dp=dp) and why_not(anything, tp, pp, dp) is None
    }


def _near_batches(question: Question) -> list[int]:
    """The next smaller and the next larger batch that a data axis divides."""
    batch, sizes = question.global_batch, _data_axes(question, question.num_devices)
    below = max((batch // dp * dp for dp in sizes), default=0)
    above = min((-(-batch // dp) * dp for dp in sizes), default=0)
    near = [number for number in dict.fromkeys((below, above)) if number > 0]
    return [number for number in near if arrangements(replace(question, global_batch=number))[0]]


def _near_devices(question: Question) -> list[int]:
    """The next smaller and the next larger number of devices with which a layout divides the batch."""

    def divides(number: int) -> bool:
        may = any(question.global_batch % dp == 0 for dp in _data_axes(question, number))
        return may and bool(arrangements(replace(question, num_devices=number))[0])

    number = question.num_devices
    below = next((other for other in range(number - 1, 0, -1) if divides(other)), None)
    most = min(2 * number, question.cluster.num_devices or 2 * number)
    above = next((other for other in range(number + 1, most + 1) if divides(other)), None)
    return [other for other in (below, above) if other is not None]
