"""The colors of all pictures: timelines, charts, the report page, the playground, the documentation.

The hues are Paul Tol's scheme "muted" (Colour Schemes, SRON/EPS/TN/09-002, issue 3.2, 2021), made for readers with any
kind of color vision. A hue shows the kind of an action; on the compute lane its tone shows the stage among the rank's
stages, from the first (dark) to the last (light). This module needs no drawing library.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

Color = tuple[float, float, float]
"""Red, green and blue from 0 to 1, in sRGB."""


def channels(color: str) -> Color:
    """Red, green and blue of a color like ``#88ccee``."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def mix(color: str, other: str, share: float) -> str:
    """A mixture of two colors, ``share`` of it ``other``."""
    parts = (a + (b - a) * share for a, b in zip(channels(color), channels(other), strict=True))
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)


PAPER, ROW = "#ffffff", "#f2f4f6"
"""Backgrounds of a picture, and of a rank's row, which shows where the rank is idle."""
DARK_PAPER, DARK_ROW = "#14191f", "#1f262e"
_IDLE, _DARK_IDLE = "#c9d0d8", "#4a5663"
INK, DARK_INK = "#1f2a37", "#e4e9ef"

HUES: Mapping[str, str] = {
    "forward": "#88ccee",
    "backward": "#117733",
    "input-gradient": "#999933",
    "weight-gradient": "#882255",
    "recompute": "#ddcc77",
    "message": "#aa4499",
    "gather": "#44aa99",
    "reduce": "#332288",
    "move": "#cc6677",
    "update": "#000000",
}
"""The colors of ``Kind.color``: Tol's nine, and black, which is white on a dark background."""
SERIES = ("#332288", "#cc6677", "#117733", "#aa4499", "#999933", "#44aa99", "#882255")
"""Colors of the lines of a chart, in this order; their markers differ, too."""
MEASURED, PREDICTED, BAND, NEUTRAL = HUES["reduce"], HUES["weight-gradient"], HUES["recompute"], "#a9afb7"
"""Colors of measurements, of predictions, of a range or front behind curves, and of other programs."""

_FIRST_FORWARD, _LAST_FORWARD = mix("#88ccee", "#4477aa", 0.2), mix("#88ccee", PAPER, 0.4)
"""Tones of forwards of a rank's first and last stage. The hue is light, so the first is mixed with blue of Tol's scheme
"bright"."""
_TONES = {
    "backward": (0.35, 0.1),
    "input-gradient": (0.2, 0.08),
    "weight-gradient": (0.25, 0.12),
    "recompute": (0.05, 0.3),
}
"""Share of black in the first stage's tone, and of white in the last stage's, of other kinds of compute. For prints in
gray, every forward is lighter than any input gradient, and that is lighter than any weight gradient or whole backward.
"""
_DARK_TONES = 0.32
"""Share of white in the last stage's tone on a dark background, where nothing can be darker than its hue."""
_VISIBLE = 3.0
"""Least contrast of a shape with its background: WCAG 2.2, success criterion 1.4.11."""


class Fill(NamedTuple):
    """Colors of a box, as hexadecimal text.

    Attributes:
        fill: of the box on a light background.
        ink: of text in it.
        dark_fill: of the box on a dark background, with sufficient contrast.
        dark_ink: of text in that.
    """

    fill: str
    ink: str
    dark_fill: str
    dark_ink: str


@lru_cache(maxsize=1024)
def fill_of(name: str, place: int = 0, num_places: int = 1) -> Fill:
    """The colors of a box.

    Args:
        name: a key of ``HUES``.
        place: index of its stage among the stages of its rank.
        num_places: number of stages of that rank.
    """
    hue, share = HUES[name], place / max(num_places - 1, 1)
    light, dark = hue, DARK_INK if name == "update" else _visible(hue)
    if num_places > 1 and name == "forward":
        light = dark = mix(_FIRST_FORWARD, _LAST_FORWARD, share)
    # Other kinds have one tone: updates in gray would be close to weight gradients.
    elif num_places > 1 and name in _TONES:
        black, white = _TONES[name]
        light = mix(mix(hue, "#000000", black), mix(hue, PAPER, white), share)
        dark = mix(dark, PAPER, _DARK_TONES * share)
    return Fill(light, _ink_on(light), dark, _ink_on(dark))


def _visible(color: str) -> str:
    """A color, lighter as far as a dark background needs it."""
    found, white = color, 0.0
    while contrast(found, DARK_ROW) < _VISIBLE:
        white += 0.02
        found = mix(color, PAPER, white)
    return found


def contrast(one: str, other: str) -> float:
    """Contrast ratio as defined by WCAG 2.2, from 1 to 21."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def page_colors() -> tuple[dict[str, str], dict[str, str]]:
    """Name -> color of a light page, and of a dark page: the CSS variables of ``report/colors.css``."""
    fills = {name: fill_of(name) for name in HUES}
    light = {name: fill.fill for name, fill in fills.items()} | {"idle": _IDLE}
    return light, {name: fill.dark_fill for name, fill in fills.items()} | {"idle": _DARK_IDLE}


def _ink_on(color: str) -> str:
    return max("#000000", "#ffffff", key=lambda ink: contrast(ink, color))


def _luminance(color: str) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
