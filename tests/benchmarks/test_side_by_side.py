"""The side-by-side benchmark does what it promises; how long anything takes is not asserted."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ink import cut_texts, overlaps

from pipeloom.schedule import PLACEMENTS, Action, Placement
from side_by_side import contest, hosts, orders, stages, theory
from side_by_side.case import PYTORCH_SCHEDULES, Case, Contender, Link, Measured, Plan, pytorch_contender
from side_by_side.picture import draw, figure_of
from side_by_side.results import Load, Outcome, Target, rows, write

TINY = Case(name="tiny", pp=2, num_microbatches=4, width=8, message_bytes=128)
EMPTY = Case(name="empty", pp=2, num_microbatches=4, message_bytes=64)
OURS = Contender("pipeloom", "breadth-first", 2)


def test_both_runtimes_compute_the_same_gradients():
    theirs = [pytorch_contender(name, 2) for name in PYTORCH_SCHEDULES]
    singles = [Contender("pipeloom", "gpipe", 1)]
    plan = Plan(TINY, (OURS, *singles, *theirs), repetitions=1, compares_gradients=True)
    measured = contest.run(plan)
    by_loops = {2: measured[0].gradients, 1: measured[1].gradients}
    assert [len(by_loops[loops]) for loops in (2, 1)] == [4 * 4, 2 * 8]
    for one in measured[2:]:
        expected = by_loops[one.contender.loops]
        assert set(one.gradients) == set(expected)
        for name, gradient in one.gradients.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-6)
        assert len(one.seconds) == 1
    assert {"send", "recv"} == set(measured[0].lanes)


def test_replicas_share_their_weights_in_both_runtimes():
    case = replace(EMPTY, dp=2, weight_bytes=4096)
    measured = contest.run(Plan(case, (OURS, pytorch_contender("1F1B", 2), pytorch_contender("LoopedBFS", 2)), 1))
    assert "data-parallel" in measured[0].lanes
    assert all(len(one.seconds) == 1 for one in measured)


@pytest.mark.parametrize("name", PYTORCH_SCHEDULES)
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8)])
def test_pytorchs_orders_are_read(name, pp, count):
    contender = pytorch_contender(name, 2)
    case = replace(EMPTY, pp=pp, num_microbatches=count, forward_s=1.0, backward_s=2.0)
    schedule = orders.compute_order(case, contender)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (pp, pp * contender.loops, count)
    assert theory.theory_s(case, contender, schedule) >= case.ideal_s


def test_theory_of_breadth_first_follows_the_formula():
    case = replace(EMPTY, pp=4, num_microbatches=8, forward_s=1.0, backward_s=2.0)
    schedule = orders.compute_order(case, OURS)
    assert theory.theory_s(case, OURS, schedule) == case.ideal_s + 3 * 3.0
    slow = replace(case, link=Link(8e-6, 100.0), message_bytes=1)  # a byte takes a second, and a tenth to arrive
    first = theory.theory_s(slow, OURS, schedule)
    assert first > case.ideal_s + 3 * 3.0 + 2 * 3 * 1.1


def test_messages_of_an_edge_follow_each_other_closely():
    """The last of M messages arrives M times its bytes and one latency after the first began."""
    case = replace(EMPTY, pp=2, num_microbatches=8, loops=1, link=Link(8e-6, 100.0), message_bytes=1)
    contender = Contender("pipeloom", "gpipe", 1)
    assert theory.theory_s(case, contender, orders.compute_order(case, contender)) == pytest.approx(2 * (8 + 0.1))


def test_an_emulated_stage_sleeps_for_the_given_time_less_its_own_cost():
    case = replace(EMPTY, forward_s=0.004, backward_s=0.006)
    own = stages.own_cost(case, 0.005, 0.009)
    assert own == stages.OwnCost(pytest.approx(0.001), pytest.approx(0.003))
    stage = stages.stage_of(case, 1, 1, own)  # one stage instead of two: twice the work, once the cost
    assert stage._forward_s == pytest.approx(0.007)
    assert stage._half_s == pytest.approx(0.0045)
    assert stages.own_cost(EMPTY, 0.005, 0.009) == stages.OwnCost()


# ------------------------------------------------------------------------------------------------------------- hosts


def test_without_permission_for_hosts_the_reason_is_printed(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert hosts.why_not() == "network namespaces need root"
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda _: None)
    assert "iproute2" in hosts.why_not()
    assert "Python" in hosts.relay_kind()
    monkeypatch.setattr(hosts.sys, "platform", "darwin")
    assert "Linux" in hosts.why_not()


@pytest.mark.parametrize("compiler", ["gcc", None])
def test_ranks_on_hosts_of_their_own_exchange_messages(monkeypatch, compiler):
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(f"no shaped network here: {reason}")
    which = hosts.shutil.which
    if compiler is None:
        monkeypatch.setattr(hosts.shutil, "which", lambda name: None if name == "gcc" else which(name))
    elif which("gcc") is None:
        pytest.skip("no shaped network with the C relay here: gcc is missing")
    case = replace(EMPTY, loops=1, num_microbatches=2, link=Link(50, 20))
    (ours,) = contest.run(Plan(case, (Contender("pipeloom", "gpipe", 1),), 1))
    assert min(ours.seconds) > 2 * case.link.latency_s  # there and back


# ----------------------------------------------------------------------------------------------------------- results


def outcome(*, met=True):
    theirs = pytorch_contender("LoopedBFS", 2)
    ours = Measured(OURS, [0.2, 0.1, 0.3], 0.1, 0.05, 10, 0.5, {"recv": (0.01, 0.002)})
    measured = (ours, Measured(theirs, [0.4, 0.4, 0.4], 0.1, 0.05, 10, 0.5))
    target = Target("pipeloom / PyTorch", 0.5, 0.58 if met else 0.4)
    return Outcome(Plan(TINY, (OURS, theirs), 3), measured, Load(0.1, 0.2), (target,))


def test_ratios_and_their_spread_are_of_medians_and_of_pairs():
    ours, theirs = rows(outcome())
    assert (ours["median_ms"], ours["min_ms"], ours["max_ms"], ours["to_theory"]) == (200, 100, 300, 2)
    assert theirs["pipeloom_to_this"] == 0.5
    assert (theirs["pipeloom_to_this_min"], theirs["pipeloom_to_this_max"]) == (0.25, 0.75)
    assert ours["beside_compute_ms"] == 150
    assert (ours["recv_hidden_ms"], ours["recv_exposed_ms"]) == (10, 2)


def test_a_target_says_whether_it_is_met():
    assert str(outcome().targets[0]) == "pipeloom / PyTorch: 0.500, at most 0.58: met"
    assert str(outcome(met=False).targets[0]).endswith("MISSED")


def test_what_was_measured_is_written_and_drawn(tmp_path):
    write([outcome()], {"cores": 2}, tmp_path, "test")
    with (tmp_path / "test.csv").open(encoding="utf-8", newline="") as file:
        assert [line["order"] for line in csv.DictReader(file)] == ["breadth-first", "LoopedBFS"]
    tree = json.loads((tmp_path / "test.json").read_text(encoding="utf-8"))
    assert tree["cases"][0]["seconds"]["PyTorch LoopedBFS x2"] == [0.4, 0.4, 0.4]
    assert tree["cases"][0]["targets"][0]["met"]
    draw(rows(outcome()), tmp_path / "test.svg")
    assert (tmp_path / "test.svg").read_bytes()[:5] == b"<?xml"


PICTURED = Path(__file__).parents[2] / "docs" / "images" / "side_by_side.csv"


def test_no_text_of_the_picture_is_cut_or_lies_on_another(tmp_path):
    with PICTURED.open(encoding="utf-8", newline="") as table:
        lines = list(csv.DictReader(table))
    figure = figure_of(lines)
    assert len(figure.axes) == 4
    assert cut_texts(figure) == []
    assert overlaps(figure) == []


def test_the_picture_shows_what_the_page_says():
    page = (PICTURED.parents[1] / "benchmarks.md").read_text(encoding="utf-8")
    with PICTURED.open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            name = f"{row['runtime']} {row['order']}"
            step = f"{row['median_ms']} ({row['min_ms']} .. {row['max_ms']}) | {row['theory_ms']} "
            assert f"| {name} | {row['loops']} | {step}" in page.replace("**", "")


def test_a_message_leaves_by_its_senders_link_and_enters_by_its_receivers():
    case = Case(name="two", pp=2, dp=2, message_bytes=1024, weight_bytes=4096, link=Link(100, 1))
    _, sharing = theory.priced(case, Contender("pipeloom", "breadth-first", 2), Placement.looped(2, 2))
    links = {
        text: (sharing.resource_of(Action.parse(text), rank), sharing.onward_of(Action.parse(text), rank))
        for text, rank in {
            "0SEND_F0": 0,
            "3SEND_B0": 1,
            "1UNSHARD": 1,
            "0REDUCE_GRAD": 0,
            "1F0": 1,
            "1RECV_F0": 1,
        }.items()
    }
    assert links == {
        "0SEND_F0": (("up", 0), ("down", 1)),
        "3SEND_B0": (("up", 1), ("down", 0)),
        "1UNSHARD": (("up", 1), ("down", 1)),
        "0REDUCE_GRAD": (("up", 0), ("down", 0)),
        "1F0": (None, None),
        "1RECV_F0": (None, None),
    }
    _, sharing = theory.priced(case, Contender("pipeloom", "zb-v", 2), PLACEMENTS["v"](2, 2))
    assert sharing.onward_of(Action.parse("2SEND_F0"), 1) == ("down", 0)
