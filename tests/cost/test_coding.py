"""Messages in 8 bits where a step is priced: their bytes, the seconds of coding them, and who pays."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.coding import coding_s_of
from pipeloom.cost.hardware import Link
from pipeloom.cost.measured import MeasuredPieces
from pipeloom.cost.placed import Placed
from pipeloom.cost.stages import num_frozen_stages
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.coding import wire_spec
from pipeloom.predict.traffic import boundary_traffic
from pipeloom.workload.run import Run

CLUSTER = replace(load_cluster("dgx-a100"), inter=Link(latency_s=5e-6, bytes_per_s=1e9))
OURS = load_software("pipeloom")
SHAPE = load_model("gpt-6.6b")
RUN = Run(shape=SHAPE, seq=1024, pp=4, tp=8, loops=2, micro_batch=2, global_batch=32)


def placed(run=RUN, cluster=CLUSTER, **changes):
    return Placed(replace(run, **changes), cluster, OURS)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("boundary", [None, "int8"])
def test_priced_bytes_are_those_on_the_wire(precision, dtype, boundary):
    run = replace(RUN, precision=precision, boundary=boundary)
    spec = TensorSpec((run.micro_batch, run.seq // run.tp, SHAPE.hidden), dtype)
    assert run.sent_bytes(scatters=True) == wire_spec(spec, boundary).nbytes


@pytest.mark.parametrize(("precision", "most"), [("fp32", 0.27), ("bf16", 0.52)])
def test_a_slow_message_takes_the_share_of_its_bytes(precision, most):
    exact, coded = (placed(precision=precision, boundary=one).costs.over_s(0) for one in (None, "int8"))
    assert coded < most * exact


def test_coding_is_compute_of_both_ends():
    exact, coded = placed().costs, placed(boundary="int8").costs
    encode_s, decode_s = coding_s_of(RUN, CLUSTER, OURS)
    assert 0 < decode_s < encode_s < 1e-3
    last = RUN.num_stages - 1
    for stage, (before, after) in enumerate(zip(exact.forward_s, coded.forward_s, strict=True)):
        assert after - before == pytest.approx(encode_s * (stage < last) + decode_s * (stage > 0))
    for stage, (before, after) in enumerate(zip(exact.backward_s, coded.backward_s, strict=True)):
        assert after - before == pytest.approx(encode_s * (stage > 0) + decode_s * (stage < last))


def test_stages_on_one_rank_code_nothing_for_each_other():
    exact, coded = (placed(placement="v", boundary=one).costs for one in (None, "int8"))
    codes = coding_s_of(RUN, CLUSTER, OURS)
    more = [after - before for before, after in zip(exact.forward_s, coded.forward_s, strict=True)]
    assert more[3] == pytest.approx(codes[1])  # stages 3 and 4 are on the last rank
    assert more[4] == pytest.approx(codes[0])


def test_no_gradient_is_coded_below_the_first_stage_that_trains():
    run = replace(RUN, frozen_pieces=1 + SHAPE.layers // 2)
    first = num_frozen_stages(run, OURS)
    assert first > 1
    exact, coded = (placed(run, boundary=one).costs for one in (None, "int8"))
    more = [after - before for before, after in zip(exact.backward_s, coded.backward_s, strict=True)]
    encode_s, decode_s = coding_s_of(RUN, CLUSTER, OURS)
    assert more[:first] == [0.0] * first
    assert more[first : first + 2] == pytest.approx([decode_s, encode_s + decode_s])


def test_a_measured_copy_shrinks_with_the_bytes():
    run = replace(RUN, tp=1, precision="fp32", shape=replace(SHAPE, layers=8))
    pieces = MeasuredPieces(run=run.of_measured_pieces, embedding=(0, 0), layer=(1, 2), head=(0, 0), message_s=1e-3)
    host = replace(CLUSTER, devices_per_node=8, pieces=(pieces,))
    exact, coded = (placed(run, host, boundary=one).costs.over_s(0) for one in (None, "int8"))
    assert exact == 1e-3
    assert coded == pytest.approx(0.2578e-3, rel=1e-3)


@pytest.mark.parametrize("boundary", [None, "int8"])
def test_traffic_stops_mattering_at_the_bandwidth_that_is_said(boundary):
    traffic = boundary_traffic(placed(boundary=boundary))
    assert traffic.is_hidden == (traffic.enough_bytes_per_s <= CLUSTER.inter.bytes_per_s)
    enough = replace(CLUSTER, inter=replace(CLUSTER.inter, bytes_per_s=traffic.enough_bytes_per_s))
    found = boundary_traffic(placed(boundary=boundary, cluster=enough))
    assert found.message_s == pytest.approx(found.forward_s, rel=1e-6)
    # Less where the host's launches take longer than the device's work, which are the same for all widths.
    assert 0.8 * SHAPE.hidden <= found.enough_width <= SHAPE.hidden


def test_traffic_stops_mattering_at_the_width_that_is_said():
    slow = replace(CLUSTER, inter=Link(latency_s=5e-6, bytes_per_s=0.3e9))
    traffic = boundary_traffic(placed(cluster=slow))
    scale = traffic.enough_width / SHAPE.hidden
    assert scale > 1.5
    wide = replace(
        SHAPE, hidden=round(SHAPE.hidden * scale / 128) * 128, ffn=round(SHAPE.ffn * scale / 128) * 128,
    )  # fmt: skip
    found = boundary_traffic(placed(cluster=slow, shape=wide))
    # Larger products are nearer to the peak, and the vocabulary grows with the width alone.
    assert found.message_s == pytest.approx(found.forward_s, rel=0.15)


def test_bytes_for_each_flop_halve_when_the_width_doubles():
    shapes = [replace(SHAPE, hidden=h, ffn=4 * h, vocab=0) for h in (4096, 8192, 16384)]
    # Norms, residuals and exchanges of tensor-parallel ranks grow with the width alone.
    found = [boundary_traffic(placed(shape=shape, tp=1)) for shape in shapes]
    rates = [one.message_bytes / one.forward_s for one in found]
    assert [after / before for before, after in pairwise(rates)] == pytest.approx([0.5, 0.5], rel=0.2)


def test_no_bandwidth_helps_against_latency():
    far = replace(CLUSTER, inter=Link(latency_s=1.0, bytes_per_s=1e9))
    traffic = boundary_traffic(placed(cluster=far))
    assert traffic.to_dict()["enough_bytes_per_s"] is None
    assert "its latency alone takes longer" in str(traffic)


def test_without_messages_over_a_link_there_is_no_traffic():
    assert boundary_traffic(placed(pp=1, loops=1)) is None
    assert boundary_traffic(Placed(RUN, CLUSTER, load_software("megatron-2021"))) is None
