"""Files of models, clusters and programs: found by name or path, units converted, all problems in one message."""

import re

import pytest

from pipeloom import load_run
from pipeloom.catalog import load_cluster, load_model, load_software, names, read_model, source_of
from pipeloom.catalog.reading import read_toml
from pipeloom.config import ModelConfig, unset
from pipeloom.errors import ConfigError, UserError

CLUSTERS = ["dgx-1-v100", "dgx-a100", "dgx-h100", "h200", "laptop", "nanotron-h100-efa"]

MEASURED = ["laptop"]


def test_the_promised_clusters_are_there():
    assert set(CLUSTERS) <= set(names("clusters"))


@pytest.mark.parametrize("name", names("clusters"))
def test_a_cluster_loads_and_is_plausible(name):
    cluster = load_cluster(name)
    sizes, fractions = zip(*cluster.device.matmul_curve, strict=True)
    assert cluster.name == name
    assert list(sizes) == sorted(sizes)
    assert list(fractions) == sorted(fractions) or name in MEASURED  # what was measured may dip
    assert max(fractions) <= 1
    assert cluster.device.memory_bytes_per_s > cluster.intra.bytes_per_s
    assert all(0 < seconds < 1e-3 for seconds in (cluster.device.launch_s, cluster.device.kernel_s))


@pytest.mark.parametrize("name", names("clusters"))
def test_a_cluster_file_says_where_its_constants_come_from(name):
    from importlib.resources import files

    text = files("pipeloom.catalog").joinpath("clusters", f"{name}.toml").read_text(encoding="utf-8")
    assert text.count("#") >= 3


@pytest.mark.parametrize("name", names("clusters"))
def test_a_price_has_a_source_and_a_date(name):
    cluster = load_cluster(name)
    if cluster.price_per_device_hour is None:
        assert not cluster.price_source
    else:
        assert re.search(r", read 20\d\d-\d\d-\d\d\)$", cluster.price_source)


@pytest.mark.parametrize("name", names("models"))
def test_a_model_loads_with_its_source(name):
    assert load_model(name).name == name
    assert len(read_toml("models", name)[0]["source"]) > 20


@pytest.mark.parametrize("name", names("software"))
def test_a_program_loads_with_its_source_and_an_existing_cluster(name):
    program = load_software(name)
    assert program.name == name
    assert load_cluster(program.cluster)
    assert read_toml("software", name)[0]["source"]


def test_units_are_converted_at_the_door():
    a100 = load_cluster("dgx-a100")
    assert a100.device.peak_flops_per_s["bf16"] == 312e12
    assert a100.intra.bytes_per_s == 300e9
    assert a100.intra.latency_s == pytest.approx(10e-6)
    assert a100.device.matmul_curve[0][0] == 1e9


FILE = """
name = "measured"
devices_per_node = 4

[device]
name = "core"
peak_tflop_per_s = { fp32 = 0.1, bf16 = 0.2 }
memory_gb = 4
memory_gb_per_s = 20
launch_us = 3
kernel_us = 1
matmul_gflop = [0.001, 0.1]
matmul_fraction = [0.5, 1]
matmul_fraction_of = { bf16 = [0.1, 0.9] }

[intra]
latency_us = 50
gb_per_s = 3

[inter]
latency_us = 50
gb_per_s = 3

[[collectives]]
ranks = 2
message_bytes = [4096, 1048576]
all_reduce_gb_per_s = [0.01, 1]

[[collectives]]
ranks = 4
message_bytes = [4096]
all_reduce_gb_per_s = [0.02]
all_gather_gb_per_s = [0.03]
"""


def test_measured_curves_are_read_by_collective_and_by_precision(tmp_path):
    file = tmp_path / "measured.toml"
    file.write_text(FILE)
    cluster = load_cluster(str(file))
    assert cluster.device.matmul_curves == {"bf16": ((1e6, 0.1), (1e8, 0.9))}
    assert [curve.ranks for curve in cluster.collective_curves["all_reduce"]] == [2, 4]
    assert cluster.collective_curves["all_reduce"][0].points == ((4096, 1e7), (1048576, 1e9))
    assert cluster.collective_curves["all_gather"][0].points == ((4096, pytest.approx(3e7)),)
    assert "reduce_scatter" not in cluster.collective_curves


