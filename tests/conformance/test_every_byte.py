"""What a step over all ranks computes and holds, for runs drawn over every knob.

Its loss and gradients are those of a single process, and the bytes that are predicted for a rank are those that its
executor counts: state, and what is kept for backwards.
"""

from dataclasses import replace

import numpy as np
import pytest
from any_runs import (
    DATA,
    adapted_expert_runs,
    adapted_runs,
    context_runs,
    density_runs,
    exact,
    expert_runs,
    frozen_runs,
    on_cpus,
    runs,
    shared_expert_runs,
    sharing_runs,
)
from one_process import OneProcess
from thinned import thinned

from pipeloom.analysis.matching import match_spans
from pipeloom.config import find_problems
from pipeloom.cost.memory import working_bytes
from pipeloom.errors import UserError
from pipeloom.predict.describe import load_run
from pipeloom.predict.memory import memory_by_rank, moves_anything
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.predict.stage_swaps import swapped_memory
from pipeloom.schedule import Kind
from pipeloom.schedule.ledger import Ledger, most_in_rows
from pipeloom.trace import merge
from pipeloom.training.session import resolve
from pipeloom.training.stages import StageSizes

CHUNKS = 26
"""Parts of the runs that are drawn, of which the first is compared at every commit: each step of all ranks of a run
takes half a second."""
ROUNDING = {"float32": 1e-5, "bfloat16": 0.15}
"""Largest relative difference of a gradient: ten times what these runs have, and half more. The norms of keys have few
elements, whose sums cancel in bfloat16."""


def counted(ranks, results, config):
    """For each pipeline rank its fullest device: weights, gradients, optimizer state, and what backwards need."""
    found = [(0, 0, 0, 0)] * config.layout.pp
    for rank, (pipeline, optimizer, result) in enumerate(zip(ranks.pipelines, ranks.optimizers, results, strict=True)):
        held, place = result.held, config.layout.coordinates(rank).pipeline
        # Parameters have counters of steps beside what is as large as they are: 4 bytes each, which are not predicted.
        moments = [one for state in optimizer.state.values() for name, one in state.items() if name != "step"]
        copies = sum(one.weights.copy_bytes for one in pipeline.data_parallel.segments())
        bytes_of = (
            held.weights_bytes + held.lent_bytes,
            held.gradients_bytes + held.lent_gradient_bytes,
            sum(moment.nbytes for moment in moments) + copies,
            held.live_bytes,
        )
        found[place] = tuple(map(max, found[place], bytes_of))
    return found


def predicted(config, schedule):
    """The same of the closed forms; what is kept for backwards with nothing moved."""
    sizes = sizes_in_training(config)
    memory = memory_by_rank(sizes.run, sizes.software, schedule, config.schedule.receive_buffers)
    working = working_bytes(sizes.run, sizes.software) * max(sizes.run.slice_shares)
    return [
        (one.weights_bytes, one.gradients_bytes, one.optimizer_bytes, one.activations_bytes - working) for one in memory
    ]


def kept_on_its_clock(config, schedule, results, kept):
    """For each pipeline rank the most that it keeps for backwards, by the ledger and the times of the step."""
    most = [0.0] * config.layout.pp
    for ranks in config.layout.pipelines():
        matched = match_spans(schedule, merge([results[rank].trace for rank in ranks]))
        held = Ledger.of_kept(schedule, kept).on(schedule.num_ranks, matched.start_s, matched.end_s)
        most = [max(before, held.peak(rank)) for rank, before in enumerate(most)]
    return most


def packed_bytes(config, pipelines):
    """For each pipeline rank its largest message of several storages that are copied together."""
    most = [0] * config.layout.pp
    for rank, pipeline in enumerate(pipelines):
        place = config.layout.coordinates(rank).pipeline
        for packing in pipeline._moves._number_of:
            pairs = zip(packing.messages, packing.members, strict=True)
            most[place] = max(
                [most[place], *(end - begin for (begin, end), (one, behind) in pairs if behind > one + 1)]
            )
    return most


