"""Seconds of a product of kept blocks beside the dense one: forward and backward, one core, in turns.

python benchmarks/block_product.py         # writes docs/reproduction/sparse_products.csv, in about a minute
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from pipeloom.model.block_sparse import BlockSparseLinear, kept_blocks
from pipeloom.workload.model_shape import Blocks
from reproduction.machine import Row
from reproduction.tables import write_rows

TOKENS, ROUNDS = 512, 25
CASES = [
    (1024, 1024, 0.125, 64),
    (1024, 1024, 0.125, 32),
    (1024, 1024, 0.125, 128),
    (1024, 1024, 0.25, 64),
    (1024, 1024, 0.5, 64),
    (1024, 4096, 0.125, 64),
    (2048, 2048, 0.125, 64),
]
"""Inputs, outputs, density, block."""


def step_s(layer: Callable[[Tensor], Tensor], x: Tensor, given: Tensor) -> float:
    """Seconds of a forward and a backward with both gradients."""
    begin = perf_counter()
    layer(x).backward(given)
    return perf_counter() - begin


def row_of(inputs: int, outputs: int, density: float, block: int) -> Row:
    """Median seconds of both, measured in turns."""
    pattern = kept_blocks(0, "product", Blocks(density=density, size=block), inputs, outputs)
    sparse, dense = BlockSparseLinear(pattern, bias=False), nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(sparse.weight, std=0.02)
    x, given = torch.randn(TOKENS, inputs, requires_grad=True), torch.randn(TOKENS, outputs)
    found = {name: partial(step_s, layer, x, given) for name, layer in (("dense", dense), ("sparse", sparse))}
    seconds = dict[str, list[float]]()
    for number in range(ROUNDS + 2):
        for name, run in found.items():
            x.grad = sparse.weight.grad = dense.weight.grad = None
            if number < 2:
                run()
            else:
                seconds.setdefault(name, []).append(run())
    dense_s, sparse_s = median(seconds["dense"]), median(seconds["sparse"])
    return {
        "inputs": str(inputs),
        "outputs": str(outputs),
        "density": f"{density:g}",
        "block": str(block),
        "dense_ms": f"{dense_s * 1e3:.2f}",
        "sparse_ms": f"{sparse_s * 1e3:.2f}",
        "times": f"{dense_s / sparse_s:.2f}",
    }


def main() -> None:
    """Measure all cases."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row_of(*case) for case in CASES]
    write_rows("sparse_products", rows)
    print(*(" ".join(row.values()) for row in rows), sep="\n")


if __name__ == "__main__":
    main()
