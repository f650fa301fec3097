"""Clusters of several kinds of nodes: what ranks and messages see of them, and the orders of their groups."""

from dataclasses import replace

import pytest
from clusters import mixed, nodes, slow_link

from pipeloom.catalog import load_cluster
from pipeloom.cost.hardware import CollectiveCurve, Group, Link
from pipeloom.cost.mixed import NodeGroup, mixed_cluster
from pipeloom.errors import UserError

FAST, SLOW = nodes("fast"), nodes("slow", rate=5e13, memory_gb=32, gb_per_s=50, adapters_per_node=4)
BOTH = mixed((FAST, 2), (SLOW, 4), links=[slow_link("fast", "slow", gb_per_s=10, latency_s=1e-3)])
A100, V100, NANOTRON = (load_cluster(name) for name in ("dgx-a100", "dgx-1-v100", "nanotron-h100-efa"))


def racks(number, *, links=()):
    return mixed(*((nodes(f"rack{i}"), 1) for i in range(number)), links=links)


def test_devices_of_one_group_see_that_group():
    assert BOTH.num_devices == 48
    assert BOTH.part(0, 16) is FAST
    assert BOTH.part(8, 1) is FAST
    assert BOTH.part(16, 8) is SLOW
    assert BOTH.part(40, 8) is SLOW


def test_devices_of_several_groups_see_the_slowest_of_everything():
    part = BOTH.part(8, 16)
    assert part.device.peak_flops_per_s == {"bf16": 5e13, "fp32": 2.5e13}
    assert (part.device.memory_bytes, part.device.memory_bytes_per_s) == (32e9, 1e12)
    assert part.inter == Link(latency_s=1e-3, bytes_per_s=10e9)
    assert part.num_adapters == 4
    assert part is BOTH.part(15, 2)
    for group in (FAST, SLOW):
        for ranks in (8, 16):
            over = Group.strided(ranks, 1, 8)
            assert part.collective_s("all_reduce", 1e9, over) >= group.collective_s("all_reduce", 1e9, over)


def test_hosts_links_inside_nodes_and_multiprocessors_count_too():
    launching = replace(A100, device=replace(A100.device, launch_s=9e-6))
    wired = replace(V100, intra=Link(latency_s=2e-5, bytes_per_s=1e11))
    for clusters in ((launching, wired), (wired, launching)):
        part = mixed(*((cluster, 1) for cluster in clusters)).part(0, 16)
        assert part.device.launch_s == 9e-6
        assert part.intra == Link(latency_s=2e-5, bytes_per_s=1e11)
        assert part.device.num_multiprocessors == 80  # of the slower one
        assert part.devices_per_node == 8


def test_the_slowest_of_two_curves_is_the_lower_one_at_each_size():
    small = replace(A100, device=replace(A100.device, matmul_curve=((1e9, 0.1), (1e12, 0.86))), name="small")
    part = mixed((small, 1), (replace(V100, name="old"), 1)).part(0, 16)
    assert set(part.device.peak_flops_per_s) == {"fp16", "fp32"}  # a V100 has no bf16
    for flops in (1e9, 1e10, 1e11, 1e12):
        either = [cluster.device.matmul_s(flops, 0, "fp16") for cluster in (small, V100)]
        kernel_s = max(cluster.device.kernel_s for cluster in (small, V100))
        assert part.device.matmul_s(flops, 0, "fp16") >= max(either) - 1e-12
        assert part.device.matmul_s(flops, 0, "fp16") <= max(either) + kernel_s
    with pytest.raises(
        UserError, match=r"'a100-sxm-80gb \+ v100-sxm-32gb' has no peak for bf16; its file has fp16, fp32"
    ):
        part.device.matmul_s(1e9, 0, "bf16")


def test_measured_bandwidths_are_lowered_by_as_much_as_the_link_between_groups_is_slower():
    half = Link(latency_s=NANOTRON.inter.latency_s, bytes_per_s=NANOTRON.inter.bytes_per_s / 2)
    link = replace(slow_link("one", "two", gb_per_s=1), link=half)
    part = mixed((replace(NANOTRON, name="one"), 4), (replace(NANOTRON, name="two"), 4), links=[link]).part(0, 64)
    inside, over = Group.strided(8, 1, 8), Group.strided(32, 1, 8)
    assert part.bus_bytes_per_s("all_gather", inside) == NANOTRON.bus_bytes_per_s("all_gather", inside)
    assert part.bus_bytes_per_s("all_reduce", over) == pytest.approx(NANOTRON.bus_bytes_per_s("all_reduce", over) / 2)
    without = mixed((replace(NANOTRON, name="one"), 4), (FAST, 4)).part(0, 64)
    assert without.bus_bytes_per_s("all_reduce", over) <= min(
        NANOTRON.bus_bytes_per_s("all_reduce", over), FAST.bus_bytes_per_s("all_reduce", over)
    )


def test_of_measured_collectives_the_slower_one_counts():
    slow, fast, other = (
        CollectiveCurve(ranks=ranks, points=((1e6, rate),)) for ranks, rate in ((8, 1e9), (8, 2e9), (4, 3e9))
    )
    one = replace(FAST, collective_curves={"all_reduce": (fast, other)})
    two = replace(SLOW, collective_curves={"all_reduce": (slow,)})
    assert mixed((one, 1), (two, 1)).part(0, 16).collective_curves == {"all_reduce": (slow, other)}


