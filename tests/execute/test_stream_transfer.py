"""Transfers that a device orders, without a device: what they keep."""

import weakref
from functools import partial
from types import SimpleNamespace

import torch

from pipeloom.execute.communication.transport import _on_stream


def test_a_sent_tensor_is_not_kept_until_the_end_of_the_step():
    tensor = torch.zeros(3)
    kept = weakref.ref(tensor)
    transfer = _on_stream(tensor, 1, False, partial(SimpleNamespace, outputs=[tensor]))  # as NCCL's work does
    del tensor
    assert kept() is None
    assert transfer.is_done()
    assert transfer.take() is None


def test_a_receive_is_waited_for_and_handed_over_once():
    tensor, waits = torch.zeros(3), []
    transfer = _on_stream(tensor, 1, True, lambda: SimpleNamespace(wait=lambda: waits.append(1)))
    assert transfer.is_done()
    assert waits == [1]
    assert transfer.take() is tensor
    assert transfer.take() is None
