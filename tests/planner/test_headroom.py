"""Layouts of a plan leave a part of every device free, with strategies too; bounds exclude nothing that does."""

from dataclasses import replace

import numpy as np
import pytest

from pipeloom import make_question
from pipeloom.catalog import load_cluster
from pipeloom.errors import CallError, ConfigError
from pipeloom.planner.plan import plan as make_plan
from pipeloom.planner.question import HEADROOM
from pipeloom.planner.search import search

SMALL_SPACE = {"families": ("1f1b", "breadth-first"), "micro_batch": (1, 2), "loops": (1, 2), "strategies": ("none",)}


def short(gigabytes):
    cluster = load_cluster("dgx-1-v100")
    return replace(cluster, name="short", device=replace(cluster.device, memory_bytes=gigabytes * 1e9))


def used(step):
    """For each rank the used fraction of its device."""
    return np.array([one.total_bytes for one in step.prediction.memory_by_rank]) / step.prediction.device_bytes


def answers(found):
    return [(step.prediction.step_time_s, step.run) for step in found.steps]


def test_with_headroom_bounds_exclude_nothing_that_is_among_the_best(ask):
    question = ask(cluster=short(3.0), headroom=0.2).limited(**SMALL_SPACE)
    pruned, every = search(question), search(question, prunes=False)
    assert answers(pruned) == answers(every)
    assert pruned.counts.too_large > 0
    assert max(used(step).max() for step in every.steps) <= 0.8
    assert max(used(step).max() for step in search(replace(question, headroom=0.0)).steps) > 0.8


def test_a_headroom_is_a_smaller_device(ask):
    with_room, smaller = ask(cluster=short(3.0), headroom=0.2), ask(cluster=short(2.4))
    assert answers(search(with_room.limited(**SMALL_SPACE))) == answers(search(smaller.limited(**SMALL_SPACE)))


def test_where_the_headroom_alone_is_missing_the_answer_says_so(ask):
    question = ask(cluster=short(2.5), headroom=0.3)
    plan = make_plan(question)
    assert plan.best is None
    what, step = plan.closest.ways_out[0]
    assert what == "no headroom (--headroom 0)"
    assert 0.7 < used(step).max() <= 1


def test_the_default_and_wrong_values(ask):
    requested = {"model": "gpt-6.6b", "cluster": "dgx-a100", "num_devices": 8, "global_batch": 8, "seq": 512}
    assert make_question(**requested).headroom == HEADROOM
    assert make_question(**requested, headroom=0.0).headroom == 0
    with pytest.raises(CallError, match="headroom must be at most 0.9, found 1"):
        make_question(**requested, headroom=1)
    with pytest.raises(ConfigError, match="headroom must be at least 0, found -0.1"):
        ask(headroom=-0.1)
