"""docs/schedules: its tables are what the code computes, and every family has its page and its picture."""

import re
from itertools import product

import pytest

from pipeloom.generate import FAMILIES
from reproduction.tables import fill
from schedule_pictures import PICTURES
from schedules import FACTORS, FOLDER, PAGE, RANKS, tables

PAGES = sorted(file.stem for file in FOLDER.glob("*.md") if file != PAGE)
PARTS = ("**Order.**", "**Bubble.**", "**Memory.**", "**Use it when**", "**Not when**")


def test_the_tables_are_computed_again():
    found = tables()
    assert len(found) == len(list(product(RANKS, FACTORS)))
    text = PAGE.read_text(encoding="utf-8")
    assert fill(text, found) == text


def test_every_family_that_trains_has_a_page():
    assert {name for name, family in FAMILIES.items() if family.has_backward} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_order_bubble_memory_and_use_and_shows_a_picture(page):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert [part for part in PARTS if part not in text] == []
    assert f"]({page}.png)" in text
    assert (FOLDER / f"{page}.png").stat().st_size > 0
    assert f"({page}.md)" in PAGE.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / link).exists(), link


def test_every_page_has_its_picture_made():
    assert sorted(picture.page for picture in PICTURES) == PAGES
