"""Seconds of products, memory traffic and collectives."""

from dataclasses import replace
from math import inf, log2, nan

import pytest

from pipeloom.catalog import load_cluster
from pipeloom.cost.hardware import HOP_S, CollectiveCurve, Group, bus_bytes, interpolate
from pipeloom.cost.mixed import NodeGroup, mixed_cluster
from pipeloom.errors import CallError, UserError

A100 = load_cluster("dgx-a100")
NANOTRON = load_cluster("nanotron-h100-efa")


def test_a_curve_is_flat_outside_and_linear_in_the_logarithm_inside():
    curve = ((1.0, 0.2), (100.0, 0.8))
    assert interpolate(curve, 0.5) == 0.2
    assert interpolate(curve, 1000) == 0.8
    assert interpolate(curve, 10) == pytest.approx(0.5)


def test_a_large_product_reaches_the_measured_rate():
    flops = 2 * 16384**3
    seconds = A100.device.matmul_s(flops, 0, "bf16") - A100.device.kernel_s
    assert flops / seconds == pytest.approx(271e12, rel=1e-3)


def test_a_thin_product_is_bound_by_memory():
    device = A100.device
    assert device.matmul_s(2e6, 2.039e9, "bf16") == pytest.approx(1e-3 + device.kernel_s)


def test_the_last_wave_of_tiles_may_be_partly_empty():
    device = replace(A100.device, num_multiprocessors=108)
    assert device.filling(128 * 27, 256 * 4) == 1  # 108 tiles, one wave
    assert device.filling(128 * 109, 256) < 0.99  # one tile too many for one wave of the largest
    assert device.filling(128 * 108 * 100 + 1, 256) > 0.98  # which matters less after many
    assert device.filling(64, 64) == pytest.approx(0.5 / 108)
    assert replace(device, num_multiprocessors=0).filling(64, 64) == 1


@pytest.mark.parametrize("rows", [8, 64, 192, 320, 1000])
@pytest.mark.parametrize("columns", [64, 640, 1920, 12288])
def test_a_product_fills_a_device_as_its_transpose_does(rows, columns):
    device = replace(A100.device, num_multiprocessors=80)
    assert device.filling(rows, columns) == pytest.approx(device.filling(columns, rows))


def test_an_all_reduce_moves_twice_what_a_gather_moves():
    group = Group.strided(8, 1, 8)
    reduce_s, gather_s = (A100.collective_s(kind, 8e9, group) - 10e-6 for kind in ("all_reduce", "all_gather"))
    assert gather_s == pytest.approx(7 / 8 * 8e9 / 300e9)
    assert reduce_s == pytest.approx(2 * gather_s)
    assert A100.collective_s("all_reduce", 8e9, Group.strided(1, 1, 8)) == 0


def test_a_group_over_nodes_gets_its_share_of_the_network():
    assert Group.strided(4, 4, 8) == Group(4, 2, 4)
    assert Group.strided(4, 4, 8).num_nodes == 2
    assert A100.bus_bytes_per_s("all_reduce", Group.strided(16, 1, 8)) == 200e9
    assert A100.bus_bytes_per_s("all_reduce", Group.strided(16, 8, 8)) == 25e9


@pytest.mark.parametrize("num_nodes", [2, 16, 128])
def test_latency_over_nodes_is_a_hop_for_each_rank_of_a_ring_and_for_each_level_of_a_tree(num_nodes):
    group, hop_s = Group.strided(8 * num_nodes, 1, 8), A100.inter.latency_s
    around_s = A100.intra.latency_s + 7 * num_nodes * HOP_S + (num_nodes - 1) * hop_s
    assert A100.collective_s("all_gather", 0, group) == pytest.approx(around_s)
    assert A100.collective_s("reduce_scatter", 0, group) == pytest.approx(around_s)
    tree_s = A100.intra.latency_s + 2 * (7 * HOP_S + log2(num_nodes) * hop_s)
    assert A100.collective_s("all_reduce", 0, group) == pytest.approx(tree_s)
    assert A100.collective_s("all_gather", 0, Group.strided(8, 1, 8)) == A100.intra.latency_s


def test_measured_curves_replace_the_links():
    by_curve = replace(NANOTRON, bus_message_bytes=0.0)
    assert by_curve.bus_bytes_per_s("all_reduce", Group.strided(32, 1, 8)) == pytest.approx(160e9)
    assert NANOTRON.bus_bytes_per_s("all_gather", Group.strided(8, 1, 8)) == pytest.approx(250e9)


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_a_small_measured_message_takes_its_time_and_a_large_one_the_bandwidth_of_the_links(nodes):
    group = Group.strided(8 * nodes, 1, 8)
    moved = bus_bytes("all_gather", 256e6, 8 * nodes)
    measured_s = moved / dict(NANOTRON.bus_curves["all_gather"])[nodes]
    assert NANOTRON.collective_s("all_gather", 256e6, group) == pytest.approx(measured_s)
    # What is left at a thousand times the size is the time at the bandwidth of a node's network.
    assert NANOTRON.collective_s("all_gather", 256e9, group) == pytest.approx(1000 * moved / 400e9, rel=0.05)


