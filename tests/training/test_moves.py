"""What stages keep, counted on meta tensors, and the schedule that a run makes of it."""

from functools import partial

import pytest
from small_run import small_run

from pipeloom.config import ModelConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.errors import UserError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.passes.budget import kept_on
from pipeloom.schedule import Kind
from pipeloom.schedule.clock import nominal_s, times
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.schedules import training_schedule
from pipeloom.training.session import resolve
from pipeloom.training.stages import saved_bytes
from pipeloom.workload.layout import Layout

LAYOUT = {"pp": 2, "loops": 1, "num_microbatches": 4}


def resolved(folder, schedule=None, dtype="float32", family="llama", **layout):
    given = small_run(
        folder,
        model=ModelConfig(family=family, num_layers=6, hidden_size=16, num_heads=2),
        layout=Layout(**LAYOUT | layout),
        schedule=ScheduleConfig(**{"family": "gpipe"} | (schedule or {})),
        training=TrainingConfig(dtype=dtype, stall_timeout_s=20),
    )
    return resolve(given, load_data(given.data, 0))


def _held(configs, rendezvous, rank, size):
    world, found = join_forked(rendezvous, rank, size, "cpu", 60), []
    for config in configs:
        data, pipeline = load_data(config.data, 0), Pipeline(config, world)
        windows = data.train.batch(0, config.layout.batch_size)
        found.append(pipeline.train_step(pipeline.batch(windows)).held)
        pipeline.close()
    world.leave()
    return found


def test_what_ranks_hold_is_nearly_what_was_counted_on_meta_tensors(tmp_path):
    configs = [
        resolved(tmp_path, dtype=dtype, recompute=recompute)
        for dtype in ("float32", "bfloat16", "float64")
        for recompute in ("none", "full", "selective")
    ]
    import torch._dynamo  # noqa: F401  once here, not once in every worker

    for config, by_rank in zip(configs, zip(*run_workers(partial(_held, configs), 2), strict=True), strict=True):
        counted = saved_bytes(config).whole
        shares = [held.live_bytes / (4 * nbytes) for held, nbytes in zip(by_rank, counted, strict=True)]
        least = 0.85 if config.layout.recompute == "none" else 0.99  # a kernel of attention keeps less than its parts
        assert least < min(shares) <= max(shares) <= 1


def test_a_narrow_type_keeps_less_and_recomputation_least(tmp_path):
    wide, narrow = (saved_bytes(resolved(tmp_path, dtype=dtype)).whole[0] for dtype in ("float32", "bfloat16"))
    again = saved_bytes(resolved(tmp_path, recompute="full")).whole[0]
    assert again < narrow < wide


def test_a_limit_is_kept_or_refused(tmp_path):
    whole, _, inputs, *_ = saved_bytes(resolved(tmp_path))
    assert inputs[0] == 0 < inputs[1] < whole[1]
    room = {"offload": True, "activation_budget": str(int(3.1 * max(whole)))}
    rows = training_schedule(resolved(tmp_path, room)).rows
    assert whole[1] > whole[0]
    assert rows[1].is_kind(Kind.OFFLOAD).any()
    with pytest.raises(UserError, match="cannot be kept by moving what backwards need"):
        training_schedule(resolved(tmp_path, room | {"activation_budget": str(int(0.9 * max(whole)))}))


def test_without_a_wish_nothing_moves(tmp_path):
    rows = training_schedule(resolved(tmp_path)).rows
    assert not any(row.is_kind(Kind.EVICT, Kind.OFFLOAD).any() for row in rows)


def test_what_waits_for_a_second_half_is_what_was_counted_on_meta_tensors(tmp_path):
    configs = [
        resolved(tmp_path, {"family": "zb-h1"}, dtype=dtype, recompute=recompute)
        for dtype, recompute in (("float32", "none"), ("bfloat16", "full"), ("float64", "selective"))
    ]
    for config, by_rank in zip(configs, zip(*run_workers(partial(_held, configs), 2), strict=True), strict=True):
        counted = saved_bytes(config, splits=True).pending
        assert [held.pending_bytes / held.pending for held in by_rank] == counted


@pytest.mark.parametrize("splits_sequence", [False, True])
def test_tensor_parallel_ranks_keep_less_for_a_second_half(tmp_path, splits_sequence):
    alone = saved_bytes(resolved(tmp_path), splits=True).pending
    shared = saved_bytes(resolved(tmp_path, tp=2, sequence_parallel=splits_sequence), splits=True).pending
    assert all(0.4 * one < half < one for one, half in zip(alone, shared, strict=True))


def test_a_budget_counts_what_waits_for_a_second_half_and_no_more(tmp_path):
    schedule = {"family": "zb-h2"}
    # Norms of queries and keys keep what no matrix reads, so that less waits for the second half.
    run = partial(resolved, tmp_path, family="qwen3")
    found = saved_bytes(run(schedule), splits=True)
    assert all(0 < waits < whole for waits, whole in zip(found.pending, found.whole, strict=True))
    plain = training_schedule(run(schedule))
    held = kept_on(plain, times(plain, nominal_s), KeptBytes(found.whole, found.pending))
    room = schedule | {"offload": True, "activation_budget": str(int(1.001 * max(held.peak(0), held.peak(1))))}
    assert training_schedule(run(room)).rows == plain.rows


def test_slices_count_by_their_lengths(tmp_path):
    family = {"family": "gpipe", "offload": True}
    layout = {"pp": 2, "num_microbatches": 4}
    whole = saved_bytes(resolved(tmp_path)).whole
    room = family | {"activation_budget": str(int(3.5 * max(whole)))}
    moved = []
    for lengths in ((7, 1), (1, 7)):
        row = training_schedule(resolved(tmp_path, room, token_slices=lengths, **layout)).rows[1]
        moved.append(sorted({action.slice for action in row if action.kind is Kind.OFFLOAD}))
    assert moved[0] != moved[1]
