"""The weights of a stage under data parallelism: one flat buffer, sharded over ranks."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.workload.layout import Shard


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the master weights of a module that computes in ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class Overlap(NamedTuple):
    """The intersection of a parameter with an interval of a stage's flat buffer.

    Attributes:
        name: of the parameter.
        first: its first element, as row-major index in the parameter.
        begin: its first element, as index in the flat buffer.
        end: the index in the flat buffer behind its last element.
    """

    name: str
    first: int
    begin: int
    end: int


class FlatPart(NamedTuple):
    """Contiguous elements of a stage's flat buffer that the optimizer updates as one parameter.

    Attributes:
        parameter: the elements, flat.
        begin: index of the first one in the flat buffer.
        decays: whether they have weight decay.
    """

    parameter: nn.Parameter
    begin: int
    decays: bool


@dataclass(frozen=True)
class FlatOrder:
    """Layout of the parameters in a stage's flat buffer.

    Parameters with weight decay, which are those of two dims and more, are first, so that those of a shard are a slice.
    The parameters that every tensor-parallel rank holds whole are next to the border on both sides, so that they are a
    slice, too. Zeros pad the buffer to a multiple of the number of shards.

    Attributes:
        shapes: name -> shape, in the order of the buffer.
        num_decayed: elements with weight decay.
        replicated: range of the elements that every tensor-parallel rank holds.
        size: elements of the buffer.
    """

    shapes: dict[str, tuple[int, ...]]
    num_decayed: int
    replicated: slice
    size: int

    @classmethod
    def of(
        cls, parameters: Iterable[tuple[str, Tensor]], num_shards: int, replicated: Collection[str] = ()
    ) -> "FlatOrder":
        """The layout of named parameters, some of which are replicated over tensor-parallel ranks."""

        def place(item: tuple[str, Tensor]) -> int:
            return (1 if item[0] in replicated else 0) if item[1].ndim >= 2 else (2 if item[0] in replicated else 3)

        ordered = sorted(parameters, key=place)  # stable: the module's order in each part
        shapes = {name: tuple(tensor.shape) for name, tensor in ordered}
        sizes = [sum(tensor.numel() for name, tensor in ordered if place((name, tensor)) == part) for part in range(4)]
        # Four parts: split and decayed, replicated and decayed, replicated, split. Decayed ones end behind the second,
        # and the replicated ones are the two in the middle.
        ends = list(accumulate(sizes))
        return cls(shapes, ends[1], slice(ends[0], ends[2]), -(-ends[3] // num_shards) * num_shards)

    def num_parameters(self, *, with_replicated: bool) -> int:
        """Number of elements without padding, with or without those that every tensor-parallel rank holds."""
        total = sum(prod(shape) for shape in self.shapes.values())
        return total if with_replicated else total - (self.replicated.stop - self.replicated.start)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a buffer, in its shape."""
        sizes = [prod(shape) for shape in self.shapes.values()]
        begins = accumulate(sizes, initial=0)
        parts = zip(self.shapes.items(), begins, sizes, strict=False)
        return {name: buffer[begin : begin + size].view(shape) for (name, shape), begin, size in parts}

    def overlaps(self, begin: int, end: int) -> Iterator[Overlap]:
        """Nonempty intersections of an interval of the buffer with parameters, in the order of the buffer."""
        ends = accumulate(prod(shape) for shape in self.shapes.values())
        for (name, shape), behind in zip(self.shapes.items(), ends, strict=True):
            start = behind - prod(shape)
            low, high = max(begin, start), min(end, behind)
            if low < high:
                yield Overlap(name, low - start, low, high)


