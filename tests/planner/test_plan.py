"""A plan's reasons add up, its changes are answers of their own, and advice is true."""

import re
import time
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.config import find_problems
from pipeloom.cost.what_if import changed, with_bandwidth, with_memory
from pipeloom.errors import ConfigError, UserError
from pipeloom.planner.advice import advice, on_devices, on_simpler
from pipeloom.planner.comparison import FAR, NO_PIPELINE, Change, Rival, causes
from pipeloom.planner.error_bar import error_bar
from pipeloom.planner.infeasible import near_devices
from pipeloom.planner.plan import make_question
from pipeloom.planner.plan import plan as make_plan
from pipeloom.planner.question import ONE_STAGE, Limits, Question
from pipeloom.planner.run_file import run_config
from pipeloom.planner.run_step import predict_step
from pipeloom.planner.search import Search, search
from pipeloom.planner.space import has_arrangement
from pipeloom.predict.describe import with_model_sizes


def test_causes_add_up_to_the_step(ask):
    for step in search(ask(), 20).steps:
        assert sum(causes(step).values()) == pytest.approx(step.prediction.step_time_s, rel=1e-9)


def test_recomputation_is_a_cause_of_its_own(ask):
    question = ask().limited(recompute=("full",))
    step = search(question, 1).best
    parts = causes(step)
    assert parts["recompute_s"] > 0
    assert parts["compute_s"] / parts["recompute_s"] == pytest.approx(3, rel=0.6)


def test_rivals_are_the_best_of_their_kind_and_say_what_they_cost_more(ask):
    question = ask()
    plan = make_plan(question)
    kinds = {rival.kind: rival for rival in plan.rivals}
    limits = {
        "all layers recomputed": {"recompute": ("full",)},
        "gpipe": {"families": ("gpipe",), "pp": (2, 4)},
        "1f1b": {"families": ("1f1b",), "pp": (2, 4)},
        "breadth-first": {"families": ("breadth-first",), "pp": (2, 4)},
    }
    far = FAR * plan.best.prediction.step_time_s
    for kind, limit in limits.items():
        alone = search(question.limited(**limit), 1).best.prediction.step_time_s
        rival = kinds[kind]
        # A schedule whose best layout is far slower has a bound in place of a layout.
        is_far = kind != "all layers recomputed" and alone > far
        assert rival.least_s == (far if is_far else None)
        assert (rival.step is None) if is_far else (rival.step.prediction.step_time_s == alone)
    assert {kinds[kind].least_s for kind in limits} == {None, far}
    for rival in plan.rivals:
        if rival.step is not None:
            more_s = rival.step.prediction.step_time_s - plan.best.prediction.step_time_s
            assert sum(rival.more_s.values()) == pytest.approx(more_s, abs=1e-9)
            assert more_s >= 0


def test_changes_are_answers_of_their_own(ask):
    question = ask(num_devices=8, global_batch=16, cluster=replace(load_cluster("dgx-1-v100"), devices_per_node=4))
    plan = make_plan(question)
    changes = {change.what: change for change in plan.changes}
    faster = replace(question, cluster=with_bandwidth(question.cluster, inter=2.0))
    twice = search(faster, 1).best
    assert changes["twice the bandwidth between nodes"].step.run == twice.run
    assert changes["twice the bandwidth between nodes"].speed >= 1
    assert changes["10 % more memory"].speed >= 1
    assert changes["half the batch"].step.run.global_batch == 8
    assert changes["twice the batch"].step.run.global_batch == 32


def test_no_pipeline_is_advised_where_none_is_better():
    question = Question(
        shape=load_model("llama-3-8b"),
        cluster=load_cluster("dgx-h100"),
        software=load_software("pipeloom"),
        num_devices=8,
        global_batch=512,
        seq=2048,
        limits=Limits(tp=(1,), micro_batch=(1, 2)),
    )
    plan = make_plan(question)
    (about,) = [sentence for sentence in plan.advice if "pipeline" in sentence]
    with_one = search(question.limited(pp=(2, 4, 8)), 1).best
    without = search(question.limited(pp=(1,)), 1).best
    is_better = without is not None and without.tokens_per_s > with_one.tokens_per_s
    assert about.startswith("Do not use a pipeline") == is_better
    assert (plan.best.run.pp == 1) == is_better


