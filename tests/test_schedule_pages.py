"""docs/schedules: its tables are what the code computes, and every family has its page and its picture."""

import re

import pytest

from schedule_pictures import PICTURES
from schedules import FOLDER, PAGE, SIZES, own_families, table_of

PAGES = sorted(file.stem for file in FOLDER.glob("*.md") if file != PAGE)
PARTS = ("**Order.**", "**Bubble.**", "**Memory.**", "**Use it when**", "**Not when**")


@pytest.mark.parametrize("sizes", SIZES)
def test_a_table_is_computed_again(sizes):
    name, table = table_of(*sizes)
    assert f"<!-- {name} -->\n{table}\n<!-- end -->" in PAGE.read_text(encoding="utf-8")


def test_every_size_has_its_table():
    found = re.findall(r"^P = (\d+), M = (\d+):$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert tuple((int(pp), int(count)) for pp, count in found) == SIZES


def test_every_family_that_trains_has_a_page():
    assert set(own_families()) <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_order_bubble_memory_and_use_and_shows_a_picture(page):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert [part for part in PARTS if part not in text] == []
    assert f"]({page}.svg)" in text
    assert (FOLDER / f"{page}.svg").stat().st_size > 0
    assert f"({page}.md)" in PAGE.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / link).exists(), link


def test_every_page_has_its_picture_made():
    assert sorted(picture.page for picture in PICTURES) == PAGES


def test_every_page_has_a_command():
    commands = {
        page: (FOLDER / f"{page}.md").read_text(encoding="utf-8").count("    pipeloom schedule ") for page in PAGES
    }
    assert all(commands.values())
