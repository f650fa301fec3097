"""The search finds what simulating everything finds, whatever is allowed, and counts what it leaves out."""

import time
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
from thinned import thinned

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.planner import search as search_module
from pipeloom.planner.question import Limits, why_not
from pipeloom.planner.search import Search, search
from pipeloom.planner.space import arrangements
from pipeloom.workload.axes import Axes

searched = cache(search)
"""Several tests look at one answer."""


def answers(found):
    return [(step.run, step.knobs, step.prediction.step_time_s) for step in found.steps]


def with_memory(cluster, gigabytes):
    return replace(cluster, name="short", device=replace(cluster.device, memory_bytes=gigabytes * 1e9))


TIED = replace(load_model("gpt-6.6b"), layers=4, hidden=1024, heads=8, kv_heads=8, ffn=4096)
VARIANTS = {
    "room for everything": {},
    "memory is short": {"cluster": with_memory(load_cluster("dgx-1-v100"), 3.2)},
    "memory is very short": {"cluster": with_memory(load_cluster("dgx-1-v100"), 2.4), "global_batch": 16},
    "two nodes": {"cluster": replace(load_cluster("dgx-1-v100"), name="pairs", devices_per_node=2)},
    "tied, plain attention": {"shape": TIED, "attention": "plain"},
    "a program that blocks": {"software": load_software("megatron-2021"), "attention": "fused-softmax"},
    "an odd number": {"num_devices": 3, "global_batch": 6},
    "one device": {"num_devices": 1},
}


@pytest.mark.parametrize("name", thinned(VARIANTS, 5))
def test_bounds_leave_nothing_out_that_is_among_the_best(ask, name):
    question = ask(**VARIANTS[name])
    pruned, everything = searched(question), search(question, prunes=False)
    assert answers(pruned) == answers(everything)
    assert everything.counts.too_slow == 0
    assert pruned.counts.simulated <= everything.counts.simulated


def test_most_of_a_large_space_is_ruled_out_by_bounds(ask):
    counts = search(ask(num_devices=16, global_batch=32)).counts
    assert counts.layouts > 5000
    assert counts.simulated < counts.layouts / 20
    assert counts.layouts == counts.simulated + counts.too_slow + counts.too_large


def test_the_answer_is_always_the_same(ask):
    assert answers(searched(ask())) == answers(search(ask()))


def test_layouts_of_an_answer_differ_in_more_than_how_they_loop(ask):
    kinds = [
        (s.run.tp, s.run.pp, s.run.micro_batch, s.knobs.choice.family, s.run.recompute, s.run.sequence_parallel)
        for s in searched(ask()).steps
    ]
    assert len(kinds) == len(set(kinds)) == 10


def test_the_fastest_comes_first(ask):
    steps = searched(ask()).steps
    times = [step.prediction.step_time_s for step in steps]
    assert times == pytest.approx(sorted(times), rel=1e-8)
    assert all(step.prediction.fits for step in steps)


@pytest.mark.parametrize(
    "limits",
    [
        {"pp": (1,)},
        {"families": ("breadth-first",), "pp": (2, 4)},
        {"tp": (2,), "sequence_parallel": (True,)},
        {"micro_batch": (2, 4)},
        {"recompute": ("full",)},
        {"shards": ("none",)},
        {"loops": (3,)},
    ],
)
def test_a_search_that_goes_on_finds_what_a_limited_one_finds(ask, limits):
    question = ask()
    searching = Search(question)
    searching.best(10)
    assert answers(searching.best(1, Limits(**limits))) == answers(search(question.limited(**limits), 1))


def test_where_nothing_fits_nothing_is_found(ask):
    found = search(ask(cluster=with_memory(load_cluster("dgx-1-v100"), 1.6)))
    assert found.best is None
    assert found.counts.too_large == found.counts.layouts
    assert found.counts.simulated == 0


def test_a_search_whose_time_is_up_says_what_may_still_be_faster(ask):
    question = ask(num_devices=16, global_batch=32)
    found = search(question, deadline=0.0)
    best = search(question).best
    assert found.open_bound_s is not None
    assert found.open_bound_s <= best.prediction.step_time_s
    assert search(question).open_bound_s is None


@pytest.mark.parametrize("hurried", [2, 6, 12])
def test_what_a_dive_simulates_is_counted_once(ask, monkeypatch, hurried):
    looks = count()
    monkeypatch.setattr(search_module, "is_over", lambda _: next(looks) > hurried)
    searching = Search(ask(num_devices=16, global_batch=32))
    first = replace(searching.best(3, deadline=time.monotonic() + 1000).counts)
    assert first.simulated > 0
    assert first.undecided > 0
    monkeypatch.setattr(search_module, "is_over", lambda _: False)
    found = searching.best(3)
    last = found.counts
    assert last.simulated > first.simulated
    for counts in (first, last):
        assert counts.layouts == counts.simulated + counts.too_slow + counts.too_large + counts.undecided
    runs = [repr((one.run, one.knobs)) for _, one in searching._simulated if one.leaf.strategy == "none"]
    assert len(set(runs)) == len(runs) == last.simulated
    assert answers(found) == answers(search(ask(num_devices=16, global_batch=32), 3))


def test_a_search_that_is_stopped_after_the_proof_leaves_no_layout_to_search(ask):
    searching = Search(ask())
    proved = answers(searching.best(3))
    stopped = searching.so_far()
    assert answers(stopped) == proved
    assert (stopped.open_bound_s, stopped.counts.undecided) == (None, 0)


def test_why_axes_are_no_layout(ask):
    found, excluded = arrangements(ask(num_devices=24, global_batch=8))
    assert {arrangement.run.num_devices for arrangement in found} == {24}
    assert set(excluded) == {
        "the number of heads is not a multiple of tp",
        "the pipeline has more ranks than there are layers",
        "the batch is not a multiple of dp",
    }


def test_heads_of_keys_and_values_have_a_reason_of_their_own(ask):
    question = ask(shape=load_model("llama-3-8b"), num_devices=16, global_batch=16)
    assert why_not(question, Axes(tp=16, cp=1, dp=1, pp=1)) == "the number of key-value heads is not a multiple of tp"


def test_the_number_of_layouts_is_what_the_tree_has(ask):
    for arrangement in arrangements(ask())[0]:
        assert arrangement.count == sum(cut.count for cut in arrangement.cuts)
        assert all(cut.count == len(list(cut.leaves())) for cut in arrangement.cuts)
