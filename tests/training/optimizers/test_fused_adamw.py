"""AdamW without PyTorch's optimizer classes: the same bits, and without the compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from pipeloom.training.optimizers.fused_adamw import FusedAdamW

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters():
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (11,), (64, 3)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def groups_of(all_of):
    return [{"params": all_of[:2], "weight_decay": 0.1}, {"params": all_of[2:], "weight_decay": 0.0}]


def test_updates_have_the_bits_of_torch_and_skip_what_has_no_gradient():
    ours, theirs = parameters(), parameters()
    own = FusedAdamW(groups_of(ours), **SETTINGS)
    other = torch.optim.AdamW(groups_of(theirs), fused=True, **SETTINGS)
    generator = torch.Generator().manual_seed(5)
    for step in range(4):
        for optimizer in (own, other):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            gradient = None if number == 1 and step == 2 else torch.randn(mine.shape, generator=generator)
            mine.grad = its.grad = gradient
        own.step()
        other.step()
        assert all(mine.equal(its) for mine, its in zip(ours, theirs, strict=True))
    for mine, its in zip(ours, theirs, strict=True):
        assert own.state[mine].keys() == other.state[its].keys()
        assert all(own.state[mine][key].equal(other.state[its][key]) for key in own.state[mine])


def test_settings_of_a_group_are_its_own():
    optimizer = FusedAdamW(groups_of(parameters()), **SETTINGS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.9, 0.95) for group in optimizer.param_groups)


WITHOUT_COMPILER = """
import sys
import torch
from torch.nn import functional
from pipeloom.model.graph_breaks import graph_break, keep_compiler_unloaded
keep_compiler_unloaded()
import pipeloom.training.run
from pipeloom.model import build_stage
from pipeloom.training.optimizers.fused_adamw import FusedAdamW
from pipeloom.workload.model import ModelConfig
sizes = ModelConfig(num_layers=1, hidden_size=8, num_heads=2).resolve(11)
stage = build_stage(sizes, range(3), max_positions=4, seed=0, dtype=torch.float32, device="cpu")
stage(torch.zeros((1, 4), dtype=torch.int64)).sum().backward()
found = [name for name in ("sympy", "pipeloom.planner.plan") if name in sys.modules]
assert not found, found
x = torch.ones(2, 3, device="meta", requires_grad=True)
functional.silu(x.square().mean(-1, keepdim=True).rsqrt() * x).softmax(-1).sum().backward()
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
FusedAdamW([{"params": [weight]}], lr=0.1, betas=(0.9, 0.95), eps=1e-8).step()
assert graph_break(lambda value: value + 1)(1) == 2
found = [name for name in ("torch._dynamo", "torch.distributed.checkpoint") if name in sys.modules]
assert not found, found
import torch._dynamo
assert graph_break(lambda value: value + 1)(1) == 2
"""


def test_a_run_without_compilation_loads_no_compiler_no_symbolic_shapes_no_planner_and_no_checkpoint_library():
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_function_behind_a_graph_break_gives_its_result(is_compiled):
    from pipeloom.model.graph_breaks import graph_break

    traced = []

    @graph_break
    def tripled(x):
        traced.append(torch.compiler.is_compiling())
        return 3 * x

    def run(x):
        return tripled(x + 1) - 1

    run = torch.compile(run, backend="eager") if is_compiled else run
    assert run(torch.ones(2)).tolist() == [5.0, 5.0]
    assert traced == [False]
