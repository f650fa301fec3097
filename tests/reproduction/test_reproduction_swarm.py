"""docs/reproduction/swarm.md: its data file is computed again, its table is the data file, its sentences hold."""

from itertools import pairwise
from statistics import fmean

import pytest

from reproduction import swarm
from reproduction.tables import fill, read_rows


@pytest.mark.parametrize(("name", "rows"), [(swarm.NAME, swarm.traffic_rows), (swarm.PEERS, swarm.peers_rows)])
def test_the_data_file_is_what_is_computed_now(name, rows):
    assert read_rows(name) == [{name: str(value) for name, value in row.items()} for row in rows()]


def test_the_tables_of_the_page_are_the_data_files():
    text = swarm.PAGE.read_text(encoding="utf-8")
    blocks = swarm.traffic_blocks(read_rows(swarm.NAME)) | swarm.peers_blocks(read_rows(swarm.PEERS))
    blocks |= swarm.loss_blocks(read_rows(swarm.LOSS))
    assert fill(text, blocks) == text


def test_the_sentences_about_losses_hold():
    rows = read_rows(swarm.LOSS)
    coded, rounded = (
        [swarm.loss_changes(rows, kind, messages) for kind in ("training", "validation")]
        for messages in (swarm.CODED, swarm.ROUNDED)
    )
    assert [f"{max(map(abs, changes)):.2f}" for changes in coded] == ["0.71", "1.38"]
    assert [f"{fmean(changes):.2f}" for changes in coded] == ["0.36", "0.16"]
    assert [f"{max(map(abs, changes)):.2f}" for changes in rounded] == ["0.13", "0.48"]


def test_bytes_for_each_millisecond_of_compute_fall_with_the_width():
    rates = [float(row["kb_per_ms"]) for row in swarm.traffic_rows()]
    assert rates[1:] == sorted(rates[1:], reverse=True)
    falls = [after / before for before, after in pairwise(rates)]
    assert falls == sorted(falls, reverse=True)[:1] + sorted(falls[1:], reverse=True)
    assert falls[-1] == pytest.approx(0.59, abs=0.01)
