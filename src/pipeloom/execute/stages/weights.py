"""The weights of a stage under data parallelism: one flat buffer, sharded over ranks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
    """Elements of a shard that the optimizer updates as one parameter.

    Attributes:
        parameter: a flat interval of the shard, or a whole parameter in its shape.
        begin: index of the first element in the flat buffer.
        decays: whether they have weight decay.
        name: of a parameter that is updated as a whole; ``None`` for an interval.
    """

    parameter: nn.Parameter
    begin: int
    decays: bool
    name: str | None = None

    def with_tensor(self, tensor: Tensor) -> "FlatPart":
        """The same part with other memory of the same shape."""
        return self._replace(parameter=nn.Parameter(tensor))


class Place(NamedTuple):
    """A parameter's place in a stage's flat buffer.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        begin: index of its first element in the buffer.
        decays: whether it has weight decay.
        is_replicated: whether every tensor-parallel rank holds it whole.
        is_whole: whether it lies in one shard, and is updated as a whole.
    """

    name: str
    shape: tuple[int, ...]
    begin: int
    decays: bool
    is_replicated: bool
    is_whole: bool

    @property
    def size(self) -> int:
        """Its number of elements."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """The index in the buffer behind its last element."""
        return self.begin + self.size


class Unit(NamedTuple):
    """Elements of a flat buffer that the optimizer updates as one parameter.

    Attributes:
        begin: index of the first one.
        end: index behind the last one.
        decays: whether they have weight decay.
        whole: the parameter that they are, if it is updated as a whole.
    """

    begin: int
    end: int
    decays: bool
    whole: Place | None


def nothing_whole(name: str, shape: tuple[int, ...]) -> bool:  # noqa: ARG001
    """Let shards be cut at any element."""
    return False


@dataclass(frozen=True)
class FlatOrder:
    """Layout of the parameters in a stage's flat buffer.

    Parameters with weight decay, which are those of two dims and more, are first, so that those of a shard are a slice.
    The parameters that every tensor-parallel rank holds whole are next to the border on both sides, so that they are a
    slice, too. Zeros pad the buffer to a multiple of the number of shards.

    Where some parameters must be whole in a shard, they follow all others, each in the shard that has most room, and
    zeros pad every shard to the size of the fullest one.

    Attributes:
        places: of the parameters, in the order of the buffer.
        size: elements of the buffer.
    """

    places: tuple[Place, ...]
    size: int

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Tensor]],
        num_shards: int,
        replicated: Collection[str] = (),
        is_whole: Callable[[str, tuple[int, ...]], bool] = nothing_whole,
    ) -> "FlatOrder":
        """The layout of named parameters.

        Args:
            parameters: name and tensor of each.
            num_shards: equal parts of the buffer, each held by one rank.
            replicated: names of those that every tensor-parallel rank holds whole.
            is_whole: (name, shape) -> whether no shard may hold a part of it only.
        """

        def part(place: Place) -> int:
            # Split and decayed, replicated and decayed, replicated, split.
            return int(place.is_replicated) if place.decays else 3 - int(place.is_replicated)

        found: list[Place] = []
        for name, tensor in parameters:
            shape = tuple(tensor.shape)
            found.append(Place(name, shape, 0, tensor.ndim >= 2, name in replicated, is_whole(name, shape)))
        found.sort(key=part)  # stable: the module's order in each part
        cut, whole = ([place for place in found if place.is_whole is is_one] for is_one in (False, True))
        *begins, before = accumulate((place.size for place in cut), initial=0)
        share, offsets = _pack([place.size for place in whole], before, num_shards)
        placed = zip((*cut, *whole), (*begins, *offsets), strict=True)
        places = sorted((place._replace(begin=begin) for place, begin in placed), key=lambda place: place.begin)
        return cls(tuple(places), share * num_shards)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape, in the order of the buffer."""
        return {place.name: place.shape for place in self.places}

    @cached_property
    def replicated(self) -> tuple[slice, ...]:
        """Ranges of the elements that every tensor-parallel rank holds."""
        runs: list[slice] = []
        for place in self.places:
            if place.is_replicated:
                joins = runs and runs[-1].stop == place.begin
                begin = runs.pop().start if joins else place.begin
                runs.append(slice(begin, place.end))
        return tuple(runs)

    def num_parameters(self, *, with_replicated: bool) -> int:
        """Number of elements without padding, with or without those that every tensor-parallel rank holds."""
        return sum(place.size for place in self.places if with_replicated or not place.is_replicated)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of a buffer, in its shape."""
        return {place.name: buffer[place.begin : place.end].view(place.shape) for place in self.places}

    def overlaps(self, begin: int, end: int) -> Iterator[Overlap]:
        """Nonempty intersections of an interval of the buffer with parameters, in the order of the buffer."""
        for place in self.places:
            low, high = max(begin, place.begin), min(end, place.end)
            if low < high:
                yield Overlap(place.name, low - place.begin, low, high)

    def units(self, begin: int, end: int) -> list[Unit]:
        """Cut an interval of the buffer, a shard, into what the optimizer updates as one parameter.

        Neighbors with equal weight decay are one, but for those that are updated as a whole. Padding has no decay.
        """
        found: list[Unit] = []

        def add(low: int, high: int, place: Place | None) -> None:
            whole, decays = place if place is not None and place.is_whole else None, place is not None and place.decays
            last = found[-1] if found else None
            if last is not None and whole is last.whole is None and decays == last.decays:
                low = found.pop().begin
            if low < high:
                found.append(Unit(low, high, decays, whole))

        at = begin
        for place in self.places:
            low, high = max(begin, place.begin), min(end, place.end)
            if low < high:
                add(at, low, None)
                add(low, high, place)
                at = high
        add(at, end, None)
        return found


def _pack(sizes: Sequence[int], before: int, num_shards: int) -> tuple[int, list[int]]:
    """Place parameters in shards, none of them in two.

    The largest first, each in the emptiest shard (Graham 1969).

    Args:
        sizes: elements of each parameter.
        before: elements at the begin of the buffer, which may be cut anywhere.
        num_shards: number of equal shards.

    Returns:
        Elements of a shard, and where each parameter begins.
    """
    share = -(-(before + sum(sizes)) // num_shards)
    while True:
        used = [min(share, max(0, before - share * shard)) for shard in range(num_shards)]
        begins = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            shard = min(range(num_shards), key=used.__getitem__)
            begins[index] = share * shard + used[shard]
            used[shard] += sizes[index]
        if max(used) <= share:
            return share, begins
        share = max(used)


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
        is_whole: (name, shape) -> whether the optimizer updates a parameter as a whole, so that one shard has it.
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
        is_whole: Callable[[str, tuple[int, ...]], bool] = nothing_whole,
    ) -> None:
        self.module = module
        self._parameters = dict(module.named_parameters())
        self._level = level
        self.order = FlatOrder.of(self._parameters.items(), num_shards, replicated, is_whole)
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
        borders = [0, *(self._in_shard(end) for one in self.order.replicated for end in (one.start, one.stop))]
        borders.append(self.shard.numel())
        return [self.gradient[begin:end] for begin, end in zip(borders[::2], borders[1::2], strict=True)]

    @cached_property
    def parts(self) -> list[FlatPart]:
        """The optimizer's parameters, with gradients: whole ones, and intervals with and without weight decay."""
        found = []
        for begin, end, decays, whole in self.order.units(self.begin, self.begin + self.shard.numel()):
            own = slice(begin - self.begin, end - self.begin)
            shape = (end - begin,) if whole is None else whole.shape
            parameter = nn.Parameter(self.shard[own].view(shape))
            parameter.grad = self.gradient[own].view(shape)
            found.append(FlatPart(parameter, begin, decays, None if whole is None else whole.name))
        return found
