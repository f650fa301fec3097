"""Clusters whose times can be computed by hand."""

from pipeloom.cost.hardware import Cluster, Device, Link
from pipeloom.cost.mixed import GroupLink, NodeGroup, mixed_cluster


def nodes(name, *, rate=1e14, memory_gb=80.0, devices_per_node=8, gb_per_s=100.0, latency_s=0.0, **more):
    """A cluster of one kind; products run at ``rate``, kernels and launches take no time."""
    device = Device(
        name="device",
        peak_flops_per_s={"bf16": rate, "fp32": rate / 2},
        matmul_curve=((1.0, 1.0),),
        kernel_s=0.0,
        memory_bytes=memory_gb * 1e9,
        memory_bytes_per_s=rate / 50,
        launch_s=0.0,
    )
    inter = Link(latency_s=latency_s, bytes_per_s=gb_per_s * 1e9)
    intra = Link(latency_s=0.0, bytes_per_s=3e11)
    return Cluster(name=name, device=device, devices_per_node=devices_per_node, intra=intra, inter=inter, **more)


def slow_link(one, other, *, gb_per_s, latency_s=0.0):
    return GroupLink(between=(one, other), link=Link(latency_s=latency_s, bytes_per_s=gb_per_s * 1e9))


def mixed(*groups, links=(), name="mixed"):
    """A cluster of (cluster of one kind, number of nodes)."""
    return mixed_cluster(name, [NodeGroup(cluster=cluster, num_nodes=number) for cluster, number in groups], links)
