"""Layers whose parameters are split over tensor-parallel ranks. With one rank they are the layers of PyTorch.

Names are Megatron's, of a matrix that is multiplied from the right (``x A``): a column-parallel layer has some columns
of ``A``, which are rows of PyTorch's weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeloom.model.deferred import Defers, linears, lookup
from pipeloom.model.tensor_parallel import TensorParallel, TensorSlice


class Split:
    """A module some of whose parameters are split.

    Attributes:
        splits: for each of these, by name: the dim, its whole size, and the first index here.
    """

    splits: dict[str, tuple[int, int, int]]

    def reset_parameters(self) -> None:
        """Nothing: ``build_stage`` draws all values by name, and PyTorch's own draws take seconds on meta tensors."""

    def slice_of(self, name: str, parameter: Tensor) -> TensorSlice:
        """Where one of the module's parameters lies in the whole one."""
        whole, begin = list(parameter.shape), [0] * parameter.ndim
        if name in self.splits:
            dim, whole[dim], begin[dim] = self.splits[name]
        return TensorSlice(tuple(whole), tuple(begin))


class ColumnParallelLinear(Split, nn.Linear, Defers):
    """A linear layer whose rank computes some of the outputs, of which ``out_features`` are all ranks'."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel) -> None:
        own = parallel.share(out_features)
        super().__init__(in_features, len(own), bias=bias)
        self.splits = dict.fromkeys(("weight", "bias"), (0, out_features, own.start))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        return project(input, self)[0]


def project(x: Tensor, *layers: ColumnParallelLinear) -> Sequence[Tensor]:
    """The outputs of layers that take the same input, which a backward that defers then keeps once for all."""
    first = layers[0]
    if first.defers and torch.is_grad_enabled():
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return linears(x, [layer.weight for layer in layers], biases)
    return [functional.linear(x, layer.weight, layer.bias) for layer in layers]


def product(x: Tensor, weight: Tensor, *, defers: bool) -> Tensor:
    """``x @ weight.T``; whether the gradient of the weight is for later."""
    if defers and torch.is_grad_enabled():
        return linears(x, [weight], [])[0]
    return functional.linear(x, weight)


class RowParallelLinear(Split, nn.Linear, Defers):
    """A linear layer whose rank has some of the inputs; outputs are summed over the ranks.

    ``in_features`` are those of all ranks. Every rank has the whole bias.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, parallel: TensorParallel) -> None:
        own = parallel.share(in_features)
        super().__init__(len(own), out_features, bias=bias)
        # The bias is not split: it is added once, after the sum. Each rank
        # adding it before would count it `size` times.
        self.splits = {"weight": (1, in_features, own.start)}
        self._parallel = parallel

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        # PyTorch's own call adds the bias inside the product.
        if self._parallel.size == 1 and not self.defers:
            return super().forward(input)
        output = self._parallel.leave(product(input, self.weight, defers=self.defers))
        return output if self.bias is None else output + self.bias


class Lookup(nn.Embedding, Defers):
    """An embedding, some rows of which are looked up."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        return lookup(input, self.weight) if self.defers and torch.is_grad_enabled() else super().forward(input)


class VocabParallelEmbedding(Split, Lookup):
    """An embedding whose rank has the rows of some tokens; the others are zero before the sum over the ranks."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, parallel: TensorParallel) -> None:
        self.own = parallel.share(num_embeddings)
        super().__init__(len(self.own), embedding_dim)
        self.splits = {"weight": (0, num_embeddings, self.own.start)}
        self._parallel = parallel

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102
        if self._parallel.size == 1:
            return super().forward(input)
        elsewhere = (input < self.own.start) | (input >= self.own.stop)
        # Row 0 stands in for tokens of other ranks, since an index out of range is an error; its vectors become zeros.
        vectors = super().forward((input - self.own.start).masked_fill(elsewhere, 0))
        return self._parallel.leave(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))
