"""docs/reproduction/terapipe.md: its data files are what the code computes, and its sentences hold."""

from functools import cache

import numpy as np
import pytest
from thinned import thinned

from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from reproduction import terapipe
from reproduction.tables import FOLDER, fill, read_rows

ABLATION, CURVE, SETTINGS = (read_rows(f"terapipe_{name}") for name in ("ablation", "curve", "settings"))


@cache
def fitted(name):
    return terapipe.fitted(terapipe.ABLATIONS[name])


@pytest.mark.parametrize("name", thinned(terapipe.ABLATIONS, 2))
def test_the_papers_program_follows_from_its_even_points(name):
    ablation = terapipe.ABLATIONS[name]
    even = terapipe.even_s(ablation, fitted(name))
    assert all(even[number] == pytest.approx(seconds, rel=0.10) for number, seconds in ablation.even_s.items())
    best = terapipe.programmed(ablation, fitted(name))
    assert best.step_s(ablation.num_ranks, ablation.batch) == pytest.approx(ablation.program_s, rel=0.06)
    assert best.step_s(ablation.num_ranks, ablation.batch) <= min(even.values())


def test_175b_is_fastest_with_16_or_32_even_slices():
    even = terapipe.even_s(terapipe.ABLATIONS["175B (9)"], fitted("175B (9)"))
    assert min(even, key=even.__getitem__) in (16, 32)


def test_the_program_on_fitted_latencies_leads_by_as_much_as_the_page_says():
    """Over the paper's numbers of even slices, and over all numbers."""
    leads = {}
    for name, ablation in terapipe.ABLATIONS.items():
        best_s = terapipe.programmed(ablation, fitted(name)).step_s(ablation.num_ranks, ablation.batch)
        assert 0.03 < min(terapipe.even_s(ablation, fitted(name)).values()) / best_s - 1 < 0.055
        any_s = terapipe.best_even(ablation, fitted(name)).step_s(ablation.num_ranks, ablation.batch)
        leads[name] = any_s / best_s - 1
    assert 0 <= leads["175B (9)"] < 0.001
    assert leads["44B (8)"] == pytest.approx(0.033, abs=0.001)


def test_the_papers_lengths_take_as_long_by_the_fit_as_published():
    for name, ablation in terapipe.ABLATIONS.items():
        assert sum(ablation.lengths) == terapipe.SEQ
        one = terapipe.published_slices(ablation, fitted(name))
        assert one.lengths == ablation.lengths
        assert one.step_s(ablation.num_ranks, ablation.batch) == pytest.approx(ablation.program_s, rel=0.04)


