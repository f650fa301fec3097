"""Seconds of the matrix products of a run: their operands, their tiles, and the alignment of their rows."""

from math import gcd
from typing import Literal

from pipeloom.cost.hardware import Device
from pipeloom.cost.software import Efficiency
from pipeloom.workload.model_shape import ModelShape
from pipeloom.workload.run import Run

NARROW_BYTES = 1
"""Bytes of an operand in 8 bits."""
ALIGNED = 8
"""Matrix units take operands whose rows are multiples of this number of elements of two bytes (NVIDIA, "Matrix
multiplication background", table 1); other products take slower kernels."""
ALIGNED_RATES = {ALIGNED: 1.0, 4: 0.5, 2: 0.38, 1: 0.31}
"""Largest power of two that divides the sizes of a product -> share of the rate. Below 8 they are what vTrain's
profiled products with a vocabulary of 50,257, 12,564 and 6,282 show beside those with 25,128."""
EXPERT_KERNELS = 5
"""Of the forward of an expert: three products, an activation and a product of its two inputs."""
ROUTER_KERNELS = 24
"""Of the forward of a router, of the choice of experts, of sorting tokens and of the sum of outputs."""
ADAPTER_KERNELS = 4
"""Of the forward of an adapter: two products, a factor and a sum."""


def product_s(run: Run, device: Device, use: Efficiency, shape: tuple[float, float, float]) -> float:
    """Seconds of a product of (rows, inner) and (inner, columns) in a linear layer.

    Args:
        run: has the precision of operands and results.
        device: computes it.
        use: of the program.
        shape: rows, inner size, columns.
    """
    (rows, inner, columns), size = shape, run.element_bytes
    operand = NARROW_BYTES if run.products else size
    moved = operand * (rows * inner + inner * columns) + size * rows * columns
    filling = device.filling(rows, columns)
    if device.is_gpu and columns == int(columns) and inner == int(inner):
        filling *= ALIGNED_RATES[gcd(int(rows), int(inner), int(columns), ALIGNED)]
    seconds = device.matmul_s(2 * rows * inner * columns, moved, run.peak_precision, use.matmul * filling)
    return seconds + device.kernel_s * (use.kernel - 1)


BLOCK_KERNELS = 10
"""Of the forward of seven matrices of kept blocks, a gather and a product each, beside four products of dense ones."""
GATHER_SLOWDOWN = 2.2
"""Seconds of gathering on a core / of a copy of as many bytes. Seven measured products of kept blocks took longer than
the density's part of dense ones by 1.5 to 3.0 copies, in the geometric mean 2.2 (docs, ``sparse_products.csv``)."""

BlockProduct = Literal["output", "input", "weight"]
"""A product of a matrix: its output, the gradient of its input, or that of its weight."""
Product = tuple[float, float, float]
"""Rows, inner size and columns of a product on one rank."""


def layer_products(run: Run) -> list[Product]:
    """The products of a layer: queries, keys and values; output of attention; into the MLP; out of it.

    Of kept blocks: an output reads a part of the inputs, so that its inner size is the density's part. Not those of
    experts (``expert_products``), in place of which the MLP is what all tokens take of them.
    """
    shape, tokens = run.shape, run.tokens
    hidden, inner = shape.hidden, dense_inner(shape) / run.tp
    products = _attention_and_mlp(run, tokens, hidden, inner)
    return products if inner else products[:2]


def dense_inner(shape: ModelShape) -> int:
    """Inner width of the feed-forward block that all tokens take; of a layer with experts, of the shared ones."""
    return shape.ffn if shape.experts is None else shape.experts.shared * shape.experts.ffn


def expert_products(run: Run) -> tuple[int, list[Product]]:
    """Number of a layer's experts on a rank, and the products of each, into it and out of it, with equal loads."""
    shape, experts = run.shape, run.shape.experts
    if experts is None:
        return 0, []
    number, inner = experts.count // run.ep, experts.ffn / run.tp
    tokens = run.computed_pairs / number
    return number, [(tokens, shape.hidden, inner * shape.kind.gates), (tokens, inner, shape.hidden)]


def router_products(run: Run) -> list[Product]:
    """The product of a layer's router, if it has experts."""
    experts = run.shape.experts
    return [] if experts is None else [(run.tokens, run.shape.hidden, experts.count)]