class StageWeights:
    """A stage's parameters and gradients, and this rank's shards of both.

    The module computes on views of ``whole``. The optimizer updates ``shard`` from ``gradient``; without sharding both
    are complete. With full sharding ``whole`` has memory only between ``hold`` and ``drop``; its storage stays the same
    object, since autograd holds views of it from forward to backward. ``begin`` is the index of the shard in the flat
    buffer. ``whole_bytes`` is the size of ``whole``, with or without memory.

    Where ``is_swapped``, a ``StageStore`` allocates and frees all of this.

    A module may compute in a narrower dtype than that of the master weights. Then ``whole`` has the narrow dtype;
    shards, gradients and their sums over micro-batches have the wide one, and ``shard`` is separate memory even without
    sharding.

    Args:
        module: of the stage, with initial master weights; its parameters become views.
        level: what is sharded.
        num_shards: number of ranks that share one copy.
        index: of this rank's shard.
        reduces_in_place: whether the stage has a whole gradient, in which backwards accumulate and a reduction leaves
            this rank's sum in the place of its shard; otherwise backwards accumulate in buffers, which reductions add
            to ``gradient``.
        replicated: parameters that every tensor-parallel rank holds whole.
        dtype: of compute; ``None``: that of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        level: Shard,
        num_shards: int,
        index: int,
        *,
        reduces_in_place: bool = True,
        replicated: Collection[str] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self.module = module
        self._parameters = dict(module.named_parameters())
        self._level = level
        self.order = FlatOrder.of(self._parameters.items(), num_shards, replicated)
        first = next(iter(self._parameters.values()))
        master = torch.zeros(self.order.size, dtype=first.dtype, device=first.device)
        with torch.no_grad():
            for name, view in self.order.views(master).items():
                view.copy_(self._parameters[name])
                self._parameters[name].data = view
        self.whole = master.to(dtype or first.dtype)
        self._sums: dict[str, Tensor] = {}
        self._is_mixed = self.whole is not master
        if self._is_mixed:
            self._compute_narrow()
        self.shard = master if level == "none" else master.chunk(num_shards)[index].clone()
        self.begin = 0 if level == "none" else index * self.shard.numel()
        self.whole_gradient = torch.zeros_like(master) if reduces_in_place else None
        own = slice(self.begin, self.begin + self.shard.numel())
        self.gradient = torch.zeros_like(self.shard) if self.whole_gradient is None else self.whole_gradient[own]
        self._num_decayed = self._in_shard(self.order.num_decayed)
        self.whole_bytes = self.whole.nbytes
        self.is_held = True
        self.is_swapped = False
        self.drop()

    def _compute_narrow(self) -> None:
        """Let the module compute on narrow weights, and accumulate its narrow gradients in wide sums."""
        for name, view in self.order.views(self.whole).items():
            parameter = self._parameters[name]
            parameter.data = view
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def _add(self, name: str, parameter: Tensor) -> None:
        total = self._sums.get(name)
        if total is not None:
            assert parameter.grad is not None
            total.add_(parameter.grad)
        # The narrow gradient is in the sum: if it stayed, it would be added again with the next one.
        parameter.grad = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the gathered weights, if they have memory, and of the shard in the dtype of compute."""
        whole = self.whole_bytes if self.is_held else 0
        return whole + (0 if self._is_mixed or self._level == "none" else self.shard.nbytes)

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradient: the whole one, if the stage has it, otherwise the shard's."""
        return (self.gradient if self.whole_gradient is None else self.whole_gradient).nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of the master weights, where they are wider than those of compute; part of the optimizer state."""
        return self.shard.nbytes if self._is_mixed else 0

    def hold(self) -> None:
        """Allocate the whole weights; a gather fills them."""
        # The storage and not the tensor: views that autograd saved in a forward are valid again when it is filled.
        self.whole.untyped_storage().resize_(self.whole_bytes)
        self.is_held = True

    def drop(self) -> None:
        """Free the whole weights, with full sharding."""
        if self._level == "full":
            self.whole.untyped_storage().resize_(0)
            self.is_held = False

    def refresh(self) -> None:
        """Copy updated master weights to ``whole``, where they are a separate copy and not sharded.

        Shards reach ``whole`` when they are gathered.
        """
        if self._level == "none" and self._is_mixed:
            self.whole.copy_(self.shard)

    def lend(self, name: str) -> Tensor:
        """A parameter's weights for use by another stage until the step ends; the whole weights must have memory.

        A copy if they may be freed before that, otherwise the weights themselves; without gradient.
        """
        weights = self._parameters[name].detach()
        return weights.clone() if self._level == "full" else weights

    @property
    def lends_copy(self) -> bool:
        """Whether ``lend`` returns a copy."""
        return self._level == "full"

    def add_to_gradient(self, name: str, gradient: Tensor) -> None:
        """Add a gradient that another stage computed to that of a parameter; a gradient must be open."""
        opened = self._sums.get(name) if self._is_mixed else self._parameters[name].grad
        assert opened is not None, f"no backward has begun the gradient of {name}"
        opened.add_(gradient)

    def open_gradient(self, buffer: Tensor) -> None:
        """Let backwards accumulate in a buffer, from zero."""
        buffer.zero_()
        views = self.order.views(buffer)
        if self._is_mixed:
            self._sums = views
            return
        for name, view in views.items():
            self._parameters[name].grad = view

    def close_gradient(self) -> None:
        """End the accumulation in the buffer."""
        self._sums = {}
        for parameter in self._parameters.values():
            parameter.grad = None

    def _in_shard(self, element: int) -> int:
        """An index of the buffer as index of the shard, clamped to its ends."""
        return min(max(0, element - self.begin), self.shard.numel())

    def counted_gradients(self, *, with_replicated: bool) -> list[Tensor]:
        """The shard's gradient, with or without parameters that every tensor-parallel rank holds."""
        if with_replicated:
            return [self.gradient]
        held = self.order.replicated
        return [self.gradient[: self._in_shard(held.start)], self.gradient[self._in_shard(held.stop) :]]

    @cached_property
    def parts(self) -> list[FlatPart]:
        """The optimizer's parameters, with gradients: the parts of the shard with and without weight decay."""
        cut, size = self._num_decayed, self.shard.numel()
        found = []
        for begin, end, decays in ((0, cut, True), (cut, size, False)):
            if begin < end:
                parameter = nn.Parameter(self.shard[begin:end])
                parameter.grad = self.gradient[begin:end]
                found.append(FlatPart(parameter, self.begin + begin, decays))
        return found

    def optimizer_parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The parameters of ``parts``: those with weight decay, and those without."""
        decayed = [part.parameter for part in self.parts if part.decays]
        return decayed, [part.parameter for part in self.parts if not part.decays]
