"""Cost and time over cluster sizes: the formulas by hand, the front by brute force, facts that no search may break."""

from dataclasses import replace
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from clusters import mixed, nodes
from hypothesis import given

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.errors import ConfigError
from pipeloom.planner.goals import DAY_S
from pipeloom.planner.plan import plan
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.search import search
from pipeloom.planner.tradeoff import (
    METHODS,
    Tradeoff,
    Training,
    critical_batch_tokens,
    default_critical_batch,
    of_method,
    pareto_front,
    scaling_problems,
    tradeoff,
    whole_batches,
)

OURS, MEGATRON = load_software("pipeloom"), load_software("megatron-2021")
QUESTION = Question(
    shape=load_model("gpt-6.6b"),
    cluster=replace(load_cluster("dgx-1-v100"), price_per_device_hour=2.0),
    software=OURS,
    num_devices=16,
    global_batch=1,
    seq=1024,
    precision="fp16",
)
TRAINING = Training(tokens=1e11, critical_batch=1000)
ASKED = Tradeoff(
    question=QUESTION,
    training=TRAINING,
    methods={"breadth-first": OURS, "1f1b": MEGATRON, "data-parallel": OURS},
    device_counts=(16, 64),
    batches_per_device=(Fraction(1, 2), Fraction(2)),
    alternatives=2,
)


@pytest.fixture(scope="module")
def curves():
    return tradeoff(ASKED)


def step_s(point):
    return point.step.prediction.step_time_s


def test_a_point_is_the_fastest_layout_of_a_plan_for_its_method_batch_and_devices():
    requested = replace(ASKED, methods={"1f1b": OURS}, batches_per_device=(Fraction(2),), searches_every_size=True)
    for point in tradeoff(requested).points:
        sizes = {"num_devices": point.num_devices, "global_batch": 2 * point.num_devices}
        question = replace(of_method(QUESTION, "1f1b", OURS), **sizes)
        assert step_s(point) == plan(question, 1, explains=False).best.prediction.step_time_s


def test_a_batch_of_the_critical_size_needs_twice_the_tokens_and_time_and_dollars_follow():
    training = Training(tokens=1e9, critical_batch=500)
    assert training.needed_tokens(500) == 2e9
    assert training.needed_tokens(250) == 1.5e9
    assert training.seconds(250, 1e6) == 1500


