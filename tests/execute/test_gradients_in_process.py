"""Every family in every placement computes the gradients of a plain loop, all ranks in one process.

With transformers: ``tests/conformance/test_every_byte.py``.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from families import TRAINING, fitting
from in_process import Post, run_in_process
from toy import Toy, make_executor, objective, reference, worst_difference

from pipeloom.families import make_schedule
from pipeloom.passes import lower
from pipeloom.passes.recompute import recompute_beyond

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
