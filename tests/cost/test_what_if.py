"""Clusters with one figure changed."""

import pytest

from pipeloom import load_cluster
from pipeloom.cost.what_if import changed, what_if_problems, without_effect


def test_a_factor_and_the_absolute_value_of_it_are_the_same():
    own = load_cluster("dgx-h100")
    by_factor = changed(own, {"inter_bandwidth": "2x", "peak": "2X", "memory": "0.5 x"})
    absolute = changed(own, {"inter_bandwidth": "800", "peak": "1978", "memory": "42.5"})
    assert by_factor.name == "dgx-h100, inter bandwidth x 2, peak x 2, memory x 0.5"
    assert absolute.name == "dgx-h100, inter bandwidth 800 GB/s, peak 1978 TFLOP/s, memory 42.5 GB"
    for one in (by_factor, absolute):
        assert one.inter.bytes_per_s == pytest.approx(800e9)
        assert one.device.peak_flops_per_s["fp32"] == pytest.approx(134e12)
        assert one.device.memory_bytes == pytest.approx(42.5e9)


def test_a_faster_device_reaches_the_same_fraction_in_the_same_time_and_has_no_measured_pieces():
    own = load_cluster("laptop")
    fast = changed(own, {"peak": "10x"})
    assert fast.device.matmul_s(1e10, 0, "fp32") - fast.device.kernel_s == pytest.approx(
        own.device.matmul_s(1e9, 0, "fp32") - own.device.kernel_s
    )
    assert fast.device.name == "AMD EPYC, one core, changed"


@pytest.mark.parametrize("text", ["0", "-2x", "2y", "1.2.3", "nan", "x", "", "1e400"])
def test_what_is_neither_a_factor_nor_an_amount_is_refused(text):
    (problem,) = what_if_problems({"memory": text})
    assert problem == (f"machine.memory must be a factor such as 2x or 0.5x, or a number above 0 in GB, found '{text}'")


def test_a_factor_or_an_amount_beyond_any_hardware_is_refused():
    changes = {"memory": "80e9", "intra_bandwidth": "1e-9x", "peak": "1e-320", "inter_bandwidth": "2x"}
    assert what_if_problems(changes) == [
        "machine.memory must be a number from 1e-06 to 1,000,000 GB, found '80e9'; if that is in bytes, write 80",
        "machine.intra_bandwidth must be a factor from 1e-06 to 1,000,000,000, found '1e-9x'",
        "machine.peak must be a number from 1e-06 to 1,000,000 TFLOP/s, found '1e-320'",
    ]


def test_changes_without_effect_are_refused(tmp_path):
    own = load_cluster("dgx-h100")
    assert "in one node of dgx-h100" in without_effect(own, {"inter_bandwidth": "2x"}, 8)[0]
    assert without_effect(own, {"inter_bandwidth": "2x"}, 9) == []
    assert without_effect(own, {"intra_bandwidth": "2x"}, 2) == []
    (one,) = without_effect(own, {"inter_bandwidth": "2x", "peak": "2x"}, 1)
    assert one == "machine.inter_bandwidth has no effect on one device, which sends nothing to others; leave it out"
    (both,) = without_effect(own, {"inter_bandwidth": "2x", "intra_bandwidth": "2x"}, 1)
    assert both.startswith("machine.inter_bandwidth and machine.intra_bandwidth have no effect on one device")
    text = "\n".join(f'[[groups]]\nname = "{name}"\nnum_nodes = 2\ncluster = "{name}"' for name in ("h200", "dgx-a100"))
    (tmp_path / "both.toml").write_text(f'name = "both"\n{text}\n')
    both = load_cluster(str(tmp_path / "both.toml"))
    assert "must be a factor such as 2x" in without_effect(both, {"memory": "40"}, 32)[0]
    slow = changed(both, {"inter_bandwidth": "0.5x"})
    assert [group.cluster.inter.bytes_per_s for group in slow.groups] == [200e9, 100e9]
