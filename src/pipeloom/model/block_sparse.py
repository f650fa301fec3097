"""Linear layers whose weight is some blocks of a matrix; the other blocks are zero, and exist nowhere.

The weight of a matrix [out, in] has the shape [out, k b]: of each row of blocks, b rows high, the k kept blocks side by
side, in the order of their columns. So parameter, gradient, optimizer state and shards have the size of what is kept,
without a mask, and which blocks are kept follows from a seed and the name of the matrix on every rank.

A product gathers the inputs of each row of blocks and is one batched product of dense matrices. Nothing that is
gathered is kept: the backward gathers again, so that a layer keeps what a dense one does.

Letters of shapes: N tokens, P rows of blocks, k kept blocks of each, b the size of a block.
"""

# ruff: noqa: N803, N806 (upper-case letters in names are shapes)

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.model.deferred import Filed, OwnGradients, own_gradient
from pipeloom.workload.model import ModelConfig, shape_of
from pipeloom.workload.model_shape import Blocks


@dataclass(frozen=True)
class Pattern:
    """Which blocks of a matrix are kept.

    Attributes:
        rows: for each row of blocks the columns of its kept blocks, ascending; equally many.
        size: of a block.
        columns: columns of blocks of the whole matrix.
    """

    rows: tuple[tuple[int, ...], ...]
    size: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return len(self.rows) * self.size, len(self.rows[0]) * self.size

    @property
    def whole(self) -> tuple[int, int]:
        """Of the matrix."""
        return len(self.rows) * self.size, self.columns * self.size

    def gathered(self, x_NI: Tensor) -> Tensor:
        """The inputs of each row of blocks, [P, N, k b]: a view of a copy."""
        blocks = x_NI.unflatten(1, (self.columns, self.size)).index_select(1, _columns(self, x_NI.device))
        return self.by_row(blocks.flatten(1))

    def output(self, x_NI: Tensor, weight: Tensor) -> Tensor:
        """The product with the transposed matrix, [N, out]."""
        y_NO = x_NI.new_empty(len(x_NI), self.whole[0])
        # Written where it belongs: a batched product of its own would have to be copied from [P, N, b].
        torch.bmm(self.gathered(x_NI), self.blocks_of(weight).transpose(1, 2), out=self.by_row(y_NO))
        return y_NO

    def input_gradient(self, gradient_NO: Tensor, weight: Tensor) -> Tensor:
        """The product with the matrix, [N, in]."""
        number = len(gradient_NO)
        chosen = gradient_NO.new_empty(number, len(self.rows) * len(self.rows[0]), self.size)
        torch.bmm(self.by_row(gradient_NO), self.blocks_of(weight), out=self.by_row(chosen.flatten(1)))
        total = gradient_NO.new_zeros(number, self.columns, self.size)
        return total.index_add_(1, _columns(self, gradient_NO.device), chosen).flatten(1)

    def weight_gradient(self, gradient_NO: Tensor, x_NI: Tensor, total: Tensor | None) -> Tensor | None:
        """The gradient of the weight; added to ``total`` and ``None`` if that is given."""
        sides = self.by_row(gradient_NO).transpose(1, 2), self.gathered(x_NI)
        if total is None:
            return torch.bmm(*sides).view(self.shape)
        self.blocks_of(total).baddbmm_(*sides)
        return None

    def by_row(self, x: Tensor) -> Tensor:
        """[N, P c] as [P, N, c]: a view."""
        return x.unflatten(1, (len(self.rows), -1)).transpose(0, 1)

    def blocks_of(self, weight: Tensor) -> Tensor:
        """A weight by row of blocks, [P, b, k b]: a view."""
        return weight.view(len(self.rows), self.size, -1)

    def dense(self, weight: Tensor) -> Tensor:
        """The matrix, with zeros outside of the kept blocks."""
        found = weight.new_zeros(len(self.rows), self.size, self.columns, self.size)
        kept = self.blocks_of(weight).unflatten(2, (-1, self.size))
        index = _columns(self, weight.device).view(len(self.rows), 1, -1, 1).expand_as(kept)
        return found.scatter_(2, index, kept).view(self.whole)


