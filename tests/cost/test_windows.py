"""Layers that differ in their window have their own seconds, and together those of the stages."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.workload.run import Run

CLUSTER, SOFTWARE = load_cluster("dgx-a100"), load_software("pipeloom")
SHAPE = replace(load_model("llama-3-8b"), window=1024, full_layers=(5, 11, 17, 23, 29))
RUN = Run(shape=SHAPE, seq=8192, pp=4, global_batch=8)


def seconds(run):
    return sum(Placed(run, CLUSTER, SOFTWARE).costs.forward_s)


def test_seconds_of_stages_are_those_of_their_own_layers():
    by_stage = replace(RUN, layers_by_stage=(5, 1, 20, 6))
    placed = Placed(by_stage, CLUSTER, SOFTWARE)
    local, whole = (
        piece_seconds(RUN.alike(("none", window, False)), CLUSTER, SOFTWARE).layer for window in (1024, None)
    )
    assert local[0] < whole[0]
    forward_s = placed.costs.forward_s
    assert forward_s[1] - forward_s[0] == pytest.approx(
        whole[0] - 5 * local[0] - placed.pieces[0].embedding[0], rel=1e-9
    )
    mean = piece_seconds(RUN, CLUSTER, SOFTWARE).layer
    assert [mean[side] * 32 for side in (0, 1)] == pytest.approx(
        [27 * local[side] + 5 * whole[side] for side in (0, 1)]
    )


def test_a_narrower_window_is_never_slower():
    times = [seconds(replace(RUN, shape=replace(SHAPE, window=window))) for window in (128, 1024, 4096, 8192)]
    assert times == sorted(times)
    without = seconds(replace(RUN, shape=SHAPE.alike(None, experts=False)))
    assert times[-1] == pytest.approx(without)


def test_slices_of_a_window_see_no_more_than_it():
    placed = Placed(replace(RUN, shape=SHAPE.alike(1024, experts=False)), CLUSTER, SOFTWARE)
    model = SliceModel(placed)
    first, second, later = (sum(model.stage_costs(1024, before).forward_s) for before in (0, 1024, 6144))
    assert first < second
    assert second == pytest.approx(later, rel=1e-6)
