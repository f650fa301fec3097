"""No bound is above the simulated time, and memory is known before communication is added."""

from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
from families import fitting
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.exchanges import stage_collectives_s, step_terms
from pipeloom.cost.memory import message_bytes, stage_kept_bytes, stage_pending_bytes, working_bytes
from pipeloom.cost.placed import Placed
from pipeloom.cost.stages import stage_layers
from pipeloom.cost.what_if import with_bandwidth, with_memory
from pipeloom.families import FAMILIES, Choice
from pipeloom.passes import lower
from pipeloom.passes.lower_sharding import num_exchanges
from pipeloom.planner.bounds import Bounds
from pipeloom.planner.candidate import Candidate, complete, exchanging_bound_s, knobs_of
from pipeloom.planner.question import Question
from pipeloom.planner.space import Sharding, Twig, arrangements
from pipeloom.planner.stages import Stages
from pipeloom.planner.work import least_work_s
from pipeloom.predict.step import compute_schedule
from pipeloom.recipe import Knobs
from pipeloom.schedule import Kind
from pipeloom.simulation import simulate
from pipeloom.workload.run import Run
from pipeloom.workload.update import Update

SHARES = st.sampled_from([1.0, 0.6, 0.4, 0.25])
"""Parts of a device's memory: with less, layers are recomputed because they have to be."""


PROGRAMS = st.sampled_from(["pipeloom", "pipeloom", "megatron-2021", "scaling-2023b", "nanotron"])


@st.composite
def leaves(draw, programs=PROGRAMS, *, splits=False):
    software = load_software(draw(programs))
    question = Question(
        shape=load_model(draw(st.sampled_from(["gpt-6.6b", "llama-3-8b", "llama-13b"]))),
        cluster=with_memory(load_cluster(draw(st.sampled_from(["dgx-1-v100", "dgx-a100"]))), draw(SHARES)),
        software=software,
        num_devices=draw(st.sampled_from([4, 8, 16, 64])),
        global_batch=draw(st.sampled_from([16, 32, 48])),
        seq=1024,
        precision="fp16",
        attention=draw(st.sampled_from(["plain", "flash2"])),
        update=Update(within_step=software.has_lanes and draw(st.booleans())),
    )
    found = [one for one in arrangements(question)[0] if one.splits == splits]
    arrangement = draw(st.sampled_from(found))
    cuts = [cut for cut in arrangement.cuts if cut.choices and cut.run.num_microbatches * cut.run.num_stages <= 512]
    if not cuts:
        return None
    cut = draw(st.sampled_from(cuts))
    return draw(st.sampled_from(list(islice(cut.leaves(), 400))))


@settings(max_examples=100, deadline=None)
@given(leaves() | leaves(st.just("pipeloom"), splits=True))
def test_what_is_settled_fits_and_bounds_are_never_above_what_is_simulated(leaf):
    chosen = None if leaf is None else complete(leaf)
    if chosen is None:
        return
    step = chosen.simulate()
    assert step.prediction.fits
    step_s, held = step.prediction.step_time_s * (1 + 1e-9), step.prediction.memory.total_bytes * (1 + 1e-9)
    arrangement = leaf.cut.arrangement
    assert arrangement.bound_s <= step_s
    room = min(step.prediction.device_bytes)
    assert arrangement.missing_bytes <= held - room
    assert leaf.cut.bound_s <= step_s
    assert leaf.cut.missing_bytes <= held - room
    assert leaf.cut.has_room(leaf.sharding)
    assert leaf.twig.bound_s <= step_s
    assert leaf.bounded is not None
    assert leaf.bounded[0] <= step_s
    assert exchanging_bound_s(leaf.bounded[1]) <= step_s
    assert (_bounded_bytes(chosen) <= _exact_bytes(chosen) * (1 + 1e-9)).all()
    assert chosen.bound_s <= step_s
    assert chosen.bound_of_row_s <= step_s
    assert chosen.bound_without_messages_s <= step_s
    if leaf.cut.arrangement.recomputed == "some":
        kinds = chosen.run.recompute_layers
        # All layers are another leaf, where the question allows it.
        others = {"full"} if "full" in arrangement.question.recompute else set[str]()
        assert "full" in kinds
        assert others < set(kinds) <= {"none", "full"}


def _bounded_bytes(chosen):
    """For each rank the bound of the memory with the stage inputs and the buffers of a layout."""
    leaf, knobs = chosen.leaf, chosen.knobs
    if leaf.stage_inputs is None:
        return 0 * leaf.cut.memory.capacity_bytes
    memory = leaf.cut.memory.sharded(chosen.run.shard, chosen.run.replicate)
    return memory.held_bytes(leaf.stage_inputs, memory.room_of(knobs.residency, knobs.gradient_buffers))


