"""Compiled loops and plain Python give the same answers; changed rows run to their end or are refused."""

import importlib
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from families import fitting, named_sizes
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.cost.costs import Costs
from pipeloom.errors import ScheduleError
from pipeloom.families import FAMILIES, make_schedule
from pipeloom.passes import add_reduce_grad, add_stage_swaps, add_tied, add_unshard, add_updates, lower
from pipeloom.schedule import Action, Kind, compiled, parse_schedule
from pipeloom.schedule.kinds import STAGE_KINDS
from pipeloom.schedule.rules import RULES, rule_name
from pipeloom.simulation import Host, Sharing, simulate
from pipeloom.system.stopping import Stop

KINDS = list(Kind)
PLACES = ["at once", "at the end", "in the next step"]
SHARDED = """
0UNSHARD 0F0 2UNSHARD 0F1 0RESHARD 0SEND_F0 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1 2B0 2SEND_B0 2B1 2SEND_B1 2REDUCE_GRAD \
2RESHARD 0UNSHARD 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1REDUCE_GRAD
"""
SWAPPED = "0F0 0EVICT0 0SEND_F0 0F1 0SEND_F1 0LOAD0 0RECV_B0 0B0 0RECV_B1 0B1\n\
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1EVICT1 1LOAD1 1I1 1SEND_B1 1W1"
TIED = """
0UNSHARD 0SEND_TIED 0F0 0SEND_F0 0F1 0RESHARD 0SEND_F1 0UNSHARD 0RECV_B0 0B0 0RECV_B1 0RECV_TIED_GRAD 0B1 \
0REDUCE_GRAD 0RESHARD
1RECV_TIED 1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 1SEND_TIED_GRAD 1REDUCE_GRAD
"""
RESIDENT = """
0SWAP_IN 1SWAP_IN 0F0 0F1 0SWAP_OUT 2SWAP_IN 1F0 1F1 2F0 2F1 2B0 2B1 2SWAP_OUT 0SWAP_IN 1B0 1B1 0B0 0B1 0UPDATE \
0SWAP_OUT 2SWAP_IN 1UPDATE 1SWAP_OUT 2UPDATE 2SWAP_OUT
"""
SPLIT = "0F0 0F0.1 0SEND_F0 0SEND_F0.1 0RECV_B0.1 0I0.1 0RECV_B0 0I0 0W0 0W0.1\n\
1RECV_F0 1F0 1RECV_F0.1 1F0.1 1B0.1 1SEND_B0.1 1B0 1SEND_B0"


@st.composite
def schedules(draw):
    special = draw(st.sampled_from([None, None, None, None, SHARDED, SPLIT, SWAPPED, TIED, RESIDENT]))
    if special is not None:
        return parse_schedule(special)
    name, fits = draw(named_sizes())
    pp, count = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = make_schedule(name, pp=pp, num_microbatches=count, **fits)
    if draw(st.booleans()):
        return schedule
    schedule = lower(schedule, draw(st.integers(1, 3)))
    if draw(st.integers(0, 3)) == 0:
        return with_swaps(draw, schedule)
    if draw(st.booleans()):
        schedule = add_tied(schedule)
    if draw(st.booleans()):
        schedule = add_unshard(schedule, draw(st.one_of(st.none(), st.integers(1, 3))), draw(st.integers(0, 2)))
    return add_reduce_grad(schedule, draw(st.one_of(st.none(), st.integers(1, 3)))) if draw(st.booleans()) else schedule


def with_swaps(draw, schedule):
    """Stages that come and go, of equal or of different sizes."""
    if draw(st.booleans()):
        schedule = add_reduce_grad(schedule)
    if draw(st.booleans()):
        schedule = add_updates(schedule, draw(st.sampled_from(PLACES)) if schedule.num_ranks == 1 else "at once")
    stages = schedule.num_stages
    sizes = draw(st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=stages, max_size=stages)))
    return add_stage_swaps(schedule, draw(st.integers(3, 5)), sizes=sizes, ahead=draw(st.integers(0, 2)))


