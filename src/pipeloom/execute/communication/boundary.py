"""Specs of the tensors between stages, which all ranks agree on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from pipeloom.errors import BoundaryError


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor between stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """``float32[2, 128, 192]``."""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @cached_property
    def nbytes(self) -> int:
        """Its bytes; each message is compared with them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """An uninitialized tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def check(self, tensor: torch.Tensor, what: str, *values: object) -> None:
        """Refuse a tensor of another spec.

        Args:
            tensor: to check.
            what: its name, a format of ``values``, which is used only where the tensor is refused.
            values: of the name.

        Raises:
            BoundaryError: naming the tensor, the agreed spec and the one found.
        """
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise BoundaryError(f"{what.format(*values)} is {TensorSpec.of(tensor)}, but {self} was agreed on")


@dataclass(frozen=True)
class TokenSlices:
    """Token slices of micro-batches.

    Attributes:
        lengths: tokens of each slice; their sum is the length of a sequence.
    """

    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of a whole sequence."""
        return sum(self.lengths)

    def begin(self, number: int) -> int:
        """The position of a slice's first token."""
        return sum(self.lengths[:number])

    def spec(self, whole: TensorSpec, number: int) -> TensorSpec:
        """The spec of a slice, from ``whole``, that of the micro-batch.

        Dim 1 is tokens: all of them, or a rank's share.
        """
        batch, tokens, *rest = whole.shape
        # With sequence parallelism `tokens` is a rank's share; the slice has the same share of its own tokens.
        return TensorSpec((batch, tokens * self.lengths[number] // self.num_tokens, *rest), whole.dtype)

    def cut(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the slices of each tensor of whole sequences, one tensor after the other."""
        return [part.contiguous() for tensor in tensors for part in tensor.split(self.lengths, dim=1)]


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
_MAX_DIMS = 6


def encode(specs: Iterable[TensorSpec]) -> torch.Tensor:
    """Specs as numbers, ``int64[n, 8]``: for each a row of dtype, number of dims, dims."""
    rows = [
        [_DTYPES.index(spec.dtype), len(spec.shape), *spec.shape, *[0] * (_MAX_DIMS - len(spec.shape))]
        for spec in specs
    ]
    return torch.tensor(rows, dtype=torch.int64)


def decode(numbers: torch.Tensor) -> list[TensorSpec]:
    """The inverse of ``encode``."""
    return [TensorSpec(tuple(row[2 : 2 + row[1]]), _DTYPES[row[0]]) for row in numbers.tolist()]