def test_the_fit_is_that_of_the_page():
    chosen = {
        "program": terapipe.programmed,
        "best even": terapipe.best_even,
        "the paper's": terapipe.published_slices,
    }
    for row in ABLATION:
        ablation, which, parameters = terapipe.ABLATIONS[row["setting"]], row["slices"], fitted(row["setting"])
        if which in chosen:
            found = chosen[which](ablation, parameters).step_s(ablation.num_ranks, ablation.batch)
        else:
            found = terapipe.even_s(ablation, parameters)[int(which)]
        assert found == pytest.approx(float(row["fitted_s"]), rel=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("ways", [("wait", "in tiles"), ("lanes", "smooth")], ids=" ".join)
def test_a_setting_is_simulated_again(ways):
    """The quickest of them."""
    assert terapipe.setting_row("175B (10)", *ways) in SETTINGS


def test_an_ablation_is_simulated_again():
    assert [row for row in CURVE if row["setting"] == "44B (8)"] == terapipe.curve_of("44B (8)")


def seconds(row, *names):
    return [float(row[f"{name}_s"]) for name in names]


EVEN_ANYWAY = {
    ("13B (5)", "wait", "in tiles"): "512 512 512 512",
    ("13B (5)", "lanes", "in tiles"): "512 512 512 512",
}
"""Where the program's slices are even."""


def test_chosen_slices_beat_whole_sequences_and_even_ones():
    assert {row["setting"] for row in SETTINGS} == set(terapipe.SETTINGS)
    assert len(SETTINGS) == len(terapipe.SETTINGS) * len(terapipe.MESSAGES) * len(terapipe.PRODUCTS)
    for row in SETTINGS:
        whole_s, paper_s, even_s, best_s = seconds(row, "whole", "paper_even", "even", "program")
        assert whole_s / best_s > 1.4
        assert 1 < int(row["even"]) < terapipe.MOST_EVEN
        assert best_s <= even_s <= paper_s < 1.06 * best_s
        place = (row["setting"], row["messages"], row["products"])
        if place in EVEN_ANYWAY:
            assert row["lengths"] == EVEN_ANYWAY[place]
            assert best_s == even_s
        else:
            lengths = [int(length) for length in row["lengths"].split()]
            assert lengths == sorted(lengths, reverse=True)
            assert lengths[0] > lengths[-1]
            assert best_s < even_s
        if row["products"] == "smooth":
            assert 1.004 < even_s / best_s < 1.016


def test_steps_are_as_long_as_published_within_what_the_page_says():
    """Those of the authors' program, whose compute waits for messages."""
    for row in SETTINGS:
        if row["messages"] == "wait":
            whole_s, best_s, without_s, with_s = seconds(row, "whole", "program", "published_without", "published_with")
            assert 0.945 < whole_s / without_s < 1.155
            assert 0.85 < best_s / with_s < 1.16
            assert whole_s / best_s == pytest.approx(without_s / with_s, rel=0.21)


def test_smooth_products_explain_the_papers_175b_and_tiles_do_not():
    points = {row["slices"]: row for row in CURVE if row["setting"] == "175B (9)"}
    for row in points.values():
        assert float(row["smooth_s"]) == pytest.approx(float(row["published_s"]), rel=0.05)
    leads = {
        name: float(points["16"][f"{name}_s"]) / float(points["the paper's"][f"{name}_s"]) - 1
        for name in ("published", "smooth", "in tiles")
    }
    assert leads["published"] == pytest.approx(0.045, abs=0.001)
    assert leads["smooth"] == pytest.approx(0.034, abs=0.001)
    assert leads["in tiles"] < 0.001


def test_what_comes_before_is_a_small_part_of_the_last_slice():
    for row in SETTINGS:
        run = terapipe.run_of(terapipe.SETTINGS[row["setting"]])
        model = SliceModel(Placed(run, terapipe.PRODUCTS[row["products"]], terapipe.MESSAGES[row["messages"]]))
        last = float(row["lengths"].split()[-1])
        behind_s, alone_s = model.seconds(np.array([last, last]), np.array([terapipe.SEQ - last, 0.0]))
        assert 0.055 < 1 - alone_s / behind_s < 0.145


@pytest.mark.parametrize("products", thinned(terapipe.PRODUCTS, len(terapipe.PRODUCTS)))
def test_no_slice_8_tokens_longer_or_shorter_makes_175b_faster(products):
    setting, cluster, software = terapipe.SETTINGS["175B (10)"], terapipe.PRODUCTS[products], terapipe.MESSAGES["wait"]
    known = terapipe.modelled_table(Placed(terapipe.run_of(setting), cluster, software), terapipe.UNIT)
    lengths = terapipe.best_slices(known, setting.pp, setting.batch).lengths
    best_s = terapipe.simulated_s(setting, software, cluster, lengths)
    for place in range(len(lengths) - 1):
        for change in (terapipe.UNIT, -terapipe.UNIT):
            moved = [*lengths[:place], lengths[place] + change, lengths[place + 1] - change, *lengths[place + 2 :]]
            assert terapipe.simulated_s(setting, software, cluster, tuple(moved)) >= best_s


def test_the_page_shows_the_data():
    page = (FOLDER / "terapipe.md").read_text(encoding="utf-8")
    assert fill(page, terapipe.terapipe_blocks(ABLATION, CURVE, SETTINGS)) == page
