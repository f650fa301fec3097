"""``make seeds``: twelve systems, each with a page."""

from pathlib import Path

import pytest

import seeds

DOCS = Path(__file__).parents[2] / "docs"


def test_each_of_twelve_systems_has_its_page():
    assert len({seed.name for seed in seeds.SEEDS}) == len(seeds.SEEDS) == 12
    assert all((DOCS / seed.page).is_file() for seed in seeds.SEEDS)


@pytest.mark.parametrize(
    ("figure", "found"),
    [
        (seeds.swaps, "14 with 2 micro-batches, 14 with 32 micro-batches"),
        (seeds.traffic, "0.52 of the bytes of bfloat16"),
        (seeds.density, "5.1 times fewer FLOPs"),
    ],
)
def test_figures_are_computed(figure, found):
    assert found in figure()