def _exact_bytes(chosen):
    return chosen.leaf.cut.memory.capacity_bytes - np.array(chosen.free_bytes)


def _only_cut(question):
    (cut,) = (cut for one in arrangements(question)[0] if not one.splits for cut in one.cuts if cut.choices)
    return cut


@pytest.mark.parametrize("level", ["none", "optimizer", "gradients", "full"])
def test_a_bound_of_the_memory_has_the_buffers_of_messages_gathers_and_gradients(ask, level):
    question = ask(num_devices=16, global_batch=128).limited(
        tp=(1,), pp=(2,), micro_batch=(1,), loops=(4,), recompute=("none",), families=("breadth-first",)
    )
    (leaf,) = Twig(_only_cut(question), Sharding((level,), 1)).leaves
    for knobs in knobs_of(leaf.choice, leaf.placed(level).run):
        chosen = Candidate(leaf.placed(level), knobs, leaf)
        # On the last rank with what the loss keeps of all micro-batches.
        assert _bounded_bytes(chosen) == pytest.approx(_exact_bytes(chosen), rel=0.001)


def test_the_bound_of_a_leaf_counts_every_gather_and_reduction_of_its_order(ask):
    """Depth-first gathers and reduces both stages of a rank for each group of micro-batches."""
    question = ask(num_devices=16, global_batch=128).limited(
        tp=(1,), pp=(2,), micro_batch=(1,), loops=(4,), recompute=("none",), families=("depth-first",)
    )
    question = replace(question, cluster=with_bandwidth(question.cluster, intra=0.01, inter=0.01))
    (leaf,) = Twig(_only_cut(question), Sharding(("full",), 1)).leaves
    knobs = knobs_of(leaf.choice, leaf.placed("full").run)[0]
    step = Candidate(leaf.placed("full"), knobs, leaf).simulate()
    row = step.schedule.rows[0]
    gathers, reductions = num_exchanges(compute_schedule(leaf.choice).rows[0], knobs.residency, knobs.gradient_buffers)
    assert gathers.total() == row.is_kind(Kind.UNSHARD).sum()
    assert reductions.total() == row.is_kind(Kind.REDUCE_GRAD).sum()
    bound_s, step_s = exchanging_bound_s(leaf), step.prediction.step_time_s
    assert leaf.twig.bound_s < bound_s <= step_s * (1 + 1e-9)


def test_the_bound_of_a_row_counts_every_gather_that_its_order_makes(ask):
    """Depth-first gathers both stages of a rank for each group of micro-batches, breadth-first three times in all."""
    question = ask(num_devices=16, global_batch=128).limited(
        tp=(1,), pp=(2,), micro_batch=(1,), loops=(4,), recompute=("none",), families=("depth-first", "breadth-first")
    )
    bounds, gathers = {}, {}
    for leaf in Twig(_only_cut(question), Sharding(("full",), 1)).leaves:
        knobs = Knobs(choice=leaf.choice, residency=1, prefetch=1, gradient_buffers=1)
        chosen = Candidate(leaf.placed("full"), knobs, leaf)
        step = chosen.simulate()
        gathers[leaf.choice.family] = int(step.schedule.facts.row.is_kind(Kind.UNSHARD).sum())
        bounds[leaf.choice.family] = chosen.bound_of_row_s
        assert 0.97 * step.prediction.step_time_s <= chosen.bound_of_row_s <= step.prediction.step_time_s * (1 + 1e-9)
        assert chosen.bound_of_row_s > chosen.bound_s
    assert gathers["depth-first"] > 5 * gathers["breadth-first"]
    assert bounds["depth-first"] > bounds["breadth-first"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9))
def test_the_least_work_of_the_busiest_rank_is_that_of_the_best_division(layers, ranks, layer_s, head_s):
    found = min(
        max(head_s + counts[0] * layer_s, *(count * layer_s for count in counts))
        for counts in product(range(layers + 1), repeat=ranks)
        if sum(counts) == layers
    )
    assert least_work_s(layers, ranks, float(layer_s), float(head_s)) == found


def test_without_communication_the_bound_of_even_stages_is_exact(ask):
    question = ask(num_devices=1, global_batch=4).limited(recompute=("none",), loops=(1,), families=("1f1b",))
    (arrangement, *_), _ = arrangements(question)
    (leaf,) = arrangement.cuts[0].leaves()
    step = complete(leaf).simulate()
    assert leaf.bounded[0] == pytest.approx(step.prediction.step_time_s, rel=1e-9)