def test_missing_memory_is_reported_in_bytes_with_ways_out(ask):
    cluster = load_cluster("dgx-1-v100")
    short = replace(cluster, device=replace(cluster.device, memory_bytes=1.65e9))
    plan = make_plan(ask(cluster=short))
    assert plan.best is None
    assert plan.closest.missing_bytes == plan.closest.least_bytes - 1.65e9 > 0
    assert plan.closest.room_bytes == 1.65e9
    assert plan.closest.ways_out
    for what, step in plan.closest.ways_out:
        assert step.prediction.fits
        assert str(step.run.num_devices if "devices" in what else step.run.seq) in what


def test_a_batch_that_nothing_divides_is_answered_with_batches_that_do(ask):
    question = ask(num_devices=16, global_batch=9).limited(tp=(1,), pp=(2,))
    with pytest.raises(UserError, match="the batch may be 8 or 16 instead of 9"):
        make_plan(question)


def test_devices_that_nothing_divides_are_answered_with_numbers_that_do(ask):
    with pytest.raises(UserError, match="there may be 2 or 4 devices instead of 3"):
        make_plan(ask(num_devices=3, global_batch=16).limited(pp=(1, 2)))


def test_several_nodes_that_nothing_divides_are_answered_with_whole_nodes(ask):
    with pytest.raises(UserError, match="there may be 56 or 64 devices instead of 63"):
        make_plan(ask(num_devices=63, global_batch=256, shape=replace(ask().shape, layers=32)))


def test_sharding_levels_may_be_in_any_order(ask):
    short = with_memory(load_cluster("dgx-1-v100"), 0.08)
    one, other = (
        search(ask(cluster=short, limits=Limits(shards=shards)), 3).steps
        for shards in (("none", "full"), ("full", "none"))
    )
    assert [step.run for step in one] == [step.run for step in other] != []


def test_a_kind_that_does_not_exist_is_no_rival(ask):
    plan = make_plan(ask(num_devices=13, global_batch=13).limited(tp=(1,), micro_batch=(1,)))
    assert plan.best.run.dp == 13
    assert not {"a pipeline", "tp not 1", "micro-batch not 1"} & {rival.kind for rival in plan.rivals}
    assert not any("pipeline" in sentence for sentence in plan.advice)


def test_the_budget_is_for_the_whole_answer(ask):
    plan = make_plan(ask(num_devices=16, global_batch=32), budget_s=1e-6)
    assert plan.best is None
    assert (plan.stopped, plan.open_bound_s) == ("time", plan.question.least_s)
    assert (plan.rivals, plan.changes) == ([], [])


MILLION = {
    "shape": load_model("llama-3-8b"),
    "cluster": load_cluster("dgx-h100"),
    "num_devices": 1_000_000,
    "seq": 2048,
    "precision": "bf16",
}


@pytest.mark.usefixtures("loses_exceptions")
@pytest.mark.parametrize("phase", ["enumeration", "bounds", "simulation", "what a lack would need"])
def test_a_plan_of_a_million_devices_ends_in_time_whatever_takes_long(ask, monkeypatch, phase):
    def stuck(*_, **__):
        while True:
            time.sleep(0.001)

    name = {
        "enumeration": "search.Arrangement.count",
        "bounds": "space.Twig.bounded",
        "simulation": "candidate.Candidate.simulate",
        "what a lack would need": "plan.closest",
    }[phase]
    changes = MILLION | {"global_batch": 1_000_000}
    if phase == "what a lack would need":
        cluster = replace(MILLION["cluster"], device=replace(MILLION["cluster"].device, memory_bytes=1.6e9))
        changes |= {"cluster": cluster, "num_devices": 16, "global_batch": 16}
    question = ask(**changes)
    monkeypatch.setattr(f"pipeloom.planner.{name}", property(stuck) if phase == "enumeration" else stuck)
    begin = time.monotonic()
    plan = make_plan(question, budget_s=1.0)
    assert time.monotonic() - begin < 30  # on a busy machine; without a limit, never
    assert plan.stopped == "time"
    assert plan.best is None
    if phase == "what a lack would need":
        assert plan.counts.too_large == plan.counts.layouts
    else:
        assert plan.open_bound_s > 0
        assert plan.counts.undecided == plan.counts.layouts - plan.counts.too_large


@pytest.mark.usefixtures("loses_exceptions")
def test_a_short_time_is_enough_for_an_answer_and_a_bound_below_it(ask):
    question = ask(**MILLION, global_batch=1_000_000)
    # The first budget is enough where nothing else runs.
    plan = next(plan for budget_s in (2.0, 8.0, 40.0) if (plan := make_plan(question, budget_s=budget_s)).best)
    assert plan.stopped == "time"
    # A fast machine may have proved the best layout in that time, with others of the answer still undecided.
    assert plan.question.least_s < plan.best.prediction.step_time_s
    # On a busy machine the time is up before all layouts are enumerated; then the bound is that of the question.
    assert plan.question.least_s <= plan.open_bound_s


