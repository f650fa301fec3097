"""Every family, placement and model type computes the gradients of a single process, all ranks in one process."""

import weakref
from dataclasses import replace

import pytest
import torch
from families import TRAINING, fitting
from in_process import Post, run_in_process
from small_run import small_run
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.config import ModelConfig, ScheduleConfig
from pipeloom.data.text import load_data
from pipeloom.execute.communication.boundary import TensorSpec, stage_outputs
from pipeloom.execute.stages.batch import Batch
from pipeloom.families import make_schedule
from pipeloom.model import build_stage, stage_pieces
from pipeloom.passes import lower
from pipeloom.passes.recompute import recompute_beyond
from pipeloom.training.equivalence import Gradients, compare, reference_gradients
from pipeloom.training.pipeline import training_schedule
from pipeloom.training.session import resolve
from pipeloom.workload.layout import Layout

SIZES = [(1, 1, 1), (1, 3, 4), (2, 2, 3), (4, 2, 9), (3, 1, 2)]
CASES = [(f, *size) for f in TRAINING for size in SIZES if fitting(f, size[1])["loops"] == size[1]]
PLACED = [(f, p) for f in TRAINING for p in ("looped", "v", "linear") if fitting(f, 2, p)["placement"] == p]
"""Families in the placements that they take."""


def play(schedule, toy, loss=objective):
    """One step of every rank; the stages with their gradients, and the results by rank."""
    modules, post = toy.modules(), Post()
    ranks = range(schedule.num_ranks)
    executors = [make_executor(schedule, r, modules, toy.outputs(), post.transport(r)) for r in ranks]
    return modules, run_in_process(executors, toy.inputs(), loss)


def check(schedule, toy):
    """Play a step, which has the loss and the gradients of a plain loop; the results by rank."""
    modules, results = play(schedule, toy)
    expected = toy.modules()
    loss = reference(expected, toy.inputs(), objective)
    found = sum(float(value) for result in results for value in result.outputs.values())
    assert found == pytest.approx(loss, rel=1e-12)
    assert worst_difference(modules, expected) < 1e-12
    return results


@pytest.mark.parametrize(
    ("family", "placement", "pp", "loops", "num_microbatches"),
    [(family, placement, *sizes) for family, placement in PLACED for name, *sizes in CASES if name == family],
)
def test_gradients_and_loss_equal_a_plain_loop(family, placement, pp, loops, num_microbatches):
    schedule = make_schedule(family, pp=pp, loops=loops, num_microbatches=num_microbatches, placement=placement)
    check(lower(schedule, receive_buffers=1), Toy(pp * loops, num_microbatches))


@pytest.mark.parametrize(("family", "loops"), [("1f1b", 1), ("gpipe", 1), ("depth-first", 2), ("breadth-first", 2)])
def test_gradients_are_the_same_where_a_rank_short_of_memory_recomputes(family, loops):
    toy = Toy(3 * loops, 5)
    plain = make_schedule(family, pp=3, loops=loops, num_microbatches=5)
    sizes = [1.0] * plain.num_stages, [0.0] * plain.num_stages
    schedule = lower(recompute_beyond(plain, [2.0, 3.0, 2.0], *sizes))
    results = check(schedule, toy)
    assert sum(span.action.kind == "R" for result in results for span in result.trace.compute()) > 0
    assert [result.held.stage_inputs for result in results] == list(schedule.peak_stage_inputs)


def _transformer_differences(tmp_path, model, layout, schedule_config):
    config = small_run(tmp_path, model=model, layout=layout, schedule=schedule_config)
    data = load_data(config.data, 0)
    config = resolve(config, data)
    batch = Batch.of(data.train.batch(0, layout.batch_size), layout.num_microbatches, torch.device("cpu"))
    schedule, pieces = training_schedule(config), stage_pieces(config.layout.partition)

    def build(stage, device):
        sizes = {"max_positions": config.data.seq_len, "seed": 0, "dtype": torch.float64}
        return build_stage(config.model, pieces[stage], device=device, **sizes)

    tokens = TensorSpec((layout.microbatch_size, config.data.seq_len), torch.int64)
    outputs = stage_outputs(lambda stage: build(stage, "meta"), schedule.num_stages, tokens)
    modules, post = [build(stage, "cpu") for stage in range(schedule.num_stages)], Post()
    executors = [make_executor(schedule, r, modules, outputs, post.transport(r)) for r in range(schedule.num_ranks)]
    results = run_in_process(executors, batch.inputs, batch.loss)
    loss = sum(float(value) for result in results for value in result.outputs.values())
    found = Gradients(loss, {name: p.grad for module in modules for name, p in module.named_parameters()})
    return compare(found, reference_gradients(config, batch))


