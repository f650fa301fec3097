"""What was measured of a model stands in for closed forms: for exactly that, and for nothing else."""

from dataclasses import replace

import pytest

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.exchanges import step_terms
from pipeloom.cost.hardware import CollectiveCurve, Group
from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.schedule import Action, Kind
from pipeloom.workload.run import Run

PLAIN = replace(load_cluster("dgx-a100"), name="counted")
GLOO = load_software("pipeloom-gloo")
RUN = Run(shape=load_model("llama-13b"), seq=2048, pp=2, loops=2, global_batch=8, micro_batch=2)
PIECES = MeasuredPieces(
    run=RUN.of_measured_pieces,
    embedding=(0.5, 0.25),
    layer=(1.0, 2.0),
    head=(3.0, 6.0),
    stage=(0.125, 0.0625),
    message_s=0.75,
)
CLUSTER = replace(PLAIN, name="measured", pieces=(PIECES,))


def test_stages_are_made_of_what_was_measured():
    costs = Placed(replace(RUN, layers_by_stage=(9, 10, 11, 10)), CLUSTER, GLOO).costs
    assert costs.forward_s == (9.625, 10.125, 11.125, 13.125)
    assert costs.backward_s == (18.3125, 20.0625, 22.0625, 26.0625)
    assert costs.transfer_s == 0.75
    assert 0 < costs.weight_share < 1


@pytest.mark.parametrize("measured", [0.3, 3.0])
def test_slices_split_their_backward_as_closed_forms_do_and_take_as_much_of_them_as_was_measured(measured):
    """What a slice takes for the tokens before it is in the first half: attention's core has no weights."""
    counted = piece_seconds(RUN, PLAIN, GLOO)
    both = {name: tuple(measured * s for s in getattr(counted, name)) for name in ("embedding", "layer", "head")}
    cluster = replace(PLAIN, name="multiple", pieces=(MeasuredPieces(run=RUN.of_measured_pieces, **both),))
    plain, slices = SliceModel(Placed(RUN, PLAIN, GLOO)).stage_costs(512, 0), SliceModel(Placed(RUN, cluster, GLOO))
    first, last = slices.stage_costs(512, 0), slices.stage_costs(512, 1536)
    for stage in range(RUN.num_stages):
        half_s = plain.half_s(stage) * first.backward_s[stage] / plain.backward_s[stage]
        assert first.half_s(stage) == last.half_s(stage) == pytest.approx(half_s)
        inputs_s = [one.seconds(Action(Kind.BACKWARD_INPUT, stage, 0)) for one in (first, last)]
        assert 0 < inputs_s[0] < inputs_s[1]


def test_the_rest_of_a_layout_does_not_matter():
    found = piece_seconds(replace(RUN, pp=4, dp=2, loops=1, shard="full", global_batch=64), CLUSTER, GLOO)
    assert found.is_measured
    assert found.layer == (1.0, 2.0)
    fewer = replace(RUN, shape=replace(RUN.shape, layers=4, name="another"))
    assert piece_seconds(fewer, CLUSTER, GLOO).is_measured


@pytest.mark.parametrize(
    "change",
    [
        {"micro_batch": 1},
        {"tp": 2},
        {"seq": 1024},
        {"recompute": "full"},
        {"precision": "fp16"},
        {"shape": replace(RUN.shape, ffn=1024)},
    ],
)
def test_what_was_not_measured_is_counted(change):
    run = replace(RUN, **change)
    assert piece_seconds(run, CLUSTER, GLOO) == piece_seconds(run, PLAIN, GLOO)
    assert not piece_seconds(run, CLUSTER, GLOO).is_measured


def test_an_update_on_shared_cores_takes_as_long_as_all_ranks_together_keep_the_cores():
    update = MeasuredUpdate(fixed_s=0.5, parameter_s=1e-9, precision="bf16")
    alone = replace(CLUSTER, name="update", update=update)
    run = replace(RUN, layers_by_stage=(10, 10, 10, 10))
    held = 20 * RUN.shape.layer_matrix_parameters + RUN.shape.embedding_parameters
    assert step_terms(Placed(run, alone, GLOO), 1.0).optimizer_s == pytest.approx(0.5 + 1e-9 * held, rel=1e-3)
    shared = replace(alone, name="shared", cores_per_node=1)
    assert step_terms(Placed(run, shared, GLOO), 1.0).optimizer_s == pytest.approx(2 * (0.5 + 1e-9 * held), rel=1e-3)
    other = step_terms(Placed(replace(RUN, precision="fp16"), alone, GLOO), 1.0)
    assert other == step_terms(Placed(replace(RUN, precision="fp16"), CLUSTER, GLOO), 1.0)


def test_a_collective_measured_on_shared_cores_is_in_seconds_of_a_core():
    curve = CollectiveCurve(ranks=4, points=((4096.0, 1e9),))
    one = replace(PLAIN, name="collective", collective_curves={"all_reduce": (curve,)})
    two = replace(one, name="collective on two", cores_per_node=2)
    group = Group(4, 4, 1)
    assert two.collective_s("all_reduce", 1e6, group) == one.collective_s("all_reduce", 1e6, group) / 2
    assert two.crowding(2) == 1
    assert two.crowding(4) == 2
    assert two.crowding(64) == 4  # a node has eight devices
