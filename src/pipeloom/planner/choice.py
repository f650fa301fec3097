"""The order of layouts in which to choose: by predicted time, and by simplicity where times hardly differ."""

from collections.abc import Sequence

from pipeloom.planner.comparison import Alternative
from pipeloom.planner.error_bar import ErrorBar
from pipeloom.planner.strategies import strategy_of
from pipeloom.predict.step import SimulatedStep

SIMPLER = 0.005
"""By how much a simpler layout may be slower, by prediction, and still come first (docs/decisions/0069)."""


def is_tie(best: SimulatedStep, other: SimulatedStep, bar: ErrorBar) -> bool:
    """Whether the predicted step times of two layouts are a tie (``ErrorBar.tie``)."""
    return bar.of(best.run, other.run).is_tie(best.prediction.step_time_s, other.prediction.step_time_s)


def in_order(steps: Sequence[SimulatedStep], bar: ErrorBar) -> list[SimulatedStep]:
    """Layouts in the order in which to choose: the simplest of those that are hardly slower, then the others by time.

    Args:
        steps: the fastest first.
        bar: error of a comparison; simplicity never decides beyond it.
    """
    layouts = [_alternative(step) for step in steps]
    order = choice_order([step.prediction.step_time_s for step in steps], layouts, min(SIMPLER, bar.tie))
    return [steps[number] for number in order]


def simplest(steps: Sequence[SimulatedStep], bar: ErrorBar) -> SimulatedStep:
    """The simplest of the layouts that tie with the fastest, which is the first of them."""
    return min((step for step in steps if is_tie(steps[0], step, bar)), key=lambda step: _alternative(step).complexity)


def choice_order(times_s: Sequence[float], layouts: Sequence[Alternative], margin: float) -> list[int]:
    """Numbers of layouts in the order in which to choose.

    Those slower than the fastest by less than a margin are sorted by simplicity (``Alternative.complexity``), and the
    others follow by time.

    Args:
        times_s: predicted step times, in seconds.
        layouts: what decides how simple each is.
        margin: relative difference to the fastest.
    """
    by_time = sorted(range(len(times_s)), key=times_s.__getitem__)
    near = [number for number in by_time if times_s[number] / times_s[by_time[0]] - 1 < margin]
    return [*sorted(near, key=lambda number: layouts[number].complexity), *by_time[len(near) :]]


def _alternative(step: SimulatedStep) -> Alternative:
    return Alternative(step.run, step.knobs.choice.family, strategy_of(step), step.prediction.filled)
