"""How activations and their gradients travel between stages, and the bytes of a message: the one place of both."""

from math import ceil
from typing import Literal

Boundary = Literal["int8"]
"""Codes of messages between stages. int8: each number in 8 bits, and a scale for each block of numbers."""

BLOCK = 128
"""Numbers that share a scale. One large number makes all others of its block coarse, so that blocks are short; with 128
the scales add 3 % to the bytes of the numbers. Blocks run over the tensor as it lies in memory."""
SCALE_BYTES = 4
"""Bytes of a scale, a float32."""


def boundary_bytes(numbers: float, element_bytes: float, boundary: Boundary | None) -> float:
    """Bytes of a message between two stages.

    Examples:
        >>> boundary_bytes(1024, 4, None)
        4096
        >>> boundary_bytes(1024, 4, "int8")
        1056

    Args:
        numbers: of the tensor.
        element_bytes: of a number as stages compute it.
        boundary: its code; ``None`` if it travels as it is.
    """
    if boundary is None:
        return numbers * element_bytes
    return numbers + SCALE_BYTES * ceil(numbers / BLOCK)
