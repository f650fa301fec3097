"""``pipeloom survive``: goodput of three ways to continue, a table of failures, and refusals that name everything."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest

from pipeloom import load_run
from pipeloom.cli import main
from pipeloom.planner.fewer_nodes import fewer_replicas, nodes_of

RUN = ["survive", "--machine.cluster", "dgx-a100", "--model.preset", "gpt-6.6b", "--data.seq-len", "1024"]
RUN += ["--layout.pp", "4", "--layout.dp", "8", "--layout.num-microbatches", "8", "--layout.microbatch-size", "1"]
RUN += ["--layout.shard", "optimizer", "--training.dtype", "bfloat16", "--budget-s", "3"]


def answer(capsys, *words):
    assert main([*RUN, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


OFTEN = [*RUN, "--mtbf", "30d", "--repair-time", "3d", "--checkpoint-time", "20s"]
"""Nodes that fail often, with long repairs."""


@pytest.fixture(scope="module")
def often():
    """The answer for them: its layouts are searched once."""
    with redirect_stdout(StringIO()) as printed:
        assert main([*OFTEN, "--json"]) == 0
    return json.loads(printed.getvalue())


def test_going_on_with_fewer_nodes_beats_waiting_where_repairs_take_long(often):
    ways = often["ways"]
    assert often["num_nodes"] == 4
    useful = {name: one["useful"] for name, one in ways.items()}
    assert useful["wait for the node"] < useful["fewer replicas"] < useful["planned anew"]
    for one in ways.values():
        shares = [value for name, value in one.items() if name != "num_failures"]
        assert sum(shares) == pytest.approx(1.0)


def test_the_layouts_of_the_table_are_in_the_json_with_the_keys_of_a_plan(often):
    layouts = {(one["num_up"], one["way"]): one for one in often["layouts"]}
    ways = ["wait for the node", "fewer replicas", "planned anew"]
    assert list(layouts) == [(number, way) for number in (4, 3, 2, 1) for way in ways[number < 4 :]]
    whole, fewer = layouts[4, "wait for the node"], layouts[3, "fewer replicas"]
    assert (whole["num_nodes"], whole["pp"], whole["dp"], whole["shard"]) == (4, 4, 8, "optimizer")
    assert (fewer["num_nodes"], fewer["pp"], fewer["dp"]) == (2, 4, 4)
    assert min(one["step_time_s"] for one in layouts.values()) == often["fastest_step_s"]


def test_a_table_of_failures_is_walked(capsys, tmp_path):
    table = tmp_path / "failures.csv"
    table.write_text("hours,node,state\n10,3,down\n20,3,up\n100,0,down\n110,0,up\n")
    found = answer(capsys, "--trace", str(table), "--checkpoint-time", "20s", "--restart-time", "1h")
    assert found["span_s"] == 110 * 3600
    waits = found["ways"]["wait for the node"]
    assert waits["num_failures"] == 2
    assert waits["waiting"] == pytest.approx(20 / 110)
    assert waits["restarts"] == pytest.approx(1 / 110)  # the second one is at the end


def test_the_hosts_of_a_node_fail_alone():
    """A GB200 NVL72 has 72 devices that share NVLink, in hosts of 4."""
    rack = load_run(machine={"cluster": "gb200-nvl72"}, layout={"pp": 4, "dp": 18})
    assert nodes_of(rack) == 18
    assert fewer_replicas(rack)(17).step.run.num_devices <= 17 * 4


def test_spares_replace_a_node(capsys, tmp_path):
    table = tmp_path / "failures.csv"
    table.write_text("hours,node,state\n10,3,down\n20,3,up\n")
    found = answer(capsys, "--trace", str(table), "--checkpoint-time", "20s", "--spares", "1")
    assert found["ways"]["wait for the node"]["waiting"] == 0


def test_the_time_of_a_checkpoint_follows_from_the_bytes_of_the_state(capsys, tmp_path):
    table = tmp_path / "failures.csv"
    table.write_text("hours,node,state\n10,3,down\n20,3,up\n")
    found = answer(capsys, "--trace", str(table), "--spares", "1", "--storage", "2")
    parameters = 6.6e9
    assert found["checkpoint_s"] == pytest.approx(parameters * 12 / 2e9, rel=0.05)


def test_no_layout_is_planned_anew_where_the_search_has_other_prices(capsys, tmp_path):
    """The bytes of a checkpoint are those that are written: of frozen weights the values alone."""
    table = tmp_path / "failures.csv"
    table.write_text("hours,node,state\n10,3,down\n20,3,up\n")
    run = [word.replace("gpt-6.6b", "llama-3-8b") for word in RUN]
    run += ["--trace", str(table), "--spares", "1", "--storage", "2"]

    def found(words):
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    limit = run.index("--budget-s")
    own = [*run[:limit], *run[limit + 2 :], "--training.freeze-layers", "32"]
    whole, frozen = found(run), found(own)
    assert whole["not_planned"] == []
    assert list(frozen["ways"]) == ["wait for the node", "fewer replicas"]
    (sentence,) = frozen["not_planned"]
    assert sentence.startswith("training.freeze_layers: the search prices layouts that train all weights")
    # The head of 128,256 tokens is trained, with twelve bytes; all else has two.
    head = 128256 * 4096
    assert whole["checkpoint_s"] == pytest.approx(8.03e9 * 12 / 2e9, rel=0.01)
    assert frozen["checkpoint_s"] == pytest.approx(((8.03e9 - head) * 2 + head * 12) / 2e9, rel=0.01)
    assert main(own) == 0
    assert "no layout is planned anew: training.freeze_layers" in " ".join(capsys.readouterr().out.split())


def test_the_answer_names_the_interval_the_layouts_and_the_time_of_a_move(capsys):
    """The time of a move follows from the state and the network."""
    assert main([*OFTEN, "--rebalance-every", "1h"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--checkpoint.every-s" in out
    assert "3 up, fewer replicas" in out
    assert "longer than the fastest that the planner finds on 4 nodes" in out
    # A quarter of 6.6 B parameters with 12 bytes each, over 200 GB/s of a node.
    assert "Peers that come and go" in out
    assert "0.0986 s later, with its state" in out
    assert "best division" in out


def test_a_search_that_was_cut_short_is_a_sentence(capsys, tmp_path):
    table = tmp_path / "failures.csv"
    table.write_text("hours,node,state\n10,3,down\n20,3,up\n")
    words = ["--trace", str(table), "--checkpoint-time", "20s"]
    assert main([*RUN[:-1], "0.01", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the search was cut short after 0.01 s; a larger --budget-s may find faster layouts" in out
    # Fewer replicas take part in it.
    assert "3 up, planned anew 2" in out


def test_no_way_is_faster_than_the_fastest_layout_on_all_nodes(often):
    """On three of four nodes the planner finds a faster layout than the run has on all of them."""
    for one in often["ways"].values():
        assert min(one.values()) >= 0
    own = often["ways"]["wait for the node"]
    # All its steps take longer than the planner's.
    assert own["slower"] > 0.1
    assert often["ways"]["planned anew"]["slower"] < own["slower"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hours,node\n1,2\n", ["hours, node, state"]),
        ("hours,node,state\n", ["at least one line below"]),
        ("hours,node,state\n1,9,down\nx,0,down\n2,0,off\n", ["line 2: node must be 0 to 3", "line 3", "line 4: state"]),
        ("hours,node,state\n1,0,up\n", ["line 2: node 0 is up already"]),
        ("hours,node,state\n5,0,down\n1,1,down\n", ["in the order of the hours"]),
        ("hours,node,state\n0,0,down\n", ["after hour 0"]),
    ],
)
def test_a_wrong_table_is_refused_with_its_lines(capsys, tmp_path, text, parts):
    table = tmp_path / "failures.csv"
    table.write_text(text)
    assert main([*RUN, "--trace", str(table), "--checkpoint-time", "20s"]) == 2
    error = capsys.readouterr().err
    for part in parts:
        assert part in error


def test_nodes_are_simulated_as_peers_that_come_and_go(capsys, tmp_path):
    """Four pipeline ranks of one node each, and four spares: with two nodes of each rank one may leave."""
    table = tmp_path / "failures.csv"
    table.write_text("hours,node,state\n10.1,0,down\n10.2,1,down\n12,0,up\n100,0,down\n")
    words = ["--trace", str(table), "--checkpoint-time", "20s", "--spares", "4"]
    found = answer(capsys, *words, "--rebalance-every", "30min", "--move-time", "10min")
    never, moved = (found["peers"][name] for name in ("never", "rebalanced"))
    assert never["of_all"] < never["of_up"] <= 1
    # Nodes 0 and 1 serve the same pipeline rank, which has no node until one returns, or another one's moves there.
    assert never["num_moves"] == 0
    assert never["empty_s"] >= 1.8 * 3600
    assert moved["empty_s"] == pytest.approx(0.3 * 3600 + 600)
    assert moved["num_moves"] >= 1
    assert never["of_up"] < moved["of_up"]
    assert "peers" not in answer(capsys, *words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--move-time", "60s"], "--move-time has no effect without --rebalance-every"),
        (["--rebalance-every", "0s"], "--rebalance-every must be an amount above 0 such as 5min or 1h, found '0s'"),
        (["--rebalance-every", "5min", "--layout.dp", "4"], "must have the same pipeline rank, found layout.pp 4"),
    ],
)
def test_peers_that_cannot_be_simulated_are_refused(capsys, words, part):
    assert main([*RUN, "--mtbf", "30d", "--checkpoint-time", "20s", *words]) == 2
    assert part in capsys.readouterr().err


def test_a_time_limit_without_a_search_is_refused(capsys):
    words = [*RUN, "--mtbf", "30d", "--checkpoint-time", "20s", "--model.share-layers", "2", "--budget-s", "1"]
    assert main(words) == 2
    expected = "--budget-s has no effect with model.share_layers, of which no layout is planned; leave it out"
    assert expected in capsys.readouterr().err
