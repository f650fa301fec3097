"""Attention over sequences that ranks share: sums, and gradients in every rank, equal those of whole sequences."""

from queue import SimpleQueue
from threading import Thread

import pytest
import torch

from pipeloom.model.context_parallel import ContextGroup, ContextParallel, own_parts, own_places, ring_attention
from pipeloom.model.core_attention import BLOCK, core_attention
from pipeloom.model.visible_keys import Documents, VisibleKeys

HEADS, KEY_HEADS, SIZE = 4, 2, 8
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Neighbor(ContextGroup):
    """A rank that is a thread."""

    def __init__(self, size, index, mail):
        super().__init__(size, index)
        self._mail = mail

    def pass_on(self, received, sent):
        self._mail[(self.index + 1) % self.size].put([one.clone() for one in sent])

        def wait():
            for one, arrived in zip(received, self._mail[self.index].get(timeout=20), strict=True):
                one.copy_(arrived)

        return wait


def on_ranks(size, tensors, gradient, firsts, settings):
    """Each rank's places, sums of values, and gradients of queries, keys and values."""
    mail, found = [SimpleQueue() for _ in range(size)], {}

    def run(index):
        places = own_places(gradient.shape[2], size, index)
        own = [one.detach()[:, :, places].clone().requires_grad_() for one in tensors]
        documents = None if firsts is None else Documents(firsts[:, places])
        context = ContextParallel(Neighbor(size, index, mail))
        sums = ring_attention(*own, context=context, documents=documents, **settings)
        sums.backward(gradient[:, :, places])
        found[index] = places, sums.detach(), [one.grad for one in own]

    threads = [Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == size
    return found.values()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("settings", "has_documents", "length"),
    [
        ({}, False, 48),
        ({"window": 7}, False, 48),
        ({"window": 20}, True, 48),
        ({"softcap": 3.0, "scale": 0.2}, False, 48),
        ({}, True, 48),
        ({"window": 100}, False, 4 * BLOCK + 16),
    ],
)
def test_ranks_with_parts_of_sequences_compute_what_one_computes_with_whole_ones(size, settings, has_documents, length):
    draw = torch.Generator().manual_seed(0)
    length -= length % (2 * size)
    sizes = [(2, heads, length, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    tensors = [torch.randn(one, generator=draw, dtype=torch.float64).requires_grad_() for one in sizes]
    firsts = None
    if has_documents:
        begins = torch.rand((2, length), generator=draw) < 0.1
        firsts = torch.where(begins, torch.arange(length), 0).cummax(1).values
    others = {name: value for name, value in settings.items() if name != "window"}
    documents = None if firsts is None else Documents(firsts)
    expected = core_attention(*tensors, visible=VisibleKeys(0, settings.get("window"), documents), **others)
    gradient = torch.randn(expected.shape, generator=draw, dtype=torch.float64)
    expected.backward(gradient)
    for places, sums, gradients in on_ranks(size, tensors, gradient, firsts, settings):
        torch.testing.assert_close(sums, expected.detach()[:, :, places], **CLOSE)
        for found, whole in zip(gradients, tensors, strict=True):
            torch.testing.assert_close(found, whole.grad[:, :, places], **CLOSE)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_as_many_visible_pairs_of_parts_with_the_keys_of_every_rank(size):
    parts = [own_parts(size, index) for index in range(size)]
    assert sorted(part for both in parts for part in both) == list(range(2 * size))
    for mine in parts:
        for theirs in parts:
            # A part sees half of itself, and all of those before it.
            seen = sum(0.5 if key == own else float(key < own) for own in mine for key in theirs)
            assert seen == 2


def test_without_a_context_axis_or_while_it_is_off_places_are_those_of_the_sequence():
    context = ContextParallel(ContextGroup(4, 1))
    assert context.places(4).tolist() == [2, 3, 12, 13]
    assert context.num_tokens(4) == 16
    with context.off():
        assert context.places(4).tolist() == [0, 1, 2, 3]
        assert context.num_tokens(4) == 4
    assert ContextParallel(ContextGroup()).places(3).tolist() == [0, 1, 2]
