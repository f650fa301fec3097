"""What the planner may do to a layout beside recomputing layers: strategies by name, and what each one offers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.planner.question import Question
from pipeloom.planner.settle import Candidate
from pipeloom.planner.space import Arrangement, Leaf
from pipeloom.predict.step import SimulatedStep
from pipeloom.registry import Registry


class Left(NamedTuple):
    """What a search leaves to strategies.

    Attributes:
        arrangements: of the question.
        too_large: leaves that do not fit, or fit with fewer layers recomputed.
        limit_s: seconds of the fastest step that is known; what takes longer is not looked for.
    """

    arrangements: Iterable[Arrangement]
    too_large: Sequence[Leaf]
    limit_s: float


def _nothing(_: Question) -> None:
    return None


def _no_steps(_: Candidate) -> Iterator[SimulatedStep]:
    return iter(())


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A way to make room for activations or stages, or to make a step faster, which no bound covers.

    Attributes:
        summary: one line for people.
        without: title of the best layout without it, where the best of all has it.
        applies: leaves to which it may be applied, of those that a search leaves. The search names the strategy in
            their ``way`` before it estimates and builds them.
        estimate: seconds of a leaf's step, about; infinite where the strategy does not help. A few leaves are built.
        build: a leaf with everything decided; ``None`` if it does not fit in this way.
        is_in: whether a step has it.
        refine: further steps from a candidate, if it is among the best; for what takes long.
        hint: where nothing fits, what somebody should know about it.
        limit: why it applies to no layout of a question; ``None`` if it may.
        programs: names of training programs that run it although their files do not name it.
    """

    summary: str
    without: str
    applies: Callable[[Left], Iterable[Leaf]]
    estimate: Callable[[Leaf], float]
    build: Callable[[Leaf], Candidate | None]
    is_in: Callable[[SimulatedStep], bool]
    refine: Callable[[Candidate], Iterator[SimulatedStep]] = _no_steps
    hint: Callable[[Question], str | None] = _nothing
    limit: Callable[[Question], str | None] = _nothing
    programs: tuple[str, ...] = ()


STRATEGIES: Registry[Strategy] = Registry("strategy", "pipeloom.strategies", Strategy)
"""Every strategy by name."""
