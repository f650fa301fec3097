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
@pytest.mark.parametrize("is_whole", [False, True])
def test_gradients_are_those_of_autograd(gate, frozen, flows, is_whole):
    block = block_of(gate)
    for name in frozen:
        block.get_submodule(name).requires_grad_(requires_grad=False)
    wanted = [weight for weight in block.parameters() if weight.requires_grad]
    x = torch.randn(ROWS, H, dtype=torch.float64, requires_grad=flows)
    wanted += [x] if flows else []
    gradient = torch.randn(ROWS, H, dtype=torch.float64)
    output = block(x) if is_whole else block.down(block.inner(x))
    found = torch.autograd.grad(output, wanted, gradient)
    expected = torch.autograd.grad(reference(block, x, gate), wanted, gradient)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


def num_kept(block, forward):
    """Tensors of the inner width that a forward keeps."""
    kept = {}

    def pack(tensor):
        if tensor.numel() == ROWS * F:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(ROWS, H, dtype=torch.float64)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(x)
    assert output.shape == x.shape
    return len(kept)


@pytest.mark.parametrize(("frozen", "number"), [((), 3), (("gate", "up"), 1)])
def test_the_activated_gate_is_not_kept(frozen, number):
    block = block_of("silu")
    for name in frozen:
        block.get_submodule(name).requires_grad_(requires_grad=False)
    assert num_kept(block, lambda x: block.down(block.inner(x))) == number


def test_a_gate_without_gradient_is_kept_without_up():
    block = block_of("silu")
    block.up.adapt(2, 1.0, WHOLE)
    block.double()
    block.gate.requires_grad_(requires_grad=False)
    assert num_kept(block, block) == 2


@pytest.mark.parametrize(("frozen", "number"), [((), 3), (("down",), 2)])
def test_a_whole_block_keeps_no_more(frozen, number):
    block = block_of("silu")
    for name in frozen:
        block.get_submodule(name).requires_grad_(requires_grad=False)
    assert num_kept(block, block) == number


def test_a_frozen_block_keeps_nothing_for_weights():
    block = block_of("silu").requires_grad_(requires_grad=False)
    assert num_kept(block, block) == 0