def assert_step(config):
    config = resolve(exact(on_cpus(config)), DATA)
    try:
        ranks = OneProcess(config)
    except UserError:  # test_every_command has what all of them refuse
        return None
    results, schedule = ranks.step(), ranks.pipelines[0].schedule
    found, expected = counted(ranks, results, config), predicted(config, schedule)
    if config.schedule.budget_bytes is not None:
        sizes = sizes_in_training(config)
        memory = memory_by_rank(sizes.run, sizes.software, schedule, config.schedule.receive_buffers)
        (memory,) = swapped_memory(memory, sizes.run, sizes.software, schedule)
        whole = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
        assert results[0].held.swapped_bytes == whole, (
            config
        )  # test_stage_swaps has its gradients, gone within the step
        assert found[0][3] == round(expected[0][3]), config
        return "swapped"
    differences = ranks.differences(results)
    # Scores of a router add up to 1, so that its gradients are differences of larger numbers.
    more = 1 if config.model.experts is None else 10
    assert max(differences.values()) < ROUNDING[config.training.dtype] * more, config
    assert differences["loss"] < ROUNDING["float32"] * 10, config
    assert [one[:3] for one in found] == [tuple(map(round, one[:3])) for one in expected], config
    is_dropping = config.model.expert_capacity is not None
    if config.layout.ep > 1 or is_dropping:  # what is kept depends on the tokens that arrive
        closed, own = sizes_in_training(config).kept(schedule), StageSizes(config).kept(schedule)
        assert np.array_equal(closed.whole, own.whole), config
        assert not schedule.split_stages or np.array_equal(closed.pending, own.pending), config
        for one, most in zip(found, expected, strict=True):
            least = 0 if is_dropping else round(most[3])  # without a capacity ranks keep together what is predicted
            assert least <= one[3] <= round(config.layout.ep * most[3]), config
        return "shared" if config.layout.ep > 1 else "kept"
    if not moves_anything(schedule):
        assert [one[3] for one in found] == [round(one[3]) for one in expected], config
        return "kept"
    kept = sizes_in_training(config).kept(schedule)
    clocked = kept_on_its_clock(config, schedule, results, kept)
    row = schedule.facts.row
    if not row.is_kind(Kind.EVICT).any():
        # A part comes back in one stretch of memory, all of which stays until the second half of its backward, though
        # that needs some of it.
        longer = kept._replace(pending=(np.array(kept.whole) + kept.pending).tolist())
        most = kept_on_its_clock(config, schedule, results, longer) if schedule.split_stages else clocked
        for one, least, bound in zip(found, clocked, most, strict=True):
            assert round(least) <= one[3] <= round(bound), config
        return "offloaded"
    # How much a rank holds for its partner at a moment depends on how far that one is. So this is bounded: below by the
    # ledger less a part that is under way, which counts on both ranks, above by what the two ranks would hold if
    # nothing ever left, and by a message that is packed, whose bytes are in memory twice.
    moved = kept.moved(schedule).max()
    stayed, twice = most_in_rows(schedule, kept), packed_bytes(config, ranks.pipelines)
    for rank, (most, partner) in enumerate(zip(clocked, schedule.partners, strict=True)):
        assert most - moved <= found[rank][3] <= stayed[rank] + stayed[partner] + twice[rank], config
    return "evicted"


@pytest.mark.parametrize("chunk", thinned(range(CHUNKS), CHUNKS))
@pytest.mark.timeout(300)
def test_a_step_equals_the_single_process_and_holds_the_bytes_that_are_predicted(chunk):
    seen = {assert_step(config) for config in runs()[chunk::CHUNKS]}
    assert "kept" in seen
    assert seen & {"offloaded", "evicted"}


def test_a_part_that_is_packed_for_a_partner_with_little_of_its_own_is_in_memory_twice():
    """Of recomputed layers the second rank keeps the loss's bytes alone, which are more than all of the first one's."""
    config = load_run(
        model={"family": "qwen3", "num_layers": 6, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 1},
        data={"seq_len": 32},
        layout={
            "pp": 2,
            "loops": 1,
            "num_microbatches": 2,
            "microbatch_size": 2,
            "token_slices": 2,
            "recompute": "full",
        },
        schedule={"family": "1f1b", "balance": True, "receive_buffers": 1},
        optimizer={"name": "sgd"},
    )
    assert assert_step(config) == "evicted"


@pytest.mark.parametrize("part", thinned(range(12), 12))
@pytest.mark.timeout(120)
def test_a_step_with_frozen_layers_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in frozen_runs(24)[part::6]} == {"kept"}


@pytest.mark.parametrize("part", thinned(range(14), 14))
@pytest.mark.timeout(120)
def test_a_step_with_adapters_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in adapted_runs(40)[part::14]} == {"kept"}


@pytest.mark.parametrize("part", thinned(range(12), 12))
@pytest.mark.timeout(120)
def test_a_step_with_shared_sequences_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in context_runs(24)[part::12]} == {"kept"}


@pytest.mark.parametrize("part", thinned(range(30), 30))
@pytest.mark.timeout(120)
def test_a_step_with_experts_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in expert_runs(120)[part::30]} == {"kept"}


@pytest.mark.parametrize("part", thinned(range(30), 30))
@pytest.mark.timeout(120)
def test_a_step_with_shared_layers_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in sharing_runs(120)[part::30]} == {"kept"}


@pytest.mark.parametrize("part", thinned(range(12), 12))
@pytest.mark.timeout(120)
def test_a_step_of_kept_blocks_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in density_runs(48)[part::12]} == {"kept"}


@pytest.mark.parametrize("part", thinned(range(12), 12))
@pytest.mark.timeout(300)
def test_a_step_with_shared_experts_equals_the_single_process(part):
    assert {assert_step(config) for config in shared_expert_runs(48)[part::12]} == {"shared"}


@pytest.mark.parametrize("part", thinned(range(8), 8))
@pytest.mark.timeout(300)
def test_a_step_with_experts_and_adapters_equals_the_single_process_and_holds_the_bytes_that_are_predicted(part):
    assert {assert_step(config) for config in adapted_expert_runs(32)[part::8]} <= {"kept", "shared"}


@pytest.mark.long
@pytest.mark.parametrize("part", range(12))
@pytest.mark.timeout(120)
def test_matrices_of_experts_have_the_state_of_muon_that_is_predicted(part):
    every = expert_runs(120)[:24], shared_expert_runs(48), adapted_expert_runs(32)
    drawn = [one for runs in every for one in runs if one.layout.tp == 1]
    taken = [replace(one, optimizer=replace(one.optimizer, name="muon")) for one in drawn[part::12]]
    found = [assert_step(one) for one in taken if not find_problems(one, trains=False)]
    assert len(found) > 3
    assert None not in found
