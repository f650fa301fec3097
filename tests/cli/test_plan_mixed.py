"""``pipeloom plan`` over several kinds of nodes: the order it chose is written, and can be simulated and started."""

import json
import re

import pytest
from clusters import mixed, nodes, slow_link

from pipeloom.catalog import load_cluster
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.cli import main

FEW = ["--families", "1f1b", "--micro-batch", "1", "--tp", "1", "--pp", "4", "--dp", "1", "--loops", "1"]


@pytest.fixture
def question(tmp_path):
    """Four sites, in an order in which neighbors have a bad link."""
    good = {"ab", "bc", "cd"}
    pairs = ("ab", "ac", "ad", "bc", "bd", "cd")
    links = [slow_link(*pair, gb_per_s=20 if pair in good else 0.2) for pair in pairs]
    sites = [(nodes(name, devices_per_node=1, price_per_device_hour=2.0), 1) for name in "acbd"]
    file = tmp_path / "sites.toml"
    file.write_text(cluster_to_toml(mixed(*sites, links=links, name="sites")))
    words = ["--model", "llama-3-8b", "--cluster", str(file), "--devices", "4", "--global-batch", "8", "--seq", "512"]
    return ["plan", *words, *FEW, "--no-explain"]


def test_the_chosen_order_is_written_beside_the_run(question, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    run, exported = tmp_path / "planned", tmp_path / "exported"
    assert main([*question, "--out", str(run), "--export", str(exported)]) == 0
    shown = capsys.readouterr().out
    cluster = load_cluster(str(run / "run.cluster.toml"))
    order = [kind.name for kind, _ in cluster.kinds(4)]
    assert order in (list("abcd"), list("dcba"))
    assert f"pipeline ranks {'; '.join(f'{rank} on {name}, node {rank}' for rank, name in enumerate(order))}" in shown
    assert main(["simulate", str(run / "run.toml"), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert [place["kind"] for place in simulated["places"]] == order
    script = (exported / "torchrun.sh").read_text()
    assert re.findall(r"NODE_RANK (\d) on (\w)\.", script) == [(str(rank), name) for rank, name in enumerate(order)]


def test_where_a_run_file_is_not_replaced_its_cluster_is_not_either(question, capsys, tmp_path):
    run = tmp_path / "planned"
    assert main([*question, "--out", str(run)]) == 0
    for name in ("run.toml", "run.cluster.toml"):
        (run / name).write_text((run / name).read_text() + "# filled in\n")
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    assert main([*question, "--out", str(run)]) == 2
    assert "exists and is not the run of this layout" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


def test_json_has_nodes_and_their_cost(question, capsys):
    assert main([*question, "--json"]) == 0
    (best, *_) = json.loads(capsys.readouterr().out)["layouts"]
    assert [number for _, number in best["nodes"]] == [1, 1, 1, 1]
    assert best["dollars_per_billion_tokens"] == pytest.approx(4 * 2.0 * 1e9 / best["tokens_per_s"] / 3600)