@pytest.mark.parametrize(("model", "partition"), [("llama", None), ("gpt2", "uneven")])
@pytest.mark.parametrize(("family", "placement"), PLACED)
def test_transformers_equal_the_single_process(tmp_path, family, placement, model, partition):
    loops = fitting(family, 2)["loops"]
    sizes = {4: (1, 3, 1, 3), 2: (2, 6)}[2 * loops]
    layout = Layout(
        pp=2, loops=loops, num_microbatches=5, microbatch_size=2, partition=sizes if partition == "uneven" else None
    )
    shape = ModelConfig(family=model, num_layers=6, hidden_size=16, num_heads=4, num_kv_heads=2)
    differences = _transformer_differences(tmp_path, shape, layout, ScheduleConfig(family=family, placement=placement))
    assert len(differences) > 40
    assert max(differences.values()) < 1e-9


def test_a_frozen_beginning_runs_no_backward_and_the_rest_is_right():
    toy, frozen = Toy(4, 3), 2
    full = make_schedule("breadth-first", pp=2, loops=2, num_microbatches=3)
    rows = [[a for a in row if a.kind == "F" or a.stage >= frozen] for row in full.rows]
    schedule = lower(replace(full, rows=tuple(map(tuple, rows)), first_backward_stage=frozen))
    modules, _ = play(schedule, toy)
    expected = toy.modules()
    reference(expected, toy.inputs(), objective)
    assert worst_difference(modules[frozen:], expected[frozen:]) < 1e-12
    assert all(p.grad is None for module in modules[:frozen] for p in module.parameters())


def test_forward_only_keeps_nothing_and_needs_no_gradient():
    toy = Toy(4, 3)
    schedule = lower(make_schedule("forward-only", pp=2, loops=2, num_microbatches=3))
    modules, results = play(schedule, toy, lambda output, _: output)
    for microbatch, tensor in enumerate(toy.inputs()):
        for module in modules:
            tensor = module(tensor)
        torch.testing.assert_close(results[1].outputs[microbatch], tensor.detach(), rtol=0, atol=0)


def test_two_runs_in_process_give_the_same_trace_order():
    toy = Toy(4, 4)
    schedule = lower(make_schedule("depth-first", pp=2, loops=2, num_microbatches=4))

    def order():
        _, results = play(schedule, toy)
        spans = [s for result in results for s in result.trace.compute()]
        return [(s.rank, s.action) for s in sorted(spans, key=lambda s: s.start_s)]

    assert order() == order()


def test_a_received_tensor_is_freed_with_its_backward():
    """1F1B on the last rank holds one stage input, so no more than a few received tensors may be alive."""
    toy = Toy(2, 12)
    schedule = lower(make_schedule("1f1b", pp=2, num_microbatches=12), receive_buffers=1)
    received, alive = [], []
    modules, post = toy.modules(), Post()
    executors = [make_executor(schedule, r, modules, toy.outputs(), post.transport(r)) for r in range(2)]
    forward = executors[1].parts[0].stages[1].forward

    def watch(microbatch, tensor, *arguments, **options):
        received.append(weakref.ref(tensor))
        alive.append(sum(seen() is not None for seen in received))
        return forward(microbatch, tensor, *arguments, **options)

    executors[1].parts[0].stages[1].forward = watch
    run_in_process(executors, toy.inputs(), objective)
    assert len(received) == 12
    assert max(alive) <= 2
    assert sum(seen() is not None for seen in received) == 0
