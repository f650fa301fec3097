"""Messages in 8 bits: what a code changes, the bytes on the wire, and gradients that are those of coded boundaries."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from in_process import Post, run_in_process
from small_run import small_run
from toy import Toy, make_executor, objective, worst_difference

from pipeloom.config import AdapterConfig, ModelConfig
from pipeloom.data.text import load_data
from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.communication.coding import decode_blocks, encode_blocks, wire_spec
from pipeloom.execute.communication.transport import Transport
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.families import make_schedule
from pipeloom.measure import coded as measured
from pipeloom.measure.rehearsal import warm_up
from pipeloom.passes import lower
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.session import resolve
from pipeloom.workload.boundary import BLOCK
from pipeloom.workload.layout import Layout

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def coded(tensor):
    """A tensor after a journey."""
    return decode_blocks(encode_blocks(tensor), TensorSpec.of(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 8, 64), (3, 5, 7), (1,), (2, BLOCK)])
def test_a_number_changes_by_at_most_half_a_step_of_its_block(shape, dtype):
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 10).to(dtype)
    found = coded(tensor)
    assert (found.shape, found.dtype) == (tensor.shape, dtype)
    blocks = tensor.flatten().split(BLOCK)
    for block, again in zip(blocks, found.flatten().split(BLOCK), strict=True):
        largest = block.abs().max().double()
        rounding = torch.finfo(dtype).eps * largest
        assert (block.double() - again.double()).abs().max() <= largest / 254 * (1 + 1e-5) + rounding
        assert again.abs().max().double() == pytest.approx(float(largest), rel=2 * torch.finfo(dtype).eps + 1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1e30])
def test_very_small_and_very_large_numbers_and_zeros_stay_what_they_are(size):
    found = coded(torch.linspace(-size, size, 300))
    assert torch.allclose(found, torch.linspace(-size, size, 300), rtol=0, atol=max(size / 100, 1e-38))
    assert found.isfinite().all()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_become_finite(wrong):
    tensor = torch.ones(2 * BLOCK)
    tensor[BLOCK + 3] = wrong
    found = coded(tensor)
    assert torch.equal(found[:BLOCK], tensor[:BLOCK])
    assert not found[BLOCK + 3].isfinite()


def test_a_view_is_coded_as_what_it_shows():
    tensor = torch.randn(16, 12).T
    assert torch.equal(coded(tensor), coded(tensor.contiguous()))


def test_integers_and_exact_boundaries_travel_as_they_are():
    tokens, spec = TensorSpec((2, 8), torch.int64), TensorSpec((2, 8), torch.float32)
    assert wire_spec(tokens, "int8") is tokens
    assert wire_spec(spec, None) is spec
    assert wire_spec(spec, "int8") == TensorSpec((2 * 8 + 4,), torch.uint8)


class _Coded(torch.autograd.Function):
    """A boundary between ranks, forth and back."""

    @staticmethod
    def forward(ctx, tensor):
        return coded(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return coded(gradient)


@pytest.mark.parametrize(
    ("family", "loops", "placement"),
    [("gpipe", 1, None), ("1f1b", 1, None), ("breadth-first", 2, None), ("zb-h1", 1, None), ("breadth-first", 2, "v")],
)
def test_gradients_are_those_of_a_loop_with_coded_boundaries_between_ranks(family, loops, placement):
    schedule = lower(make_schedule(family, pp=3, loops=loops, num_microbatches=4, placement=placement))
    toy, post = Toy(3 * loops, 4), Post()
    modules, expected = toy.modules(), toy.modules()
    ranks = range(schedule.num_ranks)
    executors = [make_executor(schedule, r, modules, toy.outputs(), post.transport(r), boundary="int8") for r in ranks]
    results = run_in_process(executors, toy.inputs(), objective)
    total = 0.0
    for microbatch, tensor in enumerate(toy.inputs()):
        for stage, module in enumerate(expected):
            tensor = module(tensor)
            tensor = _Coded.apply(tensor) if schedule.placement.crosses(stage) else tensor
        loss = objective(tensor, microbatch)
        loss.backward()
        total += loss.item()
    assert sum(float(value) for result in results for value in result.outputs.values()) == pytest.approx(total, 1e-12)
    assert worst_difference(modules, expected) < 1e-12


SMALL = {"num_microbatches": 4, "microbatch_size": 2}
EVERYWHERE = {
    "plain": (Layout(pp=4, loops=1, **SMALL), {}),
    "tied": (
        Layout(pp=2, loops=2, dp=2, **SMALL),
        {"model": ModelConfig(num_layers=6, hidden_size=32, num_heads=2, tied=True)},
    ),
    "tensor": (Layout(pp=2, loops=2, tp=2, **SMALL), {}),
    "sequence": (Layout(pp=2, loops=1, tp=2, sequence_parallel=True, recompute="full", **SMALL), {}),
    "context": (Layout(pp=2, loops=1, cp=2, **SMALL), {}),
    "slices": (Layout(pp=4, loops=1, token_slices=2, **SMALL), {}),
    "sharded": (Layout(pp=2, loops=2, dp=2, shard="full", **SMALL), {}),
    "adapters": (Layout(pp=4, loops=1, **SMALL), {"adapter": AdapterConfig(rank=2, init="random")}),
}


def _of(folder, layout, sections):
    config = small_run(folder, layout=layout, model=ModelConfig(num_layers=6, hidden_size=32, num_heads=2))
    training = replace(config.training, dtype="float32", predict=False)
    config = replace(config, training=training, data=replace(config.data, seq_len=16))
    return replace(config, **sections)


def _noting(made, encode, tensor):
    made.append(tensor)
    return encode(tensor)


def _steps(configs, rendezvous, rank, size):
    """For each configuration loss, gradients and sent bytes of a step, as they are and coded."""
    world, send, sent = join_forked(rendezvous, rank, size, "cpu", 60), Transport.send, [0]

    def counted(transport, tensor, peer):
        sent[0] += tensor.nbytes
        return send(transport, tensor, peer)

    Transport.send = counted
    found = []
    for number, config in enumerate(configs):
        data = load_data(config.data, 0)
        for boundary in (None, "int8"):
            own = resolve(replace(config, layout=replace(config.layout, boundary=boundary)), data)
            pipeline = Pipeline(own, world)
            sent[0] = 0
            batch = pipeline.batch(data.train.batch(0, own.layout.batch_size))
            loss = pipeline.counted_loss(pipeline.train_step(batch))
            grads = [grad.double().cpu().numpy() for grad in pipeline.gradients().values()]
            found.append((loss if pipeline.is_first_replica else 0.0, grads, sent[0]))
            if boundary is not None and number == 0:  # what a profile times codes, too
                made = []
                measured.encode_blocks = partial(_noting, made, measured.encode_blocks)
                with pipeline._rehearsal(batch) as stages:
                    warm_up(stages)
                # A message and its gradient, and once more in a run, at each boundary of the rank.
                assert len(made) == (2 if rank in (0, 3) else 4)
            pipeline.close()
    world.leave()
    return found


@pytest.mark.timeout(120)
def test_a_step_of_every_layout_is_nearly_the_same_with_a_quarter_of_the_bytes(tmp_path):
    configs = [_of(tmp_path, *case) for case in EVERYWHERE.values()]
    load_data(configs[0].data, 0)
    every = run_workers(partial(_steps, configs), 4)
    for number, name in enumerate(EVERYWHERE):
        exact, rounded = ([rank[2 * number + which] for rank in every] for which in (0, 1))
        losses = [sum(loss for loss, _, _ in ranks) for ranks in (exact, rounded)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3), name
        assert losses[1] != losses[0], name
        for (_, ours, _), (_, theirs, _) in zip(exact, rounded, strict=True):
            norm = math.sqrt(sum((one**2).sum() for one in ours))
            apart = math.sqrt(sum(((one - other) ** 2).sum() for one, other in zip(ours, theirs, strict=True)))
            assert apart <= 0.03 * norm, name
        sent = [sum(nbytes for _, _, nbytes in ranks) for ranks in (exact, rounded)]
        # The messages of a tied matrix are not coded.
        assert sent[1] < (0.27 if name != "tied" else 0.9) * sent[0], name
