"""The colors of all pictures: timelines, charts, the report page, the playground, the documentation.

The hues are Paul Tol's scheme "muted" (Colour Schemes, SRON/EPS/TN/09-002, issue 3.2, 2021), made for readers with any
kind of color vision. A hue shows what an action does; on the compute lane its tone shows which of the rank's stages it
belongs to, from the first (dark) to the last (light). It needs no drawing library.
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
    """A color with so much of another one in it."""
    parts = (a + (b - a) * share for a, b in zip(channels(color), channels(other), strict=True))
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)


PAPER, ROW = "#ffffff", "#f2f4f6"
"""The ground of a picture, and of a rank's row: where nothing covers it, the rank is idle."""
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
"""The colors that the table of kinds names (``Kind.color``): Tol's nine, and black, which is white on a dark ground."""
SERIES = ("#332288", "#cc6677", "#117733", "#aa4499", "#999933", "#44aa99", "#882255")
"""Lines of a chart, in this order; they have markers of their own, too."""
MEASURED, PREDICTED, BAND, NEUTRAL = HUES["reduce"], HUES["weight-gradient"], HUES["recompute"], "#a9afb7"
"""What was measured, what was predicted, a range or a front behind curves, and what others did."""

_FIRST_FORWARD, _LAST_FORWARD = mix("#88ccee", "#4477aa", 0.45), mix("#88ccee", PAPER, 0.35)
"""Tones of a rank's first and last stage. Forwards are light: theirs begin with some of the scheme "bright"'s blue."""
_OTHER_TONES = 0.32
"""White in the last stage's tone of other kinds; with more, pale input gradients look like recomputation."""
_VISIBLE = 3.0
"""Contrast of a shape with its ground: WCAG 2.2, success criterion 1.4.11."""


class Fill(NamedTuple):
    """Colors of a box, as hexadecimal text.

    Attributes:
        fill: on a light ground.
        ink: of text in it.
        dark_fill: on a dark ground, bright enough to be seen there.
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
        place: number of its stage among the stages of its rank.
        num_places: stages of that rank.
    """
    first = last = HUES[name]
    if num_places > 1 and name == "forward":
        first, last = _FIRST_FORWARD, _LAST_FORWARD
    # An update belongs to all of a rank's stages, and gray would be close to the tones of weight gradients.
    elif name != "update":
        last = mix(first, PAPER, _OTHER_TONES)
    light = mix(first, last, place / max(num_places - 1, 1))
    dark, white = DARK_INK if name == "update" else light, 0.0
    while contrast(dark, DARK_ROW) < _VISIBLE:
        white += 0.02
        dark = mix(light, PAPER, white)
    return Fill(light, _ink_on(light), dark, _ink_on(dark))


def contrast(one: str, other: str) -> float:
    """Contrast ratio as WCAG 2.2 defines it, from 1 to 21."""
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def page_colors() -> tuple[dict[str, str], dict[str, str]]:
    """Name -> color, of a light page and of a dark one: what ``report/colors.css`` has as CSS variables."""
    fills = {name: fill_of(name) for name in HUES}
    light = {name: fill.fill for name, fill in fills.items()} | {"idle": _IDLE}
    return light, {name: fill.dark_fill for name, fill in fills.items()} | {"idle": _DARK_IDLE}


def _ink_on(color: str) -> str:
    return max("#000000", "#ffffff", key=lambda ink: contrast(ink, color))


def _luminance(color: str) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