def test_curves_that_cannot_be_right_are_refused_together(tmp_path):
    file = tmp_path / "wrong.toml"
    text = FILE.replace("[4096, 1048576]", "[4096, 4096]").replace("[0.1, 0.9]", "[0.1]").replace("[0.02]", "[0.02, 1]")
    file.write_text(text.replace("[0.03]", "[]"))
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    assert caught.value.problems == (
        "[device.matmul_fraction_of] bf16 must have one number for each of matmul_gflop, 2, found 1",
        "[collectives, number 1] message_bytes must rise, found [4096, 4096]",
        "[collectives, number 2] all_reduce_gb_per_s must have one number for each of message_bytes, 1, found 2",
        "[collectives, number 2] all_gather_gb_per_s must be a list of numbers from 1e-06 to 1,000,000 GB/s, found []",
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "[0.5, 1]",
            "[0.5, 1.85]",
            "[device] matmul_fraction must be a list of numbers from 1e-06 to 1, found [0.5, 1.85]",
        ),
        (
            "[0.1, 0.9]",
            "[0.1, 1.01]",
            "[device.matmul_fraction_of] bf16 must be a list of numbers from 1e-06 to 1, found [0.1, 1.01]",
        ),
        (
            "[0.5, 1]",
            "[0, 1]",
            "[device] matmul_fraction must be a list of numbers from 1e-06 to 1, found [0, 1]",
        ),
    ],
)
def test_a_fraction_of_a_cluster_above_1_is_refused(tmp_path, old, new, problem):
    file = tmp_path / "fast.toml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    assert caught.value.problems == (problem,)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("overlap = 1.2", "overlap is a fraction and must be a number of at least 0 and at most 1, found 1.2"),
        (
            "fragmentation = -1",
            "fragmentation is a fraction and must be a number of at least 0 and at most 1, found -1",
        ),
        (
            "[efficiency]\nmemory = 1.01",
            "[efficiency] memory is a fraction and must be a number above 0 and at most 1, found 1.01",
        ),
        (
            "[efficiency]\nflash2 = 0",
            "[efficiency] flash2 is a fraction and must be a number above 0 and at most 1, found 0",
        ),
        (
            "[efficiency]\nmatmul = 2",
            "[efficiency] matmul is a fraction and must be a number above 0 and at most 1.05, found 2",
        ),
    ],
)
def test_a_fraction_of_a_program_outside_its_range_is_refused(tmp_path, line, problem):
    file = tmp_path / "program.toml"
    file.write_text(f'name = "program"\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        load_software(str(file))
    assert caught.value.problems == (problem,)


def test_collectives_that_are_no_list_of_tables_are_refused(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(
        FILE.partition("[[collectives]]")[0].replace("devices_per_node", "collectives = 3\ndevices_per_node")
    )
    with pytest.raises(ConfigError, match="collectives must be a list of tables, found 3"):
        load_cluster(str(file))


def test_a_name_that_is_close_is_suggested():
    with pytest.raises(UserError, match=r"there is no cluster '/none/own.toml': no such file$"):
        load_cluster("/none/own.toml")
    with pytest.raises(UserError, match="no such file"):
        load_cluster(f"/none/{'x' * 300}.toml")
    with pytest.raises(UserError, match="there is no cluster 'dgx-a10': did you mean 'dgx-a100'"):
        load_cluster("dgx-a10")


@pytest.mark.parametrize("name", ["DGX-A100", "dgx_a100", "Dgx-a100"])
def test_a_name_of_the_catalog_is_found_in_any_case_and_with_either_dash(name):
    assert load_cluster(name) == load_cluster("dgx-a100")


def test_a_file_is_named_by_its_folder_or_ending_and_else_it_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DGX-A100").write_text(FILE)
    (tmp_path / "dgx-a100.toml").write_text(FILE)
    assert load_cluster("DGX-A100").name == "dgx-a100"
    assert load_cluster("./DGX-A100").name == "measured"
    assert load_cluster("dgx-a100.toml").name == "measured"
    (tmp_path / "mine").write_text(FILE)
    with pytest.raises(UserError, match=r"expected a file \(with a folder or \.toml in its name\)"):
        load_cluster("mine")


def test_models_with_the_epsilon_of_norms_name_its_source():
    """Releases and programs have it, papers do not: a run with it needs none from its user."""
    settings = {name: read_model(name).over(ModelConfig()) for name in names("models")}
    known = {name for name, model in settings.items() if model.norm_eps is not None}
    assert known == {name for name in settings if "norm_eps" in source_of("models", name)}
    # Megatron-LM ran these.
    assert {name: settings[name].norm_eps for name in ("gpt-175b", "gpt-1t")} == {"gpt-175b": 1e-5, "gpt-1t": 1e-5}
    assert "model.norm_eps" not in unset(load_run(model={"preset": "gpt-1t"}))


def test_a_key_of_a_file_that_is_close_is_suggested(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(FILE.replace("devices_per_node = 4", "devices_per_node = 4\nadapter_per_node = 2"))
    with pytest.raises(ConfigError, match="no key 'adapter_per_node' here; did you mean 'adapters_per_node'?"):
        load_cluster(str(file))


def test_a_node_has_whole_hosts_and_by_default_it_is_one(tmp_path):
    file = tmp_path / "hosts.toml"
    for hosts, size in (("", 4), ("devices_per_host = 2\n", 2)):
        file.write_text(FILE.replace("devices_per_node = 4", f"{hosts}devices_per_node = 4"))
        assert load_cluster(str(file)).host_size == size
    file.write_text(FILE.replace("devices_per_node = 4", "devices_per_host = 3\ndevices_per_node = 4"))
    with pytest.raises(ConfigError, match="devices_per_host must divide devices_per_node 4.* found 3"):
        load_cluster(str(file))


def test_the_vendor_of_a_device_is_one_that_has_start_files_or_predictions(tmp_path):
    vendors = {name: load_cluster(name).device.vendor for name in names("clusters")}
    assert {name for name, vendor in vendors.items() if vendor == "google"} == {"tpu-v5e", "tpu-v5p"}
    assert {name for name, vendor in vendors.items() if vendor == "amd"} == {"mi300x", "mi325x", "mi355x"}
    file = tmp_path / "wrong.toml"
    file.write_text('base = "mi300x"\nname = "mine"\n[device]\nvendor = "amd inc"\n')
    with pytest.raises(ConfigError, match="vendor must be one of nvidia, amd, google, found 'amd inc'"):
        load_cluster(str(file))


def test_all_problems_of_a_file_are_reported_together(tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text('name = 3\nlayers = 0\nhidden = 8\nheads = 2\nffn = 8\nfamily = "relu"\nvocab = 5\ncolor = 1\n')
    with pytest.raises(ConfigError) as caught:
        load_model(str(file))
    found = "\n".join(caught.value.problems)
    for part in (
        "name must be a text",
        "layers must be",
        "family must be one of llama, gpt2",
        "tied must",
        "key 'color'",
    ):
        assert part in found


def test_figures_that_would_divide_by_zero_or_are_in_si_units_are_refused_together(tmp_path):
    file = tmp_path / "wrong.toml"
    text = FILE.replace("fp32 = 0.1, bf16 = 0.2", "fp32 = 989e12, bf16 = 1e-320").replace(
        "memory_gb = 4", "memory_gb = 0"
    )
    text = text.replace("memory_gb_per_s = 20", "memory_gb_per_s = 3_350_000_000_000").replace("[0.03]", "[3e30]")
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    peak, rate = "must be a number from 1e-06 to 1,000,000 TFLOP/s, found", "from 1e-06 to 1,000,000 GB/s, found"
    assert caught.value.problems == (
        f"[device.peak_tflop_per_s] fp32 {peak} 989000000000000.0; if that is in FLOP/s, write 989",
        f"[device.peak_tflop_per_s] bf16 {peak} 1e-320",
        "[device] memory_gb must be a number from 1e-06 to 1,000,000 GB, found 0",
        f"[device] memory_gb_per_s must be a number {rate} 3350000000000; if that is in bytes/s, write 3350",
        f"[collectives, number 2] all_gather_gb_per_s must be a list of numbers {rate} [3e+30]",
    )


def test_latencies_in_seconds_are_refused_with_the_number_of_microseconds(tmp_path):
    file = tmp_path / "wrong.toml"
    text = FILE.replace("launch_us = 3", "launch_us = 0").replace("kernel_us = 1\n", "kernel_us = 1e-9\n")
    file.write_text(text.replace("latency_us = 50", "latency_us = 3e-6"))
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    wanted = "is in microseconds and must be 0 or a number of at least 0.01, found"
    assert caught.value.problems == (
        f"[device] kernel_us {wanted} 1e-09",
        f"[intra] latency_us {wanted} 3e-06; if that is in seconds, write 3",
        f"[inter] latency_us {wanted} 3e-06; if that is in seconds, write 3",
    )


@pytest.mark.parametrize("value", ["inf", "1e101", "0x1" + 100 * "0"])
def test_a_number_beyond_any_quantity_is_refused(tmp_path, value):
    file = tmp_path / "wrong.toml"
    text = FILE.replace("memory_gb = 4", f"memory_gb = {value}").replace("[4096]", f"[{value}]")
    file.write_text(text.replace("devices_per_node = 4", f"devices_per_node = {value}"))
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    found = [problem.partition(", found")[0] for problem in caught.value.problems]
    assert "devices_per_node must be a whole number of at least 1 and at most 1e+100" in found
    assert "[device] memory_gb must be a number from 1e-06 to 1,000,000 GB" in found
    assert "[collectives, number 2] message_bytes must be a list of numbers from 1e-06 to 1e+100" in found


@pytest.mark.parametrize("text", ["= 3", "a = " + 5000 * "9", "a = " + 5000 * "["])
def test_a_file_that_is_no_toml_is_refused(tmp_path, text):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UserError, match="is not TOML"):
        load_cluster(str(file))


def test_the_function_of_a_model_is_in_its_file(tmp_path):
    model = read_model("llama-3-8b").over(ModelConfig())
    assert (model.norm_eps, model.rope_theta) == (1e-5, 500000.0)
    file = tmp_path / "mine.toml"
    text = 'name = "mine"\nlayers = 2\nhidden = 8\nheads = 2\nffn = 8\nfamily = "gpt2"\nvocab = 5\ntied = true\n'
    file.write_text(text)
    assert read_model(str(file)).over(ModelConfig(norm_eps=0.5)).norm_eps == 0.5
    file.write_text(text + "norm_eps = 0.25\n")
    assert read_model(str(file)).over(ModelConfig(norm_eps=0.5)).norm_eps == 0.25
    file.write_text(text + "norm_eps = inf\nrope_theta = 10000\n")
    with pytest.raises(ConfigError) as caught:
        read_model(str(file))
    assert caught.value.problems == (
        "norm_eps must be a number above 0 and at most 1e+100, found inf",
        "rope_theta has no effect without a family with rotary positions; set that or leave it out",
    )


def test_wrong_heads_of_a_model_file_are_called_what_they_are(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'name = "mine"\nlayers = 2\nhidden = 32\nheads = 6\nkv_heads = 4\nffn = 8\nfamily = "llama"\nvocab = 5\n'
        "tied = true\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_model(str(file))
    assert caught.value.problems == (
        "heads must divide hidden, found 6 and 32; or set head_size",
        "kv_heads must divide heads, found 4 and 6",
    )
