"""Tensor parallelism inside a stage: which part of each parameter a rank holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSlice:
    """Where the part of a parameter that a tensor-parallel rank holds lies in the whole parameter.

    Attributes:
        whole: shape of the whole parameter.
        begin: index of the part's first element along each dim; zeros where the rank holds all of it.
    """

    whole: tuple[int, ...]
    begin: tuple[int, ...]
