"""Gated feed-forward blocks: the gradients of autograd, and less kept for them."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from pipeloom.model.feed_forward import GatedFeedForward
from pipeloom.model.tensor_parallel import WHOLE

H, F, ROWS = 6, 10, 14


def reference(block, x, gate):
    """The block by PyTorch's operators alone."""
    read = functional.linear(x, block.gate.weight)
    activated = functional.silu(read) if gate == "silu" else functional.gelu(read, approximate="tanh")
    return functional.linear(activated * functional.linear(x, block.up.weight), block.down.weight)


def block_of(gate):
    torch.manual_seed(0)
    block = GatedFeedForward(H, F, WHOLE, gate).double()
    for weight in block.parameters():
        torch.nn.init.normal_(weight)
    return block


@pytest.mark.parametrize("gate", ["silu", "gelu"])
@pytest.mark.parametrize("frozen", [(), ("gate",), ("up",), ("gate", "up"), ("down",)])
@pytest.mark.parametrize("flows", [False, True])
def test_gradients_are_those_of_autograd(gate, frozen, flows):
    block = block_of(gate)
    for name in frozen:
        block.get_submodule(name).requires_grad_(requires_grad=False)
    wanted = [weight for weight in block.parameters() if weight.requires_grad]
    x = torch.randn(ROWS, H, dtype=torch.float64, requires_grad=flows)
    wanted += [x] if flows else []
    gradient = torch.randn(ROWS, H, dtype=torch.float64)
    found = torch.autograd.grad(block(x), wanted, gradient)
    expected = torch.autograd.grad(reference(block, x, gate), wanted, gradient)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("frozen", "number"), [((), 3), (("gate",), 2), (("gate", "up"), 1)])
def test_the_activated_gate_is_not_kept(frozen, number):
    block = block_of("silu")
    for name in frozen:
        block.get_submodule(name).requires_grad_(requires_grad=False)
    kept = {}

    def pack(tensor):
        if tensor.numel() == ROWS * F:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(ROWS, H, dtype=torch.float64)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    assert len(kept) == number
