"""A cluster that is written and read again is the same cluster."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.catalog import load_cluster, load_model, names
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.cost.hardware import CollectiveCurve, Link
from pipeloom.cost.measured import MeasuredPieces, MeasuredUpdate
from pipeloom.errors import ConfigError
from pipeloom.terminal.words import UNBREAKABLE
from pipeloom.workload.run import Run

A100 = load_cluster("dgx-a100")
KEY = Run(shape=load_model("llama-13b"), seq=128, tp=2, micro_batch=4, sequence_parallel=True).of_measured_pieces
PIECES = MeasuredPieces(
    run=KEY,
    embedding=(1e-6, 0.0),
    layer=(2e-3, 4e-3),
    head=(1.5e-3, 2.5e-3),
    stage=(10 * 1e-6, 20 * 1e-6),
    message_s=1e-3,
)
MEASURED = replace(
    A100,
    devices_per_host=4,
    cores_per_node=2,
    pieces=(PIECES, replace(PIECES, run=replace(KEY, recompute="full"), message_s=0.0)),
    update=MeasuredUpdate(fixed_s=1e-3, parameter_s=8e-9, precision="fp32"),
    name='the "best" \\ one, größer',
    device=replace(
        A100.device, vendor="amd", matmul_curves={"fp32": tuple((x, y / 2) for x, y in A100.device.matmul_curve)}
    ),
    collective_curves={
        "all_reduce": (
            CollectiveCurve(ranks=2, points=((4096.0, 1.5e7), (2.0**30, 2e11))),
            CollectiveCurve(ranks=8, points=((4128.0, 1e7),)),
        ),
        "all_gather": (CollectiveCurve(ranks=8, points=((4128.0, 2e7),)),),
    },
)


def again(cluster, folder, notes=None):
    file = folder / "cluster.toml"
    file.write_text(cluster_to_toml(cluster, notes), encoding="utf-8")
    return load_cluster(str(file))


@pytest.mark.parametrize("name", names("clusters"))
def test_every_cluster_of_the_catalog_survives(name, tmp_path):
    cluster = load_cluster(name)
    assert again(cluster, tmp_path) == cluster


def test_everything_that_a_file_can_hold_survives(tmp_path):
    assert again(MEASURED, tmp_path) == MEASURED


@given(st.floats(1.001e-8, 10), st.floats(1e3, 1e15), st.integers(1, 2**50))
def test_any_number_survives_to_six_digits_and_then_unchanged(tmp_path_factory, seconds, rate, size):
    folder = tmp_path_factory.getbasetemp()
    curve = CollectiveCurve(ranks=2, points=((float(size), rate),))
    cluster = replace(A100, intra=Link(latency_s=seconds, bytes_per_s=rate), collective_curves={"all_reduce": (curve,)})
    once = again(cluster, folder)
    assert once.intra.latency_s == pytest.approx(seconds, rel=1e-5)
    assert once.intra.bytes_per_s == pytest.approx(rate, rel=1e-5)
    assert once.collective_curves["all_reduce"][0].points[0][0] == size
    assert cluster_to_toml(again(once, folder)) == cluster_to_toml(once)


def test_a_latency_that_no_file_has_is_written_as_0(tmp_path):
    cluster = replace(A100, intra=Link(latency_s=5e-9, bytes_per_s=1e9))
    assert again(cluster, tmp_path).intra == Link(latency_s=0.0, bytes_per_s=1e9)


def test_comments_stand_above_what_they_are_about(tmp_path):
    notes = {
        "": ["Measured.", "On a machine."],
        "device.kernel_us": ["fixed"],
        "intra": ["a link"],
        "collectives.8": ["eight"],
        "collectives.2": ["two"],
    }
    text = cluster_to_toml(MEASURED, notes)
    assert text.startswith("# Measured.\n# On a machine.\nname = ")
    assert "# fixed\nkernel_us = 4.0\n" in text
    assert "[intra]\n# a link\nlatency_us" in text
    assert "# two\n[[collectives]]\nranks = 2\n" in text
    assert "# eight\n[[collectives]]\nranks = 8\n" in text
    assert again(MEASURED, tmp_path, notes) == MEASURED


def test_a_long_comment_is_wrapped_and_keeps_together_what_belongs_together():
    pieces = [f"{n}{UNBREAKABLE}KiB" for n in range(60)]
    lines = cluster_to_toml(A100, {"": [", ".join(pieces)]}).split("\nname")[0].splitlines()
    assert len(lines) > 2
    assert all(line.startswith("# ") and len(line) <= 118 and line.rstrip(",").endswith(" KiB") for line in lines)


def test_a_comment_on_nothing_is_a_bug():
    with pytest.raises(AssertionError, match="device.color"):
        cluster_to_toml(A100, {"device.color": ["blue"]})


def test_all_problems_of_measured_pieces_are_reported_at_once(tmp_path):
    file = tmp_path / "cluster.toml"
    text = cluster_to_toml(replace(MEASURED, pieces=(PIECES,)))
    wrong = {
        "layer_us = [2000, 4000]": "layer_us = [2000]",
        '"llama"': '"relu"',
        "fixed_us = 1000": "fixed_us = -1",
    }
    for right, changed in wrong.items():
        assert right in text
        text = text.replace(right, changed)
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file))
    assert caught.value.problems == (
        "[pieces] family must be one of llama, gpt2, qwen2, qwen3, olmo2, gemma2, gemma3, found 'relu'",
        "[pieces] layer_us must be a list of two numbers of at least 0, found [2000]",
        "[update] fixed_us must be a number of at least 0, found -1",
    )