@cache  # one for each matrix
def kept_blocks(seed: int, name: str, blocks: Blocks, inputs: int, outputs: int) -> Pattern:
    """The pattern of a matrix, drawn from a seed and the name of its module.

    Each row of blocks takes the columns that earlier rows took least often, among equal ones by chance. So numbers of
    blocks in two columns differ by at most one.

    Args:
        seed: ``model.density_seed``.
        name: in the whole model, such as ``layers.3.attention.query``.
        blocks: density and size.
        inputs: of the matrix.
        outputs: of the matrix.
    """
    numbers = random.Random(f"{seed}/{name}")  # a text is hashed, the same in every process
    columns, kept = inputs // blocks.size, blocks.kept(inputs)
    taken, rows = [0] * columns, list[tuple[int, ...]]()
    for _ in range(outputs // blocks.size):
        order = sorted((taken[column], numbers.random(), column) for column in range(columns))
        rows.append(tuple(sorted(column for _, _, column in order[:kept])))
        for column in rows[-1]:
            taken[column] += 1
    return Pattern(tuple(rows), blocks.size, columns)


def layer_patterns(config: ModelConfig, layer: int) -> dict[str, Pattern]:
    """The pattern of each matrix of a layer by its module in the layer; empty for a dense model."""
    if config.blocks is None:
        return {}
    seed, blocks = config.density_seed or 0, config.blocks
    return {
        name: kept_blocks(seed, f"layers.{layer}.{name}", blocks, inputs, outputs)
        for name, (inputs, outputs) in shape_of(config).matrices.items()
    }


def weight_patterns(config: ModelConfig) -> dict[str, Pattern]:
    """The pattern of each weight that consists of blocks, by its name in the whole model; empty for a dense model."""
    return {
        f"layers.{layer}.{name}.weight": pattern
        for layer in range(config.num_layers)
        for name, pattern in layer_patterns(config, layer).items()
    }


def consists_of_blocks(name: str, config: ModelConfig) -> bool:
    """Whether a parameter, by its name in the whole model, is the kept blocks of a matrix."""
    return config.blocks is not None and name.endswith(tuple(f".{one}.weight" for one in shape_of(config).matrices))


@cache
def _columns(pattern: Pattern, device: torch.device) -> Tensor:
    """The column of each kept block, [P k] int64."""
    return torch.tensor([column for row in pattern.rows for column in row], device=device)


class BlockSparseLinear(nn.Module, OwnGradients):
    """A linear layer with some blocks of its matrix.

    Attributes:
        weight: [out, k b].
        bias: [out]; ``None`` for none.
        pattern: of the kept blocks.
    """

    def __init__(self, pattern: Pattern, *, bias: bool) -> None:
        super().__init__()
        self.pattern = pattern
        self.weight = nn.Parameter(torch.empty(pattern.shape))
        self.bias = nn.Parameter(torch.empty(pattern.shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return block_sparse_project(x, self)[0]


def block_sparse_project(x: Tensor, *layers: BlockSparseLinear) -> Sequence[Tensor]:
    """The outputs of layers with a common input, which is kept once for all."""
    first = layers[0]
    patterns = tuple(layer.pattern for layer in layers)
    way = first.way if first.has_own else "return"
    biases = [layer.bias for layer in layers if layer.bias is not None]
    outputs = _Products.apply(x, patterns, way, *(layer.weight for layer in layers))
    return [one + bias for one, bias in zip(outputs, biases, strict=True)] if biases else outputs


@dataclass(frozen=True)
class _FiledBlocks(Filed):
    """Operands of one weight gradient of kept blocks."""

    pattern: Pattern

    def compute(self, total: Tensor | None) -> Tensor | None:
        """As :meth:`Filed.compute`."""
        return self.pattern.weight_gradient(self.gradient.flatten(0, -2), self.taken.flatten(0, -2), total)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, x, patterns, ctx.way, *weights = args
        ctx.save_for_backward(x, *weights)
        ctx.patterns = patterns
        x_NI, each = x.flatten(0, -2), zip(weights, patterns, strict=True)
        return tuple(one.output(x_NI, weight).unflatten(0, x.shape[:-1]) for weight, one in each)

    @staticmethod
    def backward(ctx: Any, *args: Any) -> Any:
        x, *weights = ctx.saved_tensors
        each = list(zip(weights, args, ctx.patterns, strict=True))
        made = [
            own_gradient(_FiledBlocks(weight, x, given, one), ctx.way) if ctx.needs_input_grad[3 + place] else None
            for place, (weight, given, one) in enumerate(each)
        ]
        total: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for weight, given, one in each:
                found = one.input_gradient(given.flatten(0, -2), weight)
                total = found if total is None else total.add_(found)
            assert total is not None
            total = total.view(x.shape)
        return total, None, None, *made
