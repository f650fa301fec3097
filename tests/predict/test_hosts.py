"""Hosts of the first devices of a cluster, on each of which a launcher starts processes, and where none starts any."""

from dataclasses import replace

import pytest
from clusters import mixed, nodes

from pipeloom.predict.places import node_problems, num_hosts, tpus_of

RACK, NODE = nodes("racks", devices_per_node=16, devices_per_host=4), nodes("nodes")
BOTH = mixed((RACK, 1), (NODE, 2))


@pytest.mark.parametrize(("devices", "hosts"), [(1, 1), (4, 1), (6, 2), (40, 10)])
def test_a_node_is_as_many_hosts_as_the_file_has(devices, hosts):
    assert num_hosts(RACK, devices) == hosts


@pytest.mark.parametrize(("devices", "hosts"), [(16, 4), (17, 5), (32, 6)])
def test_hosts_are_counted_by_the_devices_of_each_kind(devices, hosts):
    assert num_hosts(BOTH, devices) == hosts
    assert BOTH.host_size == 4


def test_hosts_have_to_be_filled_and_equal_not_nodes():
    assert node_problems(RACK, 20) == []
    (reason,) = node_problems(RACK, 18)
    assert reason.startswith("18 processes do not fill nodes of 4 devices (racks)")
    (reason,) = node_problems(BOTH, 32)
    assert "4 in racks, 8 in nodes" in reason
    assert "describe the larger ones with devices_per_host 4" in reason
    (reason,) = node_problems(mixed((nodes("small", devices_per_node=4), 1), (NODE, 1)), 12)
    assert "describe the larger ones with devices_per_node 4" in reason


def test_no_run_is_started_where_a_group_has_tpus():
    cluster = mixed((NODE, 1), (replace(RACK, device=replace(RACK.device, vendor="google")), 1))
    assert (tpus_of(cluster, 8), tpus_of(cluster, 24)) == ([], ["racks"])
    assert node_problems(cluster, 8) == []
    assert node_problems(cluster, 24)[0].startswith("the devices of racks are TPUs")
