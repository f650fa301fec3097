"""Findings become a cluster with comments."""

import pytest
from machines import findings, messages, timing

from pipeloom.catalog import load_cluster
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.cost.hardware import Group
from pipeloom.measure.describe import datasheet_peaks, describe_cluster
from pipeloom.measure.findings import Product


def test_the_cluster_gives_back_the_times_that_were_measured(tmp_path):
    measured = findings()
    cluster, notes = describe_cluster("mine", measured)
    file = tmp_path / "mine.toml"
    file.write_text(cluster_to_toml(cluster, notes))
    cluster = load_cluster(str(file))
    for product in measured.products:
        seconds = cluster.device.matmul_s(product.flops, 0, product.precision)
        assert seconds == pytest.approx(product.timing.median_s, rel=1e-4)
    for found in measured.collectives:
        for size, expected in found.points:
            assert cluster.collective_s(found.collective, size, Group(2, 2, 1)) == pytest.approx(
                expected.median_s, rel=1e-4
            )
    assert cluster.p2p_s(65536, is_inside=True) == pytest.approx(1e-4 + 65536 / 1e9, rel=1e-4)
    assert cluster.device.memory_s(3e8) == pytest.approx(0.01, rel=1e-4)
    assert (cluster.name, cluster.devices_per_node) == ("mine", 2)


def test_rates_of_processes_that_share_cores_are_those_of_a_core():
    """They are measured on the processor's clock, so that no share of a core changes them."""
    crowded, notes = describe_cluster("mine", findings(num_processes=4, per_host=4, core_share=0.4))
    alone, _ = describe_cluster("mine", findings())
    assert crowded.device == alone.device
    assert "rank 0 had 40% of a core" in str(notes)


def test_the_best_rate_is_the_peak_of_a_device_without_a_datasheet():
    cluster, notes = describe_cluster("mine", findings())
    assert cluster.device.peak_flops_per_s == {"fp32": pytest.approx(1e11), "bf16": pytest.approx(2e11)}
    assert max(fraction for _, fraction in cluster.device.matmul_curve) == 1
    assert "best rate that was measured" in notes["device.peak_tflop_per_s"][0]


@pytest.mark.parametrize(
    ("kind", "name", "vendor"),
    [("cuda", "AMD Instinct MI300X", "amd"), ("cuda", "NVIDIA L4", "nvidia"), ("cpu", "AMD EPYC", "nvidia")],
)
def test_a_gpu_of_amd_is_named_as_such_and_a_core_has_no_vendor(kind, name, vendor):
    assert describe_cluster("mine", findings(kind, name))[0].device.vendor == vendor


def test_a_gpu_of_the_table_has_its_datasheets_peak():
    cluster, notes = describe_cluster("mine", findings("cuda", "NVIDIA A100-SXM4-80GB"))
    assert cluster.device.num_multiprocessors == 108
    assert cluster.device.peak_flops_per_s == {"fp32": 19.5e12, "bf16": 312e12}
    assert cluster.device.matmul_curve[-1][1] == pytest.approx(1e11 / 19.5e12)
    assert "A100 datasheet" in notes["device.peak_tflop_per_s"][0]


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A10", None),
        ("AMD EPYC", None),
    ],
)
def test_peaks_belong_to_the_named_device(name, bf16):
    assert datasheet_peaks(name)[0].get("bf16") == bf16
    assert bool(datasheet_peaks(name)[0]) == bool(datasheet_peaks(name)[1])


def test_a_product_hardly_longer_than_a_kernel_gives_no_rate():
    measured = findings()
    short = tuple(Product(name, 2.0 * 8**3, timing(2.1e-6)) for name in ("fp32", "bf16"))
    cluster, _ = describe_cluster("mine", findings(products=(*short, *measured.products)))
    assert cluster == describe_cluster("mine", measured)[0]


def test_a_link_that_was_not_measured_says_so():
    cluster, notes = describe_cluster("mine", findings())
    assert cluster.inter == cluster.intra
    assert notes["inter"][0].startswith("NOT MEASURED, there was one host")
    assert not notes["intra"][0].startswith("NOT")


def test_one_process_has_no_link_and_both_say_so():
    cluster, notes = describe_cluster(
        "mine", findings(intra=None, collectives=(), num_processes=1, per_host=1, core_share=0.5)
    )
    assert cluster.inter == cluster.intra
    assert cluster.intra.bytes_per_s == cluster.device.memory_bytes_per_s == pytest.approx(3e10)
    assert notes["intra"][0].startswith("NOT MEASURED")
    assert notes["inter"][0].startswith("NOT MEASURED")
    assert cluster.devices_per_node == 2


def test_hosts_with_one_process_each_have_a_link_between_them():
    cluster, notes = describe_cluster(
        "mine", findings(intra=None, inter=messages(rate=5e8), collectives=(), num_processes=2, per_host=1)
    )
    assert cluster.inter.bytes_per_s == cluster.intra.bytes_per_s == pytest.approx(5e8)
    assert notes["intra"][0].startswith("NOT MEASURED, each host has one process")


def test_the_file_states_what_was_left_out_and_whether_the_machine_was_free():
    _, notes = describe_cluster("mine", findings(too_slow={"fp16": 3e9}, core_share=0.6))
    assert notes["device.peak_tflop_per_s"][1].startswith("fp16 reached 3 GFLOP/s")
    assert any("rank 0 had 60% of a core" in line for line in notes[""])
    _, free = describe_cluster("mine", findings())
    assert not any("of a core" in line for line in free[""])
