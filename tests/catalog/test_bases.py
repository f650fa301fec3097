"""Files that write only what differs from another one, and devices that nobody measured."""

import pytest

from pipeloom import load_cluster
from pipeloom.catalog import load_model, load_software, read_model
from pipeloom.errors import ConfigError, UserError
from pipeloom.planner.error_bar import error_bar


def cluster_of(folder, text, name="own.toml"):
    (folder / name).write_text(text)
    return load_cluster(str(folder / name))


def test_a_cluster_with_a_base_writes_only_its_changes(tmp_path):
    own, base = (
        cluster_of(tmp_path, 'base = "DGX_H100"\nname = "own"\ninter.gb_per_s = 100\n'),
        load_cluster("dgx-h100"),
    )
    assert (own.name, own.inter.bytes_per_s, own.inter.latency_s) == ("own", 100e9, base.inter.latency_s)
    assert (own.device, own.intra, own.price_per_device_hour) == (base.device, base.intra, base.price_per_device_hour)


def test_a_base_may_be_a_file_with_a_base(tmp_path):
    cluster_of(tmp_path, 'base = "dgx-h100"\nname = "one"\ndevices_per_node = 4\n', "one.toml")
    own = cluster_of(tmp_path, 'base = "./one.toml"\nname = "two"\nintra = { latency_us = 1, gb_per_s = 9 }\n')
    assert (own.name, own.devices_per_node, own.intra.bytes_per_s) == ("two", 4, 9e9)


def test_a_device_that_changes_is_not_the_measured_one(tmp_path):
    text = 'base = "dgx-h100"\nname = "own"\n[device]\n'
    larger = cluster_of(tmp_path, text + "memory_gb = 100\n")
    faster = cluster_of(tmp_path, text + "memory_gb_per_s = 4000\n")
    assert (larger.device.name, faster.device.name) == ("h100-sxm-80gb", "h100-sxm-80gb, changed")
    program = load_software("megatron-core")
    assert error_bar(larger, program).errors is not None
    assert error_bar(faster, program).errors is None


def test_what_was_measured_on_the_base_is_left_out_where_it_changes(tmp_path):
    same = cluster_of(tmp_path, 'base = "laptop"\nname = "own"\nprice_per_device_hour = 1\n')
    other = cluster_of(tmp_path, 'base = "laptop"\nname = "own"\nintra.gb_per_s = 9\n')
    assert same.collective_curves == load_cluster("laptop").collective_curves != {}
    assert other.collective_curves == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('base = "dgx-h100"\n', "name must be a text of one line, found None"),
        ('base = "dgx-h10"\nname = "own"\n', "there is no cluster 'dgx-h10'"),
        ('base = 3\nname = "own"\n', "base must be a name of the catalog or a file, found 3"),
        ('base = "./own.toml"\nname = "own"\n', "base leads back to itself"),
        ('base = "dgx-h100"\nname = "own"\nintra.gbps = 3\n', "[intra] there is no key 'gbps' here"),
        (
            'base = "dgx-h100"\nname = "own"\ndevice.peak_tflop_per_s.bf61 = 3\n',
            "[device.peak_tflop_per_s] there is no key 'bf61' here",
        ),
        ('base = "dgx-h100"\nname = "own"\nintre.gb_per_s = 3\n', "there is no key 'intre' here; did you mean 'int"),
        ('base = "dgx-h100"\nname = "own"\ngroups = []\n', "a file with groups cannot have a base"),
        ('base = "dgx-h100"\nname = "own"\ndevice.matmul_gflop = [1]\n', "must have one number for each"),
    ],
)
def test_a_wrong_base_is_refused(tmp_path, text, problem):
    with pytest.raises(UserError) as caught:
        cluster_of(tmp_path, text)
    assert problem in str(caught.value)


def test_a_model_with_a_base_writes_only_its_changes(tmp_path):
    (tmp_path / "own.toml").write_text('base = "llama-3-8b"\nname = "own"\nlayers = 40\n')
    own, base = read_model(str(tmp_path / "own.toml")), read_model("llama-3-8b")
    assert (own.shape.name, own.shape.layers, own.shape.ffn) == ("own", 40, base.shape.ffn)
    assert (own.rope_theta, own.norm_eps) == (base.rope_theta, base.norm_eps)


@pytest.mark.parametrize(("read", "name"), [(load_cluster, "DGX-H100"), (load_model, "Llama-3-8B")])
def test_names_are_found_in_any_case(read, name):
    assert read(name).name == name.lower()


NEW = """
name = "new-card"
devices_per_node = 8
intra = { latency_us = 10, gb_per_s = 60 }
inter = { latency_us = 20, gb_per_s = 50 }
[device]
name = "new-card"
peak_tflop_per_s = { bf16 = 300 }
memory_gb = 47
memory_gb_per_s = 900
"""


def test_a_device_needs_peak_memory_and_links_only(tmp_path):
    new = cluster_of(tmp_path, NEW)
    assert new.device.is_gpu
    fractions = [fraction for _, fraction in new.device.matmul_curve]
    assert fractions == sorted(fractions)
    assert 0.51 <= fractions[-1] <= 0.87  # the measured devices
    bar = error_bar(new, load_software("pipeloom"))
    assert bar.errors is None
    assert bar.tie > 0
    assert "No prediction for new-card was compared with a measured step" in bar.sentences[0]


def test_a_curve_that_is_half_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="matmul_fraction must be a list"):
        cluster_of(tmp_path, NEW + "matmul_gflop = [1, 2]\n")