def test_groups_that_are_alike_with_no_slower_link_are_one_kind():
    assert racks(3).part(0, 24) == nodes("rack0")
    slower = racks(3, links=[slow_link("rack0", "rack2", gb_per_s=1)])
    assert slower.part(0, 16) == nodes("rack0")
    assert slower.part(0, 24).inter.bytes_per_s == 1e9


def test_messages_see_the_link_between_the_groups_of_their_ends():
    assert BOTH.route(0, 8, 8) is FAST
    assert BOTH.route(16, 24, 8) is SLOW
    assert BOTH.route(8, 16, 8).inter == BOTH.route(40, 0, 8).inter == Link(latency_s=1e-3, bytes_per_s=10e9)
    unnamed = mixed((FAST, 2), (SLOW, 4))
    assert unnamed.route(8, 16, 8).inter == SLOW.inter


def test_of_devices_in_several_groups_the_slowest_pair_of_partners_counts():
    cluster = mixed(
        *((nodes(name), 1) for name in "abc"),
        links=[slow_link("a", "b", gb_per_s=7), slow_link("a", "c", gb_per_s=1), slow_link("b", "c", gb_per_s=5)],
    )
    assert cluster.route(0, 8, 8).inter.bytes_per_s == 7e9
    assert cluster.route(0, 12, 12).inter.bytes_per_s == 1e9  # 0-3 to b, 4-7 to c, 8-11 of b to c
    assert cluster.route(0, 12, 4).inter.bytes_per_s == 7e9
    assert cluster.route(8, 12, 4).inter.bytes_per_s == 100e9  # inside b


def test_nodes_are_counted_through_all_groups():
    cluster = mixed((nodes("a", devices_per_node=4), 3), (nodes("b"), 2))
    assert [cluster.node_of(device) for device in (0, 11, 12, 20, 27)] == [(0, 0), (2, 3), (3, 0), (4, 0), (4, 7)]


def test_kinds_price_and_peak_are_those_of_the_devices_that_are_used():
    priced = mixed((replace(FAST, price_per_device_hour=4.0), 2), (replace(SLOW, price_per_device_hour=1.0), 4))
    assert [(kind.name, number) for kind, number in priced.kinds(24)] == [("fast", 16), ("slow", 8)]
    assert priced.price_per_hour(16) == 64
    assert priced.price_per_hour(48) == 16 * 4 + 32
    assert BOTH.price_per_hour(48) is None
    assert priced.peak_flops_per_s(24, "bf16") == pytest.approx(16 * 1e14 + 8 * 5e13)
    assert FAST.price_per_hour(8) is None
    assert replace(FAST, price_per_device_hour=2.5).price_per_hour(8) == 20


def test_more_devices_than_there_are_is_the_users_error():
    with pytest.raises(UserError, match=r"mixed has 48 devices \(2 x 8 fast, 4 x 8 slow\), found a run on 56"):
        BOTH.part(40, 16)
    assert BOTH.lack(48) is None
    assert FAST.lack(10**6) is None


def test_every_order_that_makes_a_difference_comes_once():
    assert list(BOTH.orders()) == [("fast", "slow"), ("slow", "fast")]
    assert list(FAST.orders()) == [()]
    assert len(list(racks(8).orders())) == 1
    three = mixed((nodes("a"), 1), (SLOW, 1), (nodes("b"), 1))
    assert list(three.orders()) == [("a", "slow", "b"), ("a", "b", "slow"), ("slow", "a", "b")]
    larger = mixed((nodes("a"), 1), (nodes("b"), 2))
    assert len(list(larger.orders())) == 2
    apart = racks(3, links=[slow_link("rack0", "rack2", gb_per_s=1)])
    assert list(apart.orders()) == [
        ("rack0", "rack1", "rack2"), ("rack0", "rack2", "rack1"), ("rack1", "rack0", "rack2"),
    ]  # fmt: skip


def test_another_order_gives_the_first_ranks_other_nodes():
    other = BOTH.reordered(("slow", "fast"))
    assert other.part(0, 32).name == "slow"
    assert other.route(24, 32, 8).inter == BOTH.route(8, 16, 8).inter
    assert other.reordered(("fast", "slow")) == BOTH
    assert FAST.reordered(()) is FAST


def test_a_change_reaches_every_group_and_the_links_between_them():
    def twice(cluster):
        return replace(cluster, inter=replace(cluster.inter, bytes_per_s=2 * cluster.inter.bytes_per_s))

    changed = BOTH.each(twice)
    assert [group.name for group in changed.groups] == ["fast", "slow"]
    assert changed.part(0, 8).inter.bytes_per_s == 200e9
    assert changed.route(8, 16, 8).inter == Link(latency_s=1e-3, bytes_per_s=20e9)
    assert FAST.each(twice) == twice(FAST)


def test_a_single_group_is_a_cluster_with_an_end():
    one = mixed_cluster("one", [NodeGroup(cluster=FAST, num_nodes=2)])
    assert one.part(0, 16) is FAST
    assert one.num_devices == 16
    assert FAST.num_devices is None
