"""Digests of tensors: whether two have the same bits, in a number."""

from collections.abc import Iterable

import torch
from torch import Tensor

_MIXED = 0x9E3779B97F4A7C15
"""Odd, so that multiplication by it modulo 2^64 loses nothing: the place of a tensor counts."""


def digest(tensors: Iterable[Tensor]) -> int:
    """Digest of the bits of tensors, in their order.

    The sum of their words of 64 bits modulo 2^64, which reads memory once. Every change within a single word changes
    it, whatever the values are; several changes are missed if their sum is 0, and so are words that change places.
    """
    total = 0
    for tensor in tensors:
        total = (total * _MIXED + int(_words(tensor))) % 2**64
    return total


def _words(tensor: Tensor) -> int:
    """The sum of a tensor's words, with the bytes that are left over."""
    flat = tensor.detach().contiguous().view(-1)
    per_word = 8 // flat.element_size()
    whole = flat.numel() - flat.numel() % per_word
    # A view of 64 bits must begin at a multiple of 8 bytes of its memory.
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    words = int(flat[:whole].view(torch.int64).sum()) if whole else 0
    return words + sum(int(one) for one in flat[whole:].view(torch.uint8).tolist()) if whole < flat.numel() else words