def test_a_million_devices_that_nothing_divides_are_answered_at_once(ask):
    begin = time.process_time()
    with pytest.raises(UserError, match="there may be 278528 devices instead of 1000000"):
        make_plan(ask(**MILLION, global_batch=1024))
    assert time.process_time() - begin < 10


@given(
    heads=st.sampled_from([1, 2, 6, 8]),
    layers=st.integers(1, 6),
    batch=st.integers(1, 40),
    number=st.integers(1, 60),
    pps=st.none() | st.lists(st.integers(1, 6), min_size=1, max_size=2).map(tuple),
)
def test_the_nearest_numbers_of_devices_are_those_that_a_look_at_each_finds(heads, layers, batch, number, pps):
    shape = replace(load_model("gpt-6.6b"), layers=layers, hidden=64 * heads, heads=heads, kv_heads=heads)
    question = Question(
        shape=shape,
        cluster=load_cluster("dgx-1-v100"),
        software=load_software("pipeloom"),
        num_devices=number,
        global_batch=batch,
        seq=64,
        precision="fp16",
        limits=Limits(pp=pps),
    )
    divided = [n for n in range(1, 2 * number + 1) if has_arrangement(replace(question, num_devices=n))]
    if number > question.cluster.devices_per_node:
        whole = [n for n in divided if n % question.cluster.devices_per_node == 0]
        below = [n for n in whole if n < number] or [n for n in divided if n < number]
        above = [n for n in whole if n > number] or [n for n in divided if n > number]
    else:
        below, above = [n for n in divided if n < number], [n for n in divided if n > number]
    assert near_devices(question) == below[-1:] + above[:1]


def test_a_batch_of_too_many_micro_batches_is_left_out(ask):
    with pytest.raises(UserError, match="micro-batches on its ranks"):
        make_plan(ask(num_devices=4, global_batch=4_000_012).limited(micro_batch=(1,)))


def test_all_problems_of_a_question_are_reported(ask):
    with pytest.raises(ConfigError) as refusal:
        ask(num_devices=0, global_batch=0, precision="bf16", limits=Limits(families=("zebra",)))
    assert len(refusal.value.problems) == 4