@st.composite
def wrong_rows(draw, schedule):
    """Rows with up to three random changes."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(draw(st.integers(0, 3))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        if not row:
            continue
        here, there = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        match draw(st.sampled_from(["swap", "delete", "repeat", "move", "kind", "number"])):
            case "swap":
                row[here], row[there] = row[there], row[here]
            case "delete":
                del row[here]
            case "repeat":
                row.insert(there, row[here])
            case "move":
                rows[draw(st.integers(0, len(rows) - 1))].append(row.pop(here))
            case "kind":
                kind = draw(st.sampled_from(KINDS))
                microbatch = None if kind in STAGE_KINDS and draw(st.booleans()) else row[here].microbatch
                row[here] = Action(kind, row[here].stage, microbatch, row[here].slice)
            case "number":
                field = draw(st.sampled_from(["stage", "microbatch", "slice"]))
                row[here] = row[here]._replace(**{field: draw(st.integers(-1, 7))})
    return rows


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_changed_rows_run_to_their_end_or_are_refused_at_a_place(data):
    schedule = data.draw(schedules())
    ranks = st.integers(-1, schedule.num_ranks)
    partners = data.draw(st.one_of(st.none(), st.lists(ranks, max_size=schedule.num_ranks + 1).map(tuple)))
    rows = data.draw(wrong_rows(schedule))
    names, refused = {rule_name(rule) for rule in RULES[schedule.level]}, None
    try:
        changed = replace(schedule, rows=rows, partners=partners)
    except ScheduleError as error:
        refused = error
    if refused is None:
        trace = simulate(changed, Costs(1.0, 2.0, 0.25))
        assert (trace.spans.start_s >= 0).all()
        assert (trace.spans.end_s >= trace.spans.start_s).all()
    else:
        assert refused.rule in names
        assert refused.slot is None or f">{rows[refused.rank][refused.slot]}<" in str(refused)


@pytest.fixture(params=["plain", "compiled"])
def how(request, monkeypatch):
    """Let every kernel run as it is, or compiled."""
    if request.param == "compiled" and not compiled.is_available():
        pytest.skip("needs numba")
    monkeypatch.setattr(compiled, "PATIENCE", 10**12 if request.param == "plain" else -1)


def answers():
    """What every kernel has a part in, on schedules small and odd."""
    for name in sorted(FAMILIES):
        for pp, loops, count in ((1, 1, 3), (3, 2, 4), (4, 3, 6)):
            sizes = {"pp": pp, "num_microbatches": count} | fitting(name, loops)
            schedule = lower(make_schedule(name, **sizes), 2)
            costs = Costs(1.0, 2.0, 0.25)
            yield name, schedule, simulate(schedule, costs)
            yield name, schedule, simulate(schedule, costs, host=Host(lambda _: 0.125, 3))
            sharing = Sharing(lambda action, rank: rank % 2 if action.kind in ("F", "B") else None, {0: 1, 1: 2})
            yield name, schedule, simulate(schedule, costs, sharing)
            posting = Host(lambda _: 0.125, 1, lambda rank: rank % 2)
            yield name, schedule, simulate(schedule, costs, sharing, posting)
            onward = Sharing(lambda _, rank: rank % 2, {0: 1, 1: 2, "next": 1}, onward_of=lambda *_: "next")
            yield name, schedule, simulate(schedule, costs, onward)
            sharded = add_reduce_grad(add_unshard(add_tied(schedule), 2, 1), 1)
            yield name, sharded, simulate(sharded, Costs(1.0, 2.0, 0.25, 0.5, 1.5))
    for text in (SHARDED, SPLIT, SWAPPED, TIED, RESIDENT):
        yield text, parse_schedule(text), simulate(parse_schedule(text), Costs(1.0, 2.0, 0.25))


@pytest.fixture(scope="module")
def plain_answers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "PATIENCE", 10**12)
        return list(answers())


@pytest.mark.timeout(300)
def test_compiled_and_plain_loops_are_equal(how, plain_answers):
    for (name, schedule, trace), (_, plain, plain_trace) in zip(answers(), plain_answers, strict=True):
        assert schedule == plain, name
        assert np.array_equal(schedule.graph.waits, plain.graph.waits), name
        assert np.array_equal(trace.spans.start_s, plain_trace.spans.start_s), name
        assert np.array_equal(trace.spans.end_s, plain_trace.spans.end_s), name
        assert trace.spans.row == plain_trace.spans.row, name


@pytest.mark.skipif(not compiled.is_available(), reason="needs numba")
def test_a_constant_from_elsewhere_is_never_stale(tmp_path, monkeypatch):
    (tmp_path / "some_kernels.py").write_text("NUMBER = 1\n\n\ndef shifted(x):\n    return x + NUMBER\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("some_kernels")
    for number in (1, 2):
        monkeypatch.setattr(module, "NUMBER", number)
        compiled._compile_all.cache_clear()
        assert compiled.compiled(module.shifted)(10) == 10 + number


@pytest.mark.skipif(not compiled.is_available(), reason="needs numba")
def test_a_time_limit_that_passes_while_a_kernel_is_compiled_ends_the_work_behind_it(tmp_path, monkeypatch):
    (tmp_path / "slow_kernels.py").write_text("def doubled(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    doubled = compiled.compiled(importlib.import_module("slow_kernels").doubled)
    lost = []

    class Lost:
        def __del__(self):
            signal.raise_signal(signal.SIGALRM)  # as in a callback, Python ignores what its handler raises
            lost.append(True)

    def save(*_):
        Lost()
        if not lost:
            raise RuntimeError("no compiled object yet")

    monkeypatch.setattr(doubled._cache, "save_overload", save)
    stop = Stop(time.monotonic() + 60)
    stop.run(lambda: doubled(3))
    assert (lost, stop.reason) == ([True], "time")
    assert doubled(3) == 6


def test_nothing_small_loads_the_compiler(monkeypatch):
    monkeypatch.setattr(compiled, "_seen", 0)
    monkeypatch.setattr(compiled, "compiled", lambda function: pytest.fail("compiled"))
    simulate(lower(make_schedule("breadth-first", pp=4, loops=2, num_microbatches=8)), Costs(1, 2, 0.5))
