"""PWEMoE's case (arXiv 2406.09770): the losses of merged models for preferences between two texts."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "pwemoe.md"
NAME = "pwemoe_front"
"""Trained (``benchmarks/merged_front.py``)."""
MODELS = ("base", "documentation", "headers")
CASES = ("300", "800")
"""Steps of the runs from the base."""
SEEDS = (0, 1, 2)
"""Of all runs and routers; the first one has all methods."""
INTERPOLATED, ARITHMETIC = "interpolation", "task arithmetic"
FEED_FORWARD = "routers of feed-forward blocks"
FROM_CONSTANTS, FROM_PREFERENCE = "routers of all blocks, from constants", "routers of all blocks, from the preference"
METHODS = (INTERPOLATED, ARITHMETIC, FEED_FORWARD, FROM_CONSTANTS, FROM_PREFERENCE)
SHOWN = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
"""Preferences in the table."""
Point = tuple[float, float]
"""Losses of both texts."""


def points(rows: Sequence[Row], steps: str, method: str, seed: int = SEEDS[0]) -> dict[float, Point]:
    """Preference for the first text, or the weight of task arithmetic -> losses."""
    return {
        float(row["preference"]): (float(row["documentation"]), float(row["headers"]))
        for row in rows
        if (row["steps"], row["method"], row["seed"]) == (steps, method, str(seed))
    }


def reference(rows: Sequence[Row], steps: str, seed: int = SEEDS[0]) -> Point:
    """The larger loss of each text among the models that were trained on one of both."""
    ends = points(rows, steps, INTERPOLATED, seed)
    return max(one[0] for one in (ends[0.0], ends[1.0])), max(one[1] for one in (ends[0.0], ends[1.0]))


def hypervolume(front: Iterable[Point], worst: Point) -> float:
    """The area of pairs of losses that some point is at least as good as, up to the worst ones.

    Examples:
        >>> hypervolume([(1.0, 3.0), (2.0, 1.0), (2.5, 2.0)], (4.0, 4.0))
        7.0
    """
    area, height = 0.0, worst[1]
    for first, second in sorted(front):
        if first < worst[0] and second < height:
            area += (worst[0] - first) * (height - second)
            height = second
    return area


def volume(rows: Sequence[Row], steps: str, method: str, seed: int = SEEDS[0]) -> float:
    """The hypervolume of a method's front."""
    return hypervolume(points(rows, steps, method, seed).values(), reference(rows, steps, seed))


def gains(rows: Sequence[Row], steps: str) -> list[float]:
    """By seed how much the front of routers is above that of interpolation."""
    return [volume(rows, steps, FROM_PREFERENCE, seed) - volume(rows, steps, INTERPOLATED, seed) for seed in SEEDS]


def middle(rows: Sequence[Row], steps: str, method: str, seed: int = SEEDS[0]) -> float:
    """The mean of both losses at equal preference; of task arithmetic the least over its weights."""
    own = points(rows, steps, method, seed)
    return min(map(fmean, own.values())) if method == ARITHMETIC else fmean(own[0.5])


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of the page."""
    numbers = {row["method"]: row["numbers"] for row in rows}
    models, lines = [], []
    for one in MODELS:
        cells = (points(rows, steps, one)[0.0] for steps in CASES)
        models.append([one, *(f"{loss:.3f}" for cell in cells for loss in cell)])
    for one in METHODS:
        cells = ((f"{volume(rows, steps, one):.3f}", f"{middle(rows, steps, one):.3f}") for steps in CASES)
        lines.append([one, numbers[one], *(text for cell in cells for text in cell)])
    front = []
    for preference in SHOWN:
        cells = [
            points(rows, CASES[-1], method)[preference] for method in (INTERPOLATED, FEED_FORWARD, FROM_PREFERENCE)
        ]
        front.append([f"{preference:g}", *(f"{first:.3f}, {second:.3f}" for first, second in cells)])
    both = (INTERPOLATED, FROM_PREFERENCE)
    by_seed = [
        [
            f"{steps} steps",
            str(seed),
            *(f"{volume(rows, steps, one, seed):.3f}" for one in both),
            f"{gain:.3f}",
            *(f"{middle(rows, steps, one, seed):.3f}" for one in both),
        ]
        for steps in CASES
        for seed, gain in zip(SEEDS, gains(rows, steps), strict=True)
    ]
    texts = [f"{text}, {steps} steps" for steps in CASES for text in MODELS[1:]]
    figures = [f"{figure}, {steps} steps" for steps in CASES for figure in ("hypervolume", "mean at equal preference")]
    return {
        "models": table(("model", *texts), models),
        "volumes": table(("weights from", "trained numbers", *figures), lines),
        "seeds": table(
            ("runs of", "seed", "interpolation", "routers", "gain", "its mean at equal preference", "that of routers"),
            by_seed,
        ),
        "front": table(("preference", INTERPOLATED, FEED_FORWARD, FROM_PREFERENCE), front),
    }
