"""What low-rank adapters add to a layer: products, bytes moved, kernels; nothing without adapters."""

from collections.abc import Sequence

from pipeloom.workload.run import Run

Product = tuple[float, float, float]
"""Rows, inner size and columns."""
_KERNELS = 4
"""Of the forward of an adapter: two products, a factor and a sum."""


def adapter_products(run: Run, num_ranks: int) -> list[Product]:
    """The two products of each adapter's forward on one of the tensor-parallel ranks."""
    found: list[Product] = []
    if run.adapter is None:
        return found
    for inputs, outputs, divides_inputs in run.adapter.widths(run.shape):
        own_in, own_out = (inputs / num_ranks, outputs) if divides_inputs else (inputs, outputs / num_ranks)
        found += [(run.tokens, own_in, run.adapter.rank), (run.tokens, run.adapter.rank, own_out)]
    return found


def added_bytes(run: Run, products: Sequence[Product]) -> float:
    """Bytes moved to add the adapters' outputs, or in a backward the gradients of their inputs."""
    return 3.0 * run.element_bytes * run.tokens * sum(columns for _, _, columns in products[1::2])


def adapter_kernels(run: Run) -> int:
    """Kernels of the forward of a layer's adapters."""
    return 0 if run.adapter is None else _KERNELS * len(run.adapter.targets)
