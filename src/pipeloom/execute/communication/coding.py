"""The code of tensors between stages: 8-bit numbers with a scale for each block (``layout.boundary int8``).

A block's scale is its largest absolute value / 127, and a number travels as the nearest multiple of it: it changes by
at most 1/254 of the largest number of its block. A block with a number that is NaN or infinite has no finite number
afterwards, so that a loss that is lost stays lost. (Block-wise quantization: arXiv 2110.02861, section 2.1.)
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipeloom.execute.communication.boundary import TensorSpec
from pipeloom.workload.boundary import BLOCK, SCALE_BYTES, Boundary, boundary_bytes

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales of blocks of zeros: not 0, by which the numbers are divided."""


def wire_spec(spec: TensorSpec, boundary: Boundary | None) -> TensorSpec:
    """The spec of what travels for a tensor: bytes where it is coded. Tensors of integers travel as they are."""
    if boundary is None or not spec.dtype.is_floating_point:
        return spec
    return TensorSpec((int(boundary_bytes(_numbers_of(spec), spec.dtype.itemsize, boundary)),), torch.uint8)


def encode_blocks(tensor: Tensor) -> Tensor:
    """A tensor of floating-point numbers as bytes, ``uint8[n]``: first the scales, then the numbers."""
    blocks, count = _blocks_of(tensor.detach().reshape(-1)).float(), tensor.numel()
    # Without a tensor of absolute values, whose pages take longer than a second pass.
    largest = torch.maximum(blocks.amax(1, keepdim=True), -blocks.amin(1, keepdim=True))
    scales = (largest / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    coded = torch.empty(SCALE_BYTES * len(scales) + count, dtype=torch.uint8, device=tensor.device)
    coded[: SCALE_BYTES * len(scales)].view(torch.float32).copy_(scales.view(-1))
    coded[SCALE_BYTES * len(scales) :].view(torch.int8).copy_(blocks.div(scales).round_().view(-1)[:count])
    return coded


def decode_blocks(coded: Tensor, spec: TensorSpec) -> Tensor:
    """The tensor of a spec from what ``encode_blocks`` made of it."""
    count = _numbers_of(spec)
    num_blocks = -(-count // BLOCK)
    scales = coded[: SCALE_BYTES * num_blocks].view(torch.float32)
    numbers = coded[SCALE_BYTES * num_blocks :].view(torch.int8)
    blocks = _blocks_of(numbers).float().mul_(scales.view(-1, 1))
    return blocks.view(-1)[:count].view(spec.shape).to(spec.dtype)


def _numbers_of(spec: TensorSpec) -> int:
    return spec.nbytes // spec.dtype.itemsize


def _blocks_of(numbers: Tensor) -> Tensor:
    """Numbers in rows of a block; the last one is filled with zeros, which change no scale and do not travel."""
    missing = -len(numbers) % BLOCK
    return (pad(numbers, (0, missing)) if missing else numbers).view(-1, BLOCK)