@pytest.mark.parametrize("limits", [{}, {"pp": (2,), "shards": ("full",)}, {"recompute": ("full",)}, {"pp": (1,)}])
def test_the_run_of_a_plan_is_a_run_that_simulates_the_same(ask, limits):
    step = search(ask(shape=load_model("gpt-6.6b"), num_devices=8, global_batch=16).limited(**limits), 1).best
    config = run_config(step, "gpt-6.6b", "dgx-1-v100", "pipeloom")
    config, problems = with_model_sizes(config)
    assert [*problems, *find_problems(config, trains=False)] == []
    assert predict_step(config).prediction.step_time_s == pytest.approx(step.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize("families", [("zb-h1", "interleaved-zb"), ("gpipe", "breadth-first")])
def test_a_schedule_with_two_names_is_one_row(ask, families):
    def answer(*names):
        return search(ask().limited(families=names, loops=(1,), pp=(2, 4), micro_batch=(1, 2)), 20)

    both, alone, other = answer(*families), answer(families[0]), answer(families[1])
    assert {step.knobs.choice.family for step in both.steps} == {families[0]}
    assert [step.run for step in both.steps] == [step.run for step in alone.steps]
    assert both.counts.layouts == alone.counts.layouts
    assert {step.knobs.choice.family for step in other.steps} == {families[1]}
    assert [step.prediction for step in other.steps] == [step.prediction for step in alone.steps]


def test_where_sequences_are_too_long_the_plan_says_so_and_which_would_fit(ask):
    question = ask(seq=3_000_001, num_devices=1, global_batch=1, software=load_software("megatron-2021"))
    near = make_plan(question).closest
    assert near.sequence_bytes > near.missing_bytes > 0
    (step,) = (step for what, step in near.ways_out if what.startswith("sequences of"))
    assert step.prediction.fits
    longer = replace(question, seq=step.run.seq * 2)
    assert search(longer, 1).best is None


def test_where_the_model_is_too_large_shorter_sequences_are_not_to_blame(ask):
    near = make_plan(
        ask(shape=load_model("gpt-52b"), num_devices=1, global_batch=1, software=load_software("megatron-2021"))
    ).closest
    assert near.sequence_bytes < near.missing_bytes
    assert not any(what.startswith("sequences of") for what, _ in near.ways_out)


def test_a_tie_with_one_stage_is_named_where_the_table_hides_it():
    sizes = {"num_devices": 8, "global_batch": 64, "seq": 8192}
    question = make_question("llama-3-8b", "dgx-h100", **sizes, pp=(1,), tp=(2,), micro_batch=(1,))
    searching, bar = Search(question), error_bar(question.cluster, question.software)
    steps = searching.best(3).steps
    assert all(step.run.loops > 1 for step in steps)
    (sentence,) = on_simpler(searching, question, steps, [], bar=bar, deadline=inf)
    assert "tp 2, pp 1, dp 4, sequence parallel, loops 1, micro-batches of 1; a step takes" in sentence
    assert list(on_simpler(searching, question, steps, [], bar=replace(bar, tie=1e-6), deadline=inf)) == []


def test_a_tie_with_fewer_axes_than_all_rows_is_named(ask):
    question = ask()
    searching, bar = Search(question), replace(error_bar(question.cluster, question.software), tie=1.0)
    rows = searching.best(3, Limits(pp=(2,), tp=(2,))).steps
    without = searching.best(1, Limits(pp=(1,))).best
    rivals = [Rival(NO_PIPELINE, without, {})]

    def sentences(**changes):
        return list(on_simpler(searching, changes.pop("question", question), rows, rivals, bar=bar, deadline=inf))

    (sentence,) = sentences()
    assert sentence.startswith("A layout simpler than all equivalent rows is equivalent, too: ")
    assert "with tp 1, pp 1, dp 4, loops " in sentence
    assert "--pp 1 --tp 1" in sentence
    assert sentences(question=replace(question, limits=Limits(strategies=("slices",)))) == []
    rivals[0] = replace(rivals[0], step=None)  # nothing fits
    assert sentences() == []


def test_no_row_is_called_simpler_than_itself(ask):
    question = ask()
    searching, bar = Search(question), replace(error_bar(question.cluster, question.software), tie=1.0)
    rows = searching.best(3, replace(ONE_STAGE, tp=(1,))).steps
    assert list(on_simpler(searching, question, rows, [], bar=bar, deadline=inf)) == []


@pytest.mark.parametrize(
    ("layers", "batch", "speed", "limits", "words"),
    [
        # A layer more than ranks: one of them computes twice as long, however large the batch is.
        (9, 64, 1.5, {}, "need wider limits, other devices or another batch."),
        (9, 64, 1.5, {"pp": (4, 8)}, "With 4 of them a step takes "),
        (8, 8, 1.5, {}, ", since there are few micro-batches. Twice the batch would give 1.50 times the tokens"),
        (8, 8, 1.01, {}, "% of the step. Twice the batch would give 1.01 times the tokens"),
    ],
)
def test_ranks_wait_since_they_are_unequal_or_since_micro_batches_are_few(ask, layers, batch, speed, limits, words):
    shape = replace(ask().shape, layers=layers, vocab=512)
    given = {"pp": (8,), "loops": (1,), "tp": (1,), "micro_batch": (1,), "families": ("1f1b",), "shards": ("none",)}
    question = ask(shape=shape, num_devices=8, global_batch=batch).limited(**given | limits | {"strategies": ("none",)})
    searching, bar = Search(question), error_bar(question.cluster, question.software)
    best = searching.best(1, Limits(pp=(8,))).best
    found = advice(searching, question, best, [], [Change("twice the batch", best, speed)], bar=bar, deadline=inf)
    (sentence,) = (one for one in found if one.startswith("Ranks wait for each other"))
    assert words in sentence
    ratios = re.findall(r"9 layers on 8 pipeline ranks, .* (\d\.\d\d) times as long as the mean\.", sentence)
    assert [1.3 < float(ratio) < 2 for ratio in ratios] == [True] * (layers == 9)


@pytest.mark.parametrize(("batch", "is_told"), [(1, True), (16, False)])
def test_more_devices_than_a_small_batch_can_use_are_named(batch, is_told):
    slow = changed(load_cluster("dgx-a100"), {"inter_bandwidth": "0.02x"})
    sizes = {"num_devices": 16, "global_batch": batch, "seq": 1024}
    question = make_question("gpt-6.6b", slow, **sizes, families=("1f1b",), pp=(1,), strategies=("none",))
    advice = list(on_devices(question, search(question, 1).best, inf))
    assert len(advice) == is_told
    if is_told:
        assert advice[0].startswith("16 devices are too many for 1 sequence a step: on 8 of them a step takes 0.07")
