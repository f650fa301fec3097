"""docs/reproduction/ep_alm.md: its table is the data file, and its sentences hold."""

from reproduction import ep_alm
from reproduction.tables import fill, read_rows

ROWS = read_rows(ep_alm.NAME)
PAGE = ep_alm.PAGE.read_text(encoding="utf-8")


def test_the_table_is_the_rows():
    assert fill(PAGE, ep_alm.blocks(ROWS)) == PAGE


def test_the_sentences_hold():
    assert len(ROWS) == 3
    assert all(float(row["share"]) < 0.01 for row in ROWS)
    assert all(float(row["accuracy"]) >= 0.7 for row in ROWS)
    assert all(abs(float(row["withheld"]) - ep_alm.CHANCE) < 0.05 for row in ROWS)
    assert {row["frozen"] for row in ROWS} == {"equal"}
    assert {row["backwards"] for row in ROWS} == {"1 2 3"}
