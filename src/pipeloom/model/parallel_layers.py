"""Tensor-parallel layers. With one rank they are the layers of PyTorch.

Names are Megatron's, for ``x A``: a rank of a column-parallel layer has some columns of ``A``, which are rows of
PyTorch's weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.block_sparse import BlockSparseLinear, block_sparse_project
from pipeloom.model.deferred import OwnGradients, linears, lookup
from pipeloom.model.rotary import Rotary
from pipeloom.model.tensor_parallel import TensorParallel, TensorSlice


class Split:
    """A module with split parameters.

    Attributes:
        splits: split parameters by name: the split dim, its whole size, and the first index on this rank.
    """

    splits: dict[str, tuple[int, int, int]]

    def reset_parameters(self) -> None:
        """Do nothing: ``build_stage`` initializes all parameters, and PyTorch's own code is slow on meta tensors."""

    def slice_of(self, name: str, parameter: Tensor) -> TensorSlice:
        """This rank's slice of one of the module's parameters."""
        whole, begin = list(parameter.shape), [0] * parameter.ndim
        if name in self.splits:
            dim, whole[dim], begin[dim] = self.splits[name]
        return TensorSlice(tuple(whole), tuple(begin))


class _Matrix(Split, nn.Linear):
    """A matrix [out, in] of an adapter; ``splits`` as in ``Split``."""

    def __init__(self, in_features: int, out_features: int, split: tuple[int, int, int] | None) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.splits = {} if split is None else {"weight": split}


class LowRankPair(nn.Module):
    """What an adapter adds to the output of a linear layer: ``scale x A^T B^T`` (arXiv 2106.09685, section 4.1).

    Of a column-parallel layer each rank has its outputs of ``B``, of a row-parallel one its inputs of ``A``; the other
    matrix is replicated. So it needs no exchange beside that of its layer.

    Args:
        layer: that it belongs to.
        rank: outputs of ``A``.
        scale: factor of the output.
        parallel: of the layer.
    """

    def __init__(self, layer: "Adaptable", rank: int, scale: float, parallel: TensorParallel) -> None:
        super().__init__()
        dim, whole, begin = layer.splits["weight"]
        out_features, in_features = layer.weight.shape
        self.lora_A = _Matrix(in_features, rank, (1, whole, begin) if dim == 1 else None)
        self.lora_B = _Matrix(rank, out_features, (0, whole, begin) if dim == 0 else None)
        self._scale, self._parallel, self._divides_inputs = scale, parallel, dim == 1

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]; of a row-parallel layer a partial sum."""
        first, second = self.lora_A.weight, self.lora_B.weight
        # The gradient of the replicated matrix is that of this rank's outputs, or inputs.
        if self._divides_inputs:
            second = self._parallel.shared(second)
        else:
            first = self._parallel.shared(first)
        return functional.linear(functional.linear(x, first) * self._scale, second)


class Adaptable(Split, nn.Linear, OwnGradients):
    """A linear layer that may have an adapter.

    Attributes:
        adapter: ``None`` for none.
    """

    adapter: LowRankPair | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.adapter = None

    def adapt(self, rank: int, scale: float, parallel: TensorParallel) -> None:
        """Add an adapter."""
        self.adapter = LowRankPair(self, rank, scale, parallel)

    def adapted(self, x: Tensor, output: Tensor) -> Tensor:
        """The output for an input, with that of the adapter."""
        return output if self.adapter is None else output + self.adapter(x)


class ColumnParallelLinear(Adaptable):
    """A linear layer of which each rank computes some outputs; ``out_features`` counts those of all ranks."""

    least_added = 0  # one function computes it with its neighbors, and takes no more host time for adding

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel) -> None:
        own = parallel.share(out_features)
        super().__init__(in_features, len(own), bias=bias)
        self.splits = dict.fromkeys(("weight", "bias"), (0, out_features, own.start))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        return project(input, self)[0]


def are_bare(*layers: nn.Module) -> bool:
    """Whether layers are dense matrices alone, in code that is not compiled: then one function may compute several."""
    return not torch.compiler.is_compiling() and all(
        isinstance(layer, Adaptable) and layer.adapter is None for layer in layers
    )


def project(x: Tensor, *layers: ColumnParallelLinear, turn: Rotary | None = None) -> Sequence[Tensor]:
    """The outputs of layers with a common input, which is kept once for all.

    Layers of a model with a density are ``BlockSparseLinear`` instead, all of them.

    Args:
        x: [..., in]; [B, T, in] with ``turn``.
        layers: the layers.
        turn: rotary positions of the heads of the first two outputs; ``None`` for none.

    Returns:
        [..., out] of each layer; with ``turn`` by heads, [B, T, heads, D].
    """
    first = layers[0]
    if sparse := [layer for layer in layers if isinstance(layer, BlockSparseLinear)]:
        outputs = block_sparse_project(x, *sparse)
    elif are_bare(*layers) or first.has_own:  # compiled layers that defer have no adapter
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return linears(x, [layer.weight for layer in layers], biases, way=first.way, turn=turn)
    else:
        outputs = [layer.adapted(x, functional.linear(x, layer.weight, layer.bias)) for layer in layers]
    return outputs if turn is None else turn.turn_two(outputs)


def product(x: Tensor, weight: Tensor, layer: OwnGradients) -> Tensor:
    """``x @ weight.T`` of a layer, which may compute the weight's gradient by itself."""
    return linears(x, [weight], [], way=layer.way)[0] if layer.has_own else functional.linear(x, weight)


class RowParallelLinear(Adaptable):
    """A linear layer of which each rank takes some inputs; outputs are summed over the ranks.

    ``in_features`` counts those of all ranks. Every rank has the whole bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel) -> None:
        own = parallel.share(in_features)
        super().__init__(len(own), out_features, bias=bias)
        # The bias is replicated and added after the sum; before it, it would count `size` times.
        self.splits = {"weight": (1, in_features, own.start)}
        self._parallel = parallel

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        # PyTorch's own call adds the bias inside the product.
        if self._parallel.size == 1 and not self.has_own:
            return self.adapted(input, super().forward(input))
        output = self._parallel.leave(self.adapted(input, product(input, self.weight, self)))
        return output if self.bias is None else output + self.bias


class Lookup(nn.Embedding, OwnGradients):
    """An embedding that can compute its weight gradient by itself."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        return lookup(input, self.weight, way=self.way) if self.has_own else super().forward(input)


class VocabParallelEmbedding(Split, Lookup):
    """An embedding of which each rank has the rows of some tokens; others give zeros, and ranks are summed."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, parallel: TensorParallel) -> None:
        self.own = parallel.share(num_embeddings)
        super().__init__(len(self.own), embedding_dim)
        self.splits = {"weight": (0, num_embeddings, self.own.start)}
        self._parallel = parallel

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        if self._parallel.size == 1:
            return super().forward(input)
        elsewhere = (input < self.own.start) | (input >= self.own.stop)
        # Tokens of other ranks look up row 0, since an index out of range is an error, and become zeros.
        vectors = super().forward((input - self.own.start).masked_fill(elsewhere, 0))
        return self._parallel.leave(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))