def test_the_published_fit_of_the_critical_batch():
    # 52 B: loss (8.8e13 / 5.15e10)^0.076 = 1.761, 2e8 / 1.761^(1 / 0.21) tokens
    assert critical_batch_tokens(5.15e10) == pytest.approx(13.5e6, rel=0.01)
    assert critical_batch_tokens(8.8e13) == 2e8
    sequences = default_critical_batch(load_model("gpt-52b"), 1024)
    assert sequences == pytest.approx(13_200, rel=0.01)
    assert default_critical_batch(load_model("gpt-52b"), 2048) == pytest.approx(sequences / 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_the_front_has_every_pair_that_no_other_dominates(pairs):
    def dominates(a, b):
        return a[0] <= b[0] and a[1] <= b[1] and a != b

    found = [pairs[number] for number in pareto_front(pairs)]
    assert set(found) == {pair for pair in pairs if not any(dominates(other, pair) for other in pairs)}
    assert len(set(found)) == len(found)
    assert found == sorted(found)


def test_on_the_reference_a_point_is_what_the_search_finds(curves):
    for method, software in ASKED.methods.items():
        question = replace(of_method(QUESTION, method, software), global_batch=32)
        step = search(question, 1).best
        (point,) = [p for p in curves.points if (p.method, p.num_devices, p.batch_per_device) == (method, 16, 2)]
        assert point.step.prediction.step_time_s == step.prediction.step_time_s
        assert point.step.mfu == point.reference_mfu == step.mfu
        assert point.seconds == pytest.approx(1e11 * (1 + 32 / 1000) / (32 * 1024) * step.prediction.step_time_s)
        assert point.dollars == pytest.approx(point.days * 24 * 16 * 2)
        assert point.seconds == pytest.approx(point.days * DAY_S)


def test_points_keep_their_axes_and_batch_per_device_and_their_method(curves):
    assert len(curves.points) == 3 * 2 * 2
    for point in curves.points:
        run, family = point.step.run, point.step.knobs.choice.family
        assert run.num_devices == point.num_devices
        assert run.global_batch == point.batch_per_device * point.num_devices
        assert (run.pp == 1) == (point.method == "data-parallel")
        assert point.step.software.name == ASKED.methods[point.method].name
        if point.method == "1f1b":
            assert (family, run.loops) == ("1f1b", 1)
        if point.method == "breadth-first":
            assert family == "breadth-first"
            assert run.loops > 1
    for large in (p for p in curves.points if p.num_devices == 64):
        assert large.step.run.tp * large.step.run.pp <= 16


def test_the_best_of_a_cluster_is_its_fastest_and_the_front_is_made_of_them(curves):
    for count in ASKED.device_counts:
        of_size = [point for point in curves.points if point.num_devices == count]
        assert curves.best(count).seconds == min(point.seconds for point in of_size)
        assert curves.best(count).dollars == min(point.dollars for point in of_size)
        assert curves.best(count, "1f1b").seconds == min(p.seconds for p in of_size if p.method == "1f1b")
    assert {id(point) for point in curves.front} <= {id(curves.best(count)) for count in ASKED.device_counts}
    assert curves.front[0] is curves.best(64)
    assert [point.num_devices for point in curves.curve("data-parallel")] == [16, 64]


def test_a_smaller_critical_batch_costs_more_and_never_asks_for_larger_batches(curves):
    few = {name: ASKED.methods[name] for name in ("1f1b", "data-parallel")}
    tight = tradeoff(replace(ASKED, methods=few, training=replace(TRAINING, critical_batch=50)))
    for before, after in zip([one for one in curves.points if one.method in few], tight.points, strict=True):
        assert step_s(after) == step_s(before)
        assert after.seconds > before.seconds
    for count in ASKED.device_counts:
        for method in few:
            assert tight.best(count, method).batch_per_device <= curves.best(count, method).batch_per_device


def test_searching_every_size_is_never_slower_than_scaling(curves):
    few = {name: ASKED.methods[name] for name in ("1f1b",)}
    found = tradeoff(replace(ASKED, methods=few, searches_every_size=True)).points
    for scaled, searched in zip([one for one in curves.points if one.method in few], found, strict=True):
        assert (scaled.method, scaled.num_devices) == (searched.method, searched.num_devices)
        assert scaled.reference_mfu == searched.reference_mfu
        if scaled.num_devices == 16:
            assert step_s(searched) == step_s(scaled)
        assert step_s(searched) <= step_s(scaled)


def test_progress_is_reported_after_every_method_and_batch_and_what_fits_nowhere_is_progress():
    progress = []
    requested = replace(
        ASKED,
        question=replace(QUESTION, shape=load_model("gpt-175b")),
        methods={"1f1b": OURS},
        batches_per_device=(Fraction(1),),
    )
    found = tradeoff(requested, lambda *numbers: progress.append(numbers))
    assert progress == [(1, 1)]
    assert found.points == ()
    assert found.missing == (("1f1b", Fraction(1)),)
    assert found.best(16) is None
    assert found.front == []


def test_what_a_time_limit_cuts_short_is_progress_and_not_as_what_fits_nowhere():
    inputs = replace(ASKED, methods={"1f1b": OURS}, batches_per_device=(Fraction(1, 2), Fraction(2)), alternatives=10)
    found = tradeoff(inputs, budget_s=1e-3)
    assert set(found.unproved) == {("1f1b", Fraction(1, 2)), ("1f1b", Fraction(2))}
    assert found.missing == ()


def test_a_long_time_limit_changes_nothing(curves):
    few = replace(ASKED, methods={"1f1b": MEGATRON})
    found = tradeoff(few, budget_s=600.0)
    assert found.unproved == ()
    assert [step_s(one) for one in found.points] == [step_s(one) for one in curves.points if one.method == "1f1b"]


def test_problems_are_reported_all_at_once():
    with pytest.raises(ConfigError) as error:
        Training(tokens=0, critical_batch=0.5)
    assert len(error.value.problems) == 2
    found = scaling_problems(64, (64, 100), (Fraction(1, 3), Fraction(1, 2)))
    assert len(found) == 2
    assert "100" in found[0]
    assert "64 = 21.3" in found[1]
    with pytest.raises(ConfigError, match=r"breadth-first: megatron-2021 has no family"):
        replace(ASKED, methods={"breadth-first": MEGATRON})
    with pytest.raises(ConfigError, match=r"no method 'gpip'; did you mean 'gpipe'\? known: breadth-first"):
        replace(ASKED, methods={"gpip": OURS})


def test_a_cluster_of_several_kinds_has_no_sizes_to_choose_from():
    both = mixed((nodes("a"), 1), (nodes("b", rate=2e14), 1))
    with pytest.raises(ConfigError, match="16 devices in nodes of several kinds"):
        replace(ASKED, question=replace(QUESTION, cluster=both, precision="bf16"))


def test_batches_that_are_whole_on_the_reference():
    assert whole_batches(4) == (Fraction(1, 4), Fraction(1, 2), 1, 2, 4, 8)


def test_limits_of_the_question_hold_for_every_method():
    limited = replace(QUESTION, limits=Limits(tp=(2,), pp=(1, 4)))
    for method in METHODS:
        found = search(replace(of_method(limited, method, OURS), global_batch=16), 1).best
        assert (found.run.tp, found.run.pp) == (2, 1 if method == "data-parallel" else 4)
