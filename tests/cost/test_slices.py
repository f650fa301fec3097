"""Seconds of token slices: what a whole sequence takes, shared out, and attention to what comes before."""

from dataclasses import replace

import numpy as np
import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.analytic import stage_costs
from pipeloom.cost.shape import Run
from pipeloom.cost.slices import SliceModel
from pipeloom.schedule import Action, Kind

RUN = Run(shape=load_model("llama-3-8b"), seq=4096, pp=4, tp=8, recompute="selective")
CLUSTER, SOFTWARE = load_cluster("dgx-a100"), load_software("pipeloom")


def model(**changes):
    return SliceModel(replace(RUN, **changes), CLUSTER, SOFTWARE)


def test_one_slice_is_the_whole():
    whole = stage_costs(RUN, CLUSTER, SOFTWARE)
    found = model().costs(whole, (4096,)).slices[0]
    assert found.forward_s == pytest.approx(whole.forward_s)
    assert found.backward_s == pytest.approx(whole.backward_s)


@pytest.mark.parametrize("attention", ["flash2", "plain"])
def test_later_slices_take_longer_by_the_pairs_that_they_see(attention):
    slices = model(attention=attention)
    costs = [slices.stage_costs(1024, before) for before in (0, 1024, 2048)]
    first, second, third = (np.array(one.forward_s) for one in costs)
    assert (second > first).all()
    assert third - second == pytest.approx(second - first)
    assert len({one.transfer_s for one in costs}) == 1


@pytest.mark.parametrize("attention", ["flash2", "plain"])
def test_scores_of_all_slices_are_those_of_the_whole(attention):
    """What two halves take more than two sequences of half the length is attention's, of the pairs across."""
    slices = model(attention=attention)
    across_s = np.array(slices.stage_costs(2048, 2048).forward_s) - np.array(slices.stage_costs(2048, 0).forward_s)
    more = model(attention=attention)._pair_s[0]
    pairs = 4096**2 / (2 if attention == "flash2" else 1)
    assert across_s == pytest.approx(np.array(more) * 2048**2)
    share = {"flash2": 0.5, "plain": 0.25}[attention]
    assert across_s == pytest.approx(share * np.array(more) * pairs)


def test_what_concerns_a_stage_is_not_sliced():
    whole = replace(stage_costs(RUN, CLUSTER, SOFTWARE), unshard_s=(1.0,) * 4, evict_s=(8.0,) * 4)
    costs = model().costs(whole, (3072, 1024))
    assert costs.seconds(Action(Kind.UNSHARD, 2)) == 1.0
    assert costs.seconds(Action(Kind.EVICT, 2, 0, 1)) == 2.0
    assert costs.seconds(Action(Kind.RECV_F, 2, 0, 1)) < costs.seconds(Action(Kind.RECV_F, 2, 0, 0)) < whole.transfer_s


def test_a_table_of_seconds_is_that_of_the_slowest_rank():
    slices = model()
    found = slices.seconds(np.array([1024.0, 512.0]), np.array([1024.0, 0.0]))
    expected = [slices.stage_costs(1024, 1024), slices.stage_costs(512, 0)]
    slowest = int(
        np.argmax(np.add(stage_costs(RUN, CLUSTER, SOFTWARE).forward_s, stage_costs(RUN, CLUSTER, SOFTWARE).backward_s))
    )
    assert found == pytest.approx([one.forward_s[slowest] + one.backward_s[slowest] for one in expected])
