"""What autograd saves: recognized by storage, moved as bytes, put back; what others hold stays."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.execute.stages.saved import Packing, Parcel
from pipeloom.execute.stages.stage import Portion, Stage


class Busy(nn.Module):
    """Saves views, casts, a tensor twice, cached tensors, parameters, a buffer, numbers of other types."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 24, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)
        self.register_buffer("scale", torch.arange(1.0, 9.0, dtype=torch.float64))
        self.borrowed = torch.full((8,), 0.5, dtype=torch.float64)
        self.cast = self.second.weight.detach().float()
        self.cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.linspace(0, 1, 8, dtype=torch.float64)
        a, b, c = self.first(x).chunk(3, -1)
        mixed = a * b * self.cache + functional.dropout(c * self.borrowed, 0.0) * self.scale
        narrow = (mixed.float() @ self.cast).double()
        picked = narrow.index_select(-1, torch.arange(7, -1, -1))
        return self.second(torch.where(picked > 0, picked, 0.1 * picked) * mixed).tanh()


def stage_of(module, needs_input_gradient=True):
    return Stage(module, 1, TensorSpec((3, 8), torch.float64), needs_input_gradient=needs_input_gradient)


def moved(parcel):
    """Away into a message each, and back."""
    memory = torch.empty(parcel.packing.total_bytes, dtype=torch.uint8)
    counted = []
    for (begin, end), message in zip(parcel.packing.messages, parcel.messages(counted.append), strict=True):
        memory[begin:end] = message
    assert sum(counted) == -parcel.nbytes
    return memory


def storages(parcel):
    return [StorageWeakRef(box.storage) for box in parcel._boxes]


@pytest.fixture
def module():
    torch.manual_seed(0)
    return Busy()


def gradients(module, x, moves):
    """Of the input and of all parameters."""
    module.zero_grad()
    stage, parcel = stage_of(module), Parcel(owns_input=True)
    stage.forward(Portion(0), x.clone(), None, trains=True, parcel=parcel if moves else None)
    if moves:
        memory = moved(parcel)
        parcel.restore(memory)
    found = stage.backward(Portion(0), torch.ones(3, 8, dtype=torch.float64))
    return [found, *(p.grad for p in module.parameters())]


def test_gradients_are_the_same_to_the_last_bit(module):
    x = torch.randn(3, 8, dtype=torch.float64)
    plain, through = gradients(module, x, moves=False), gradients(module, x, moves=True)
    assert all(map(torch.equal, plain, through))


def test_everything_that_moves_is_freed_and_nothing_else_moves(module):
    stage, parcel, x = stage_of(module), Parcel(owns_input=True), torch.randn(3, 8, dtype=torch.float64)
    given = StorageWeakRef(x.untyped_storage())
    output = stage.forward(Portion(0), x, None, trains=True, parcel=parcel)
    made = StorageWeakRef(output.untyped_storage())
    held = storages(parcel)
    shared = [*module.parameters(), module.scale, module.borrowed, module.cast, module.cache]
    assert not {ref.cdata for ref in held} & {tensor.untyped_storage()._cdata for tensor in shared}
    assert {given.cdata, made.cdata} <= {ref.cdata for ref in held}
    assert len({ref.cdata for ref in held}) == len(held)
    del x, output
    memory = moved(parcel)
    assert all(ref.expired() for ref in [*held, given, made])
    parcel.restore(memory)
    stage.backward(Portion(0), torch.ones(3, 8, dtype=torch.float64))
    back = StorageWeakRef(memory.untyped_storage())
    del memory, parcel
    assert back.expired()


def test_an_input_that_autograd_does_not_save_is_freed_with_the_forward():
    stage, parcel = stage_of(nn.Tanh()), Parcel(owns_input=True)
    x = torch.randn(3, 8, dtype=torch.float64)
    given = StorageWeakRef(x.untyped_storage())
    stage.forward(Portion(0), x, None, trains=True, parcel=parcel)
    del x
    assert given.expired()
    assert stage.tally.held_bytes == 3 * 8 * 8


def test_what_the_batch_holds_stays():
    stage, parcel = stage_of(nn.Linear(8, 8, dtype=torch.float64), needs_input_gradient=False), Parcel(owns_input=False)
    x = torch.randn(3, 8, dtype=torch.float64)
    stage.forward(Portion(0), x, None, trains=True, parcel=parcel)
    assert parcel.nbytes == 0


def test_what_two_parts_share_stays():
    shared = torch.randn(3, 8, dtype=torch.float64)

    class Sharing(nn.Module):
        def forward(self, x):
            return x * shared

    parcels = [Parcel(owns_input=True) for _ in range(2)]
    stage = stage_of(Sharing())
    for number, parcel in enumerate(parcels):
        stage.forward(Portion(number), torch.randn(3, 8, dtype=torch.float64), None, trains=True, parcel=parcel)
    assert [parcel.nbytes for parcel in parcels] == [0, 0]


def test_recomputation_keeps_the_input_of_what_it_computes_again(module):
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False)

    x = torch.randn(3, 8, dtype=torch.float64)
    recomputing = Recomputing()
    plain, through = gradients(recomputing, x, moves=False), gradients(recomputing, x, moves=True)
    assert all(map(torch.equal, plain, through))
    stage, parcel = stage_of(recomputing), Parcel(owns_input=True)
    stage.forward(Portion(0), x.clone(), None, trains=True, parcel=parcel)
    assert parcel.nbytes == 2 * x.nbytes


def test_the_state_of_a_generator_comes_back_as_one():
    """Compiled code saves it to draw the same numbers again, and sets it from where a storage begins."""
    parcel, state = Parcel(owns_input=True), torch.get_rng_state()
    expected = state.clone()
    other, handle = parcel._pack(torch.randn(100)), parcel._pack(state)
    del state
    parcel.close(torch.zeros(1), torch.zeros(1))
    parcel.restore(moved(parcel))
    from pipeloom.execute.stages.saved import _unpack

    torch.set_rng_state(_unpack(handle))
    assert torch.equal(torch.get_rng_state(), expected)
    assert _unpack(other).shape == (100,)


@pytest.mark.parametrize(
    "sizes", [(), (8,), (1, 1, 1), (70_000, 8, 8, 200_000, 90_000), (65_535, 65_536, 1), (40_000,) * 9]
)
def test_messages_cover_every_storage_once_and_large_ones_travel_alone(sizes):
    packing = Packing.of(sizes)
    assert [number for first, behind in packing.members for number in range(first, behind)] == list(range(len(sizes)))
    for (begin, end), (first, behind) in zip(packing.messages, packing.members, strict=True):
        assert begin == packing.begins[first]
        assert end == packing.begins[behind - 1] + sizes[behind - 1]
        assert behind == first + 1 or max(sizes[first:behind]) < 65_536
    assert all(begin % 64 == 0 for begin in packing.begins)
    assert packing.total_bytes >= sum(sizes)


def test_a_backward_before_what_it_needs_is_back_says_so(module):
    stage, parcel = stage_of(module), Parcel(owns_input=True)
    stage.forward(Portion(0), torch.randn(3, 8, dtype=torch.float64), None, trains=True, parcel=parcel)
    moved(parcel)
    with pytest.raises(AssertionError, match="the backward came before what it needs was back"):
        stage.backward(Portion(0), torch.ones(3, 8, dtype=torch.float64))
