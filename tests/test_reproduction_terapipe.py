"""docs/reproduction/terapipe.md: its data files are what the code computes, and its sentences hold."""

from functools import cache

import pytest

from reproduction import terapipe
from reproduction.tables import FOLDER, fill, read_rows

ABLATION, SETTINGS = read_rows("terapipe_ablation"), read_rows("terapipe_settings")


@cache
def fitted(name):
    return terapipe.fitted(terapipe.ABLATIONS[name])


@pytest.mark.parametrize("name", terapipe.ABLATIONS)
def test_the_papers_programme_comes_out_of_its_even_points(name):
    ablation = terapipe.ABLATIONS[name]
    even = terapipe.even_s(ablation, fitted(name))
    assert all(even[number] == pytest.approx(seconds, rel=0.10) for number, seconds in ablation.even_s.items())
    best = terapipe.programmed(ablation, fitted(name))
    assert best.step_s(ablation.num_ranks, ablation.batch) == pytest.approx(ablation.programme_s, rel=0.06)
    assert best.step_s(ablation.num_ranks, ablation.batch) <= min(even.values())


def test_175b_is_fastest_with_16_or_32_even_slices():
    even = terapipe.even_s(terapipe.ABLATIONS["175B (9)"], fitted("175B (9)"))
    assert min(even, key=even.__getitem__) in (16, 32)


def test_the_programme_on_fitted_latencies_leads_by_as_much_as_the_page_says():
    for name, ablation in terapipe.ABLATIONS.items():
        best_s = terapipe.programmed(ablation, fitted(name)).step_s(ablation.num_ranks, ablation.batch)
        lead = min(terapipe.even_s(ablation, fitted(name)).values()) / best_s - 1
        assert 0.03 < lead < 0.055


def test_the_fit_is_that_of_the_page():
    for row in ABLATION:
        ablation, number = terapipe.ABLATIONS[row["setting"]], row["slices"]
        if number == "programme":
            found = terapipe.programmed(ablation, fitted(row["setting"])).step_s(ablation.num_ranks, ablation.batch)
        else:
            found = terapipe.even_s(ablation, fitted(row["setting"]))[int(number)]
        assert found == pytest.approx(float(row["fitted_s"]), rel=2e-3)


def test_a_setting_is_simulated_again():
    """The quickest of them."""
    assert terapipe.setting_row("175B (10)", "in tiles") in SETTINGS


def test_chosen_slices_beat_whole_sequences_and_no_even_ones_beat_them():
    assert {row["setting"] for row in SETTINGS} == set(terapipe.SETTINGS)
    for row in SETTINGS:
        whole_s, even_s, best_s = (float(row[name]) for name in ("whole_s", "even_s", "programme_s"))
        assert best_s <= even_s
        assert whole_s / best_s > 1.5
        if row["kernels"] == "in tiles":
            assert 1.0 < whole_s / float(row["published_without_s"]) < 1.15
            assert 0.9 < best_s / float(row["published_with_s"]) < 1.13


def test_the_page_shows_the_data():
    page = (FOLDER / "terapipe.md").read_text(encoding="utf-8")
    assert fill(page, terapipe.terapipe_blocks(ABLATION, SETTINGS)) == page
