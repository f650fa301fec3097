"""Averages in the background of the next step: as written out, without waiting, and with one set of weights outside."""

import json
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from alone import Outer, Replicas, loss_of, values
from resumed import losses, train_all
from safetensors.torch import load_file
from small_run import small_run

from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, ModelConfig, OptimizerConfig, OutputConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.planner.run_step import predict_step
from pipeloom.training.automatic.profiled_step import update_s
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.optimizers.averaging import Averaging
from pipeloom.training.optimizers.optimizer import WholeUpdates, make_optimizer
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=2, ffn_size=24)
TWO = Layout(pp=1, loops=1, dp=2, num_microbatches=2, microbatch_size=1, average_every=(3, 2))


def run_of(folder, layout=TWO, steps=3, validate_every=None, dtype="float64", **checkpoint):
    return small_run(
        folder,
        model=MODEL,
        layout=layout,
        optimizer=OptimizerConfig(
            lr=0.05, lr_warmup_steps=1, lr_decay_style="constant", betas=(0.8, 0.9), outer_delayed=True
        ),
        training=TrainingConfig(
            steps=steps,
            validation_batches=0 if validate_every is None else 2,
            validate_every=validate_every,
            sample_tokens=0,
            predict=False,
            dtype=dtype,
            stall_timeout_s=20,
        ),
        checkpoint=CheckpointConfig(final="checkpoint", **checkpoint),
        output=OutputConfig(folder=folder / "run"),
    )


def test_weights_are_those_of_the_algorithm_written_out(tmp_path):
    """Three steps of two replicas: each outer step comes one step late, the last one at the end of the run."""
    config = run_of(tmp_path)
    train_all({tmp_path / "run": config})
    data = load_data(config.data, config.training.seed)
    config = resolve(config, data)

    replicas, ways = Replicas(config, 2), None
    outer = Outer(values(replicas.models[0]))
    for step in range(3):
        begun = [values(one) for one in replicas.models]
        replicas.update(data.train.batch(step, 5 * 2), (3, 2))
        if ways is not None:
            outer.step(ways)
        ways = replicas.ways(begun)
        for number, own in enumerate(ways):
            replicas.place(number, [at - gone for at, gone in zip(outer.weights, own, strict=True)])
    outer.step(ways)
    found = load_file(export_weights(tmp_path / "run", tmp_path / "weights")[0])
    for (name, _), expected in zip(replicas.models[0].named_parameters(), outer.weights, strict=True):
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-11)


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended(tmp_path):
    layout = replace(TWO, pp=2, average_every=(3, 1))
    whole = run_of(tmp_path, layout, steps=5, every=2)
    train_all({tmp_path / "whole": whole})
    checkpoint = replace(whole.checkpoint, resume=tmp_path / "whole" / "checkpoints" / "step-000002")
    other = replace(layout, pp=1, loops=2)
    train_all({tmp_path / "again": replace(whole, checkpoint=checkpoint, layout=other)})
    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "again")
    assert sorted(found) == [3, 4, 5]
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-11)


def test_validation_has_the_weights_of_all_replicas_and_changes_nothing(tmp_path):
    plain, validated = run_of(tmp_path, steps=4), run_of(tmp_path, steps=4, validate_every=1)
    train_all({tmp_path / "plain": plain, tmp_path / "validated": validated})
    assert losses(tmp_path / "validated") == losses(tmp_path / "plain")
    lines = [json.loads(line) for line in (tmp_path / "validated" / "metrics.jsonl").read_text().splitlines()]
    first, second, _ = (line["validation_loss"] for line in lines if "validation_loss" in line)
    # The first average is used at the end of the second step: before that all replicas have the initial weights.
    assert first == pytest.approx(_initial_loss(validated), rel=1e-12)
    assert second < first


def _initial_loss(config):
    data = load_data(config.data, config.training.seed)
    config = resolve(config, data)
    (model,), size = Replicas(config, 1).models, config.layout.batch_size
    with torch.no_grad():
        every = [
            float(loss_of(model, torch.from_numpy(data.validation.batch(number, size))))
            for number in range(config.training.validation_batches)
        ]
    return sum(every) / len(every)


def _meanwhile(config, folder, rendezvous, rank, size):
    """A step while the average of the step before cannot end."""
    world = join_forked(rendezvous, rank, size, "cpu", 60)
    data = load_data(config.data, 0)
    config = resolve(config, data)
    pipeline = Pipeline(config, world)
    parallel = pipeline.data_parallel
    updates = WholeUpdates(config.optimizer, make_optimizer(config.optimizer, parallel.parts), parallel)
    averaging, goes_on, mean = Averaging(config, world, pipeline, updates), threading.Event(), parallel._mean

    def held_up(tensor):
        assert goes_on.wait(30)
        yield from mean(tensor)

    parallel._mean = held_up
    windows = data.train.batch(0, config.layout.step_size)
    averaging.step(windows, 1)
    averaging.end_step((), 0.0)
    averaging.step(windows, 2)
    goes_on.set()
    averaging.end_step((), 0.0)
    averaging.settle()
    pipeline.close()
    weights = next(iter(parallel.weights.values())).shard
    every = world.gather(float(weights.double().sum()))
    world.leave()
    if rank == 0:
        (folder / "sums.json").write_text(json.dumps(every))


def test_updates_go_on_while_an_average_is_under_way_and_replicas_are_equal_at_the_end(tmp_path):
    config = run_of(tmp_path)
    load_data(config.data, 0)
    run_workers(partial(_meanwhile, config, tmp_path), 2)
    own, other = json.loads((tmp_path / "sums.json").read_text())
    assert own == other


def test_memory_and_time_are_priced(tmp_path):
    late = run_of(tmp_path, replace(TWO, pp=2, loops=2, dp=4, average_every=10), dtype="float32")
    late = replace(late, machine=replace(late.machine, cluster="dgx-a100"))
    waits = replace(late, optimizer=replace(late.optimizer, outer_delayed=False))
    found, expected = predict_step(late), predict_step(waits)
    assert found.prediction.terms.average_s == 0 < expected.prediction.terms.average_s
    for one, two in zip(found.prediction.memory_by_rank, expected.prediction.memory_by_rank, strict=True):
        assert one.optimizer_bytes == 1.5 * two.optimizer_bytes  # six numbers for each parameter in place of four


@pytest.mark.parametrize(("average_s", "hides", "expected"), [(1.0, False, 4 / 3), (1.0, True, 1.0), (6.0, True, 2.0)])
def test_an_average_in_the_background_counts_where_it_takes_longer_than_the_updates(average_s, hides, expected):
    traces = [SimpleNamespace(end_s=0.9)]
    assert update_s(TWO, traces, 0.1, average_s, hides_average=hides) == pytest.approx(expected)


def test_a_delay_without_averages_is_refused(capsys):
    assert main(["train", "--layout.pp", "1", "--layout.dp", "2", "--optimizer.outer-delayed"]) == 2
    assert "optimizer.outer_delayed has no effect without layout.average_every" in capsys.readouterr().err