def test_a_precision_may_have_its_own_curve():
    device = replace(A100.device, matmul_curves={"fp32": ((1e9, 1.0),)})
    assert device.matmul_s(19.5e12, 0, "fp32") == pytest.approx(1 + device.kernel_s)
    assert device.matmul_s(1e12, 0, "bf16") == A100.device.matmul_s(1e12, 0, "bf16")


def test_a_precision_that_the_device_lacks_is_reported():
    with pytest.raises(UserError, match="'a100-sxm-80gb' has no peak for fp8; its file has bf16, fp16, fp32"):
        A100.device.matmul_s(1e9, 0, "fp8")


@pytest.mark.parametrize(("stride", "share"), [(1, 1.0), (2, 0.5), (4, 0.5), (8, 1.0)])
def test_groups_with_some_of_a_nodes_devices_reach_their_share_of_its_network(stride, share):
    group = Group.strided(64, stride, 8)
    half = replace(A100, partial_group_share=0.5)
    assert half.bus_bytes_per_s("all_reduce", group) == share * A100.bus_bytes_per_s("all_reduce", group)
    both = mixed_cluster("both", [NodeGroup(cluster=one, num_nodes=1) for one in (A100, half)])
    assert both.bus_bytes_per_s("all_reduce", group) == half.bus_bytes_per_s("all_reduce", group)


NODE = Group(8, 8, 1)
POINTS = ((1e3, 1e7), (1e5, 1e9), (1e7, 1e11))
CURVE = CollectiveCurve(ranks=8, points=POINTS)
MEASURED = replace(A100, collective_curves={"all_gather": (CURVE,)})


def test_a_measured_size_takes_the_measured_time():
    for size, rate in POINTS:
        assert MEASURED.collective_s("all_gather", size, NODE) == pytest.approx(7 / 8 * size / rate)
        assert MEASURED.collective_s("all_gather", size, NODE, 0.5) == pytest.approx(2 * 7 / 8 * size / rate)


def test_sizes_that_were_not_measured_lie_between_and_beyond():
    latency_s, bandwidth = 1e-4, 1e9
    sizes = (1e3, 1e5, 1e6)
    points = tuple((x, bus_bytes("all_reduce", x, 4) / (latency_s + x / bandwidth)) for x in sizes)
    curve = CollectiveCurve(ranks=4, points=points)
    assert curve.seconds("all_reduce", 5e4, 4) == pytest.approx(latency_s + 5e4 / bandwidth)
    assert curve.seconds("all_reduce", 1, 4) == curve.seconds("all_reduce", 1e3, 4)
    assert curve.seconds("all_reduce", 1e8, 4) == pytest.approx(100 * curve.seconds("all_reduce", 1e6, 4))


def test_the_curve_of_the_closest_number_of_ranks_is_taken():
    slow, fast = (CollectiveCurve(ranks=ranks, points=((1e3, rate),)) for ranks, rate in ((2, 1e6), (8, 1e9)))
    cluster = replace(A100, collective_curves={"all_reduce": (slow, fast)})
    for ranks, rate in ((2, 1e6), (3, 1e6), (4, 1e9), (6, 1e9), (8, 1e9)):
        expected = bus_bytes("all_reduce", 1e6, ranks) / rate
        assert cluster.collective_s("all_reduce", 1e6, Group(ranks, 8, 1)) == pytest.approx(expected)


def test_measured_curves_change_nothing_between_nodes_and_for_other_collectives():
    over = Group.strided(16, 1, 8)
    assert MEASURED.collective_s("all_gather", 1e6, over) == A100.collective_s("all_gather", 1e6, over)
    assert MEASURED.collective_s("all_reduce", 1e6, NODE) == A100.collective_s("all_reduce", 1e6, NODE)
    assert MEASURED.collective_s("all_gather", 1e6, Group(1, 1, 1)) == 0


@pytest.mark.parametrize("wrong", [0, -1.0, nan, inf, 1e-320, "80"])
def test_a_device_and_a_link_without_a_rate_cannot_be_made(wrong):
    device = {"memory_bytes": wrong, "memory_bytes_per_s": wrong, "peak_flops_per_s": {"bf16": wrong}}
    with pytest.raises(CallError) as caught:
        replace(A100.device, **device, matmul_curve=((wrong, 0.5),))
    assert [problem.split()[0] for problem in caught.value.problems] == (
        ["peak_flops_per_s", "matmul_curve", "memory_bytes", "memory_bytes_per_s"]
        if wrong == "80"
        else ["peak_flops_per_s['bf16']", "matmul_curve[0][0]", "memory_bytes", "memory_bytes_per_s"]
    )
    with pytest.raises(CallError, match="bytes_per_s must be"):
        replace(A100.intra, bytes_per_s=wrong)
    with pytest.raises(CallError, match="devices_per_node must be"):
        replace(A100, devices_per_node=wrong)
    with pytest.raises(CallError, match="devices_per_node must be"):
        replace(mixed_cluster("both", [NodeGroup(cluster=A100, num_nodes=1)]), devices_per_node=wrong)