def expert_bytes(run: Run) -> float:
    """Bytes that a layer's forward moves to sort the tokens by expert, and to sum what the experts return.

    Each pair of a token and an expert is read and written in both directions, then read once for the sum. Where ranks
    share experts, what arrives is sorted by expert and back again.
    """
    rows = 4.0 * run.sent_pairs + run.pairs + (0.0 if run.ep == 1 else 4.0 * run.computed_pairs)
    return rows * run.shape.hidden * run.element_bytes


def expert_kernels(run: Run) -> int:
    """Kernels of the forward of a layer's experts: those of each, and of router, choice and sorting."""
    experts = run.shape.experts
    return 0 if experts is None else EXPERT_KERNELS * (experts.count // run.ep) + ROUTER_KERNELS


def _attention_and_mlp(run: Run, tokens: float, hidden: int, inner: float) -> list[Product]:
    shape, density = run.shape, run.shape.density
    return [
        (tokens, hidden * density, (shape.query_width + 2 * shape.kv_width) / run.tp),
        (tokens, shape.query_width / run.tp * density, hidden),
        (tokens, hidden * density, inner * shape.kind.gates),
        (tokens, inner * density, hidden),
    ]


def gathered_bytes(run: Run, which: BlockProduct) -> float:
    """Bytes that a layer's products of kept blocks move beside their operands; 0 for dense matrices.

    Each row of blocks has its inputs side by side, which are gathered and read by the product. The gradient of the
    inputs is written by row of blocks, and added to what other rows gave. That of the weight gathers again.

    Args:
        run: model and layout.
        which: of the three products of a matrix.
    """
    blocks = run.shape.blocks
    if blocks is None:
        return 0.0
    numbers = sum(rows * inner * columns for rows, inner, columns in layer_products(run)) / blocks.size
    return {"output": 3.0, "input": 4.0, "weight": 3.0}[which] * numbers * run.element_bytes


def gather_buffer_bytes(run: Run) -> float:
    """Bytes of the largest gathered input of a layer's matrices of kept blocks; 0 for dense ones."""
    blocks, size = run.shape.blocks, run.element_bytes
    if blocks is None:
        return 0.0
    return max(size * run.tokens * blocks.kept(inputs) * outputs for inputs, outputs in run.shape.matrices.values())


def operand_bytes(run: Run, direction: int, *, is_fused: bool = False) -> float:
    """Bytes moved around a layer's products: to cast operands, and to add what adapters return.

    Without the gradients of weights. Arguments are those of ``cast_bytes``.
    """
    return added_bytes(run) + cast_bytes(run, direction, is_fused=is_fused)


def more_kernels(run: Run) -> int:
    """Kernels of a layer's forward beside those of a dense layer: of experts, adapters, and products of blocks."""
    blocks = 0 if run.shape.blocks is None else BLOCK_KERNELS
    return adapter_kernels(run) + expert_kernels(run) + blocks


def adapter_products(run: Run) -> list[Product]:
    """The two products of each adapter."""
    found = list[Product]()
    if run.adapter is None:
        return found
    for inputs, outputs, divides_inputs in run.adapter.widths(run.shape):
        own_in, own_out = (inputs / run.tp, outputs) if divides_inputs else (inputs, outputs / run.tp)
        found += [(run.tokens, own_in, run.adapter.rank), (run.tokens, run.adapter.rank, own_out)]
    return found


def added_bytes(run: Run) -> float:
    """Bytes moved to add the adapters' outputs, or in a backward the gradients of their inputs."""
    return 3.0 * run.element_bytes * run.tokens * sum(columns for _, _, columns in adapter_products(run)[1::2])


def adapter_kernels(run: Run) -> int:
    """Kernels of the forward of a layer's adapters."""
    return 0 if run.adapter is None else ADAPTER_KERNELS * len(run.adapter.targets)


def cast_bytes(run: Run, direction: int, *, is_fused: bool = False) -> float:
    """Bytes of casting operands: of inputs in a forward, of gradients of outputs in a backward.

    Each is read, and written twice, as rows and as columns, since both products of a backward need other ones. A fused
    kernel writes both instead of the 16 bits that it would write.

    Args:
        run: model and layout.
        direction: 0 for a forward, 1 for a backward.
        is_fused: whether kernels before a product write its operand in 8 bits (``Software.fuses_casts``).
    """
    if not run.products:
        return 0.0
    each = run.element_bytes + 2 * NARROW_BYTES
    queries, output, into, out = layer_products(run)
    cast = [queries, output, into, out]
    if is_fused:
        # A norm or an activation writes the other inputs, its gradient that of the product into the MLP.
        cast = [output] if direction == 0 else [queries, output, out]
    return sum(each * size[0] * size[1 + direction] for size in cast)