def test_a_rank_that_holds_all_its_inputs_need_not_turn_before_its_last_forward(ask):
    """Fifteen inputs of alike stages, all of them held: as sums and as a product their seconds differ by rounding."""
    layout = {"tp": (2,), "pp": (8,), "micro_batch": (4,), "loops": (5,), "families": ("interleaved-zb",)}
    model = {"shape": load_model("llama-13b"), "seq": 1024, "attention": "plain"}
    question = ask(**model, cluster=load_cluster("dgx-a100"), num_devices=64, global_batch=48)
    question = question.limited(**layout, shards=("none",))
    leaves = [leaf for one in arrangements(question)[0] for cut in one.cuts for leaf in cut.leaves()]
    completed = [(leaf, chosen) for leaf in leaves if (chosen := complete(leaf)) is not None]
    assert completed
    for leaf, chosen in completed:
        assert leaf.bounded[0] <= chosen.simulate().prediction.step_time_s * (1 + 1e-9)


SPLIT = sorted(name for name, known in FAMILIES.items() if known.splits_backward and known.stage_inputs)


def bounds_of(choice, costs):
    """Of stages with given costs, whatever model and cluster make of them."""
    run = Run(
        shape=load_model("gpt-6.6b"),
        seq=1024,
        pp=choice.pp,
        loops=choice.loops,
        placement=choice.placement_name,
        global_batch=choice.num_microbatches,
    )
    placed = Placed(run, load_cluster("dgx-a100"), load_software("pipeloom"))
    bounds = Bounds(placed, Stages(placed), splits=True)
    vars(bounds.stages.placed)["costs"] = costs
    return bounds


@pytest.mark.parametrize(
    "program", ["pipeloom", "megatron-2021", "megatron-core", "fsdp", "zero-bubble", "internevo", "xla"]
)
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"dp": 2, "pp": 2, "tp": 2}, {"pp": 4, "loops": 2, "recompute": "full"}])
def test_how_many_microbatches_there_are_changes_nothing_of_the_stages(program, sizes):
    run = Run(shape=load_model("gpt-6.6b"), seq=1024, micro_batch=2, global_batch=96, shard="optimizer", **sizes)
    cluster, software = load_cluster("dgx-a100"), load_software(program)
    placed = Placed(replace(run, layers_by_stage=stage_layers(run, software)[0]), cluster, software)
    one, many = (Placed(each, cluster, software) for each in (placed.run.of_stages, placed.run))
    assert (one.run.num_microbatches, many.run.num_microbatches) == (1, 48 // run.dp)
    assert (one.costs, one.recompute_s) == (many.costs, many.recompute_s)
    assert stage_collectives_s(one) == stage_collectives_s(many)
    assert step_terms(one, 1.0) == step_terms(many, 1.0)
    for held in (stage_kept_bytes, stage_pending_bytes, working_bytes, message_bytes):
        assert held(one.run, software) == held(many.run, software)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SPLIT), st.integers(2, 9), st.integers(1, 3), st.integers(1, 24), st.data())
def test_held_bytes_bound_no_more_than_waiting_does(name, pp, loops, count, data):
    choice = Choice(family=name, pp=pp, num_microbatches=count, **fitting(name, loops))
    stages = choice.placed().num_stages
    seconds = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    backward_s = data.draw(seconds)
    costs = StageCosts(
        tuple(data.draw(seconds)),
        tuple(backward_s),
        data.draw(st.integers(0, 4)),
        weight_s=tuple(data.draw(st.sampled_from([0, 0.25, 0.5, 1])) * each for each in backward_s),
    )
    bounds, simulated_s = bounds_of(choice, costs), simulate(lower(choice.make()), costs).end_s
    assert bounds.in_flight_bound_s(np.array([choice.stage_inputs]))[0] <= simulated_s * (1 + 1e-9)
    assert bounds.work[0].end_s().max() <= simulated_s * (1 + 1e-9)


@pytest.mark.parametrize(("name", "share"), [("v-min", 1.0), ("v-half", 0.95)])
@pytest.mark.parametrize(("pp", "count"), [(8, 8), (8, 40), (16, 16), (16, 64), (32, 32)])
def test_where_memory_is_short_the_waits_are_the_bubble(name, share, pp, count):
    """With T_F = T_I = T_W; the bound of the work alone is lower."""
    choice, stages = Choice(family=name, pp=pp, num_microbatches=count, loops=2), 2 * pp
    costs = StageCosts((1.0,) * stages, (2.0,) * stages)
    bounds, simulated_s = bounds_of(choice, costs), simulate(choice.make(), costs).end_s
    least_s = bounds.in_flight_bound_s(np.array([choice.stage_inputs]))[0]
    assert share * simulated_s <= least_s <= simulated_s
    assert bounds.work[0].end_s().max() < least_s
