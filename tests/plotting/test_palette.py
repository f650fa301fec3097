"""The palette: for readers with any color vision, on light and dark grounds, and in print."""

import re
from importlib.resources import files
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from pipeloom.plotting.palette import (
    DARK_PAPER,
    DARK_ROW,
    HUES,
    MEASURED,
    PAPER,
    PREDICTED,
    ROW,
    SERIES,
    channels,
    contrast,
    fill_of,
    page_colors,
)
from pipeloom.schedule.kinds import COMPUTE_LANE_KINDS, KINDS, Kind

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# IEEE TVCG 15 (6), 2009: the matrices of severity 1, for linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = TO_XYZ @ np.ones(3)


def seen(color, vision):
    """CIELAB coordinates of a color as somebody with this vision sees it."""
    parts = np.array(channels(color))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    ratio = TO_XYZ @ np.clip(VISIONS[vision] @ linear, 0, 1) / WHITE
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def difference(one, other, vision):
    """CIE 1976 color difference; about 2.3 is just noticeable."""
    return float(np.linalg.norm(seen(one, vision) - seen(other, vision)))


COMPUTE = sorted({kind.color for kind in COMPUTE_LANE_KINDS})
LANES = [COMPUTE, ["gather", "reduce"], ["message", "move"]]
GROUNDS = {"light": (0, ROW, PAPER), "dark": (2, DARK_ROW, DARK_PAPER)}


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("names", LANES)
def test_categories_of_a_lane_differ_for_every_color_vision(names, vision, ground):
    which = GROUNDS[ground][0]
    for one, other in combinations(names, 2):
        assert difference(fill_of(one)[which], fill_of(other)[which], vision) > 15, (one, other)
    # Tones change lightness, in which some categories differ most.
    tones = {name: [fill_of(name, place, 4)[which] for place in range(4)] for name in names}
    for one, other in combinations(names, 2):
        assert min(difference(*pair, vision) for pair in product(tones[one], tones[other])) > 8, (one, other)


@pytest.mark.parametrize("vision", VISIONS)
def test_lines_of_a_chart_differ_from_the_next_ones(vision):
    assert min(difference(*pair, vision) for pair in pairwise(SERIES)) > 20


def test_forwards_and_backwards_differ_in_print():
    forward, backward = (seen(fill_of(name).fill, "normal")[0] for name in ("forward", "backward"))
    assert forward - backward > 30
    tones = {name: [seen(fill_of(name, place, 4).fill, "normal")[0] for place in range(4)] for name in COMPUTE}
    # (lighter, darker, by how much): a step's order is legible without colors and without letters.
    for lighter, darker, least in (
        ("forward", "backward", 20),
        ("forward", "input-gradient", 8),
        ("input-gradient", "weight-gradient", 8),
        ("forward", "weight-gradient", 20),
    ):
        assert min(tones[lighter]) - max(tones[darker]) > least, (lighter, darker)


@pytest.mark.parametrize("num_places", [1, 2, 4, 16])
def test_text_in_a_box_and_a_box_on_a_dark_row_have_contrast(num_places):
    for name in HUES:
        for place in range(num_places):
            found = fill_of(name, place, num_places)
            assert contrast(found.fill, found.ink) >= 4.5
            assert contrast(found.dark_fill, found.dark_ink) >= 4.5
            assert contrast(found.dark_fill, DARK_ROW) >= 3


def test_tones_become_lighter_from_stage_to_stage():
    for name, (which, *_) in product(COMPUTE, GROUNDS.values()):
        lightness = [seen(fill_of(name, place, 4)[which], "normal")[0] for place in range(4)]
        assert all(after - before > 1 for before, after in pairwise(lightness)) or name == "update"


def test_every_kind_has_a_color():
    assert {kind.color for kind in KINDS} == set(HUES)
    assert Kind.EVICT.color == Kind.RELOAD.color == Kind.SWAP_IN.color == "move"


def test_text_of_a_page_has_contrast_in_both_modes_and_kinds_have_their_colors():
    sheet = (files("pipeloom.report") / "colors.css").read_text(encoding="utf-8")
    modes = [dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in re.findall(r"\{([^{}]*)\}", sheet)]
    assert len(modes) == 2
    for mode, colors in zip(modes, page_colors(), strict=True):
        assert colors.items() <= mode.items()
        for ink in ("ink", "muted", "measured", "predicted"):
            assert all(contrast(mode[ink], mode[ground]) >= 4.5 for ground in ("paper", "panel", "row", "lane")), ink
        assert contrast(mode["focus"], mode["paper"]) >= 3
    assert (modes[0]["measured"], modes[0]["predicted"]) == (MEASURED, PREDICTED)
    assert (modes[0]["row"], modes[1]["row"], modes[1]["paper"]) == (ROW, DARK_ROW, DARK_PAPER)


def test_pages_use_no_color_that_is_not_defined():
    """A browser draws an undefined one black, without a message."""
    sources = [
        file.read_text(encoding="utf-8")
        for package in ("pipeloom.report", "pipeloom.playground")
        for file in files(package).iterdir()
        if file.name.endswith((".css", ".js", ".html"))
    ]
    used = {name for text in sources for name in re.findall(r"var\(--([\w-]+)", text)}
    defined = {name for text in sources for name in re.findall(r"--([\w-]+)[\"']?\s*[:,]", text)}
    assert used
    assert used <= defined
