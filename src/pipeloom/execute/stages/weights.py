"""The weights of a stage under data parallelism: one flat buffer, sharded over ranks."""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.execute.stages.flat_order import FlatOrder, nothing_whole
from pipeloom.execute.stages.frozen import FrozenWeights
from pipeloom.model.deferred import add_in_products
from pipeloom.workload.layout import Shard


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the master weights of a module that computes in ``dtype``: at least float32."""
    return torch.promote_types(dtype, torch.float32)


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
        parameter = nn.Parameter(tensor)
        parameter.grad_dtype = self.parameter.grad_dtype
        return self._replace(parameter=parameter)


class StageWeights:
    """A stage's parameters and gradients, and this rank's shards of both.

    The parameters of the module that require a gradient are trained; the others are in ``frozen``, a segment of its
    own, and in nothing else that is described here.

    The module computes on views of ``whole``. The optimizer updates ``shard`` from ``gradient``; without sharding both
    are complete. With full sharding ``whole`` has memory only between ``hold`` and ``drop``; its storage stays the same
    object, since autograd holds views of it from forward to backward. ``begin`` is the index of the shard in the flat
    buffer. ``whole_bytes`` is the size of ``whole``, with or without memory.

    Where ``is_swapped``, a ``StageStore`` allocates and frees all of this.

    A module may compute in a narrower dtype than that of the master weights. Then ``whole`` has the narrow dtype;
    shards, gradients and their sums over micro-batches have the wide one, and ``shard`` is separate memory even without
    sharding. Without ``keeps_wide`` only gradients and their sums are wide, and the optimizer updates narrow weights.

    ``outer_momentum`` is that of the shard where replicas step alone and average their weights, else ``None``. ``way``
    is what a delayed average is of.

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
        keeps_wide: whether master weights stay in the dtype of the module, where ``dtype`` is narrower.
        owns_gradient: whether there is memory for the gradient; otherwise it is lent for its update, and empty
            at other times (``lend_gradient``).
        without: names of parameters that are no part of the stage, since several stages have them.
        takes: name -> whether a parameter is among those described here; others are as if they were not there.
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
        owns_gradient: bool = True,
        keeps_wide: bool = True,
        without: Collection[str] = (),
        takes: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.module = module
        every = {name: one for name, one in module.named_parameters() if takes(name)}
        first = next(iter(every.values())).new_empty(0)  # FrozenWeights may narrow the parameter
        every = {name: one for name, one in every.items() if name not in without}
        self._parameters = {name: one for name, one in every.items() if one.requires_grad}
        still = {name: one for name, one in every.items() if not one.requires_grad}
        among, place = (num_shards, index) if level == "full" else (1, 0)
        self.frozen = FrozenWeights(still, among, place, dtype, replicated) if still else None
        self._level = level
        self.order = FlatOrder.of(self._parameters.items(), num_shards, replicated, is_whole)
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
        else:
            add_in_products(module)
        share = self.order.size // num_shards
        self.begin = 0 if level == "none" else index * share
        self._has_copy = self._is_mixed and keeps_wide
        held = master if keeps_wide else self.whole
        self.shard = held if level == "none" else held[self.begin : self.begin + share].clone()
        self._owns_gradient = owns_gradient
        self.whole_gradient = torch.zeros_like(master) if reduces_in_place and owns_gradient else None
        self._no_gradient = master.new_empty(0)
        if self.whole_gradient is None:
            self.gradient = master.new_zeros(self.shard.numel()) if owns_gradient else self._no_gradient
        else:
            self.gradient = self.whole_gradient[self.begin : self.begin + self.shard.numel()]
        self.whole_bytes = self.whole.nbytes
        self.is_held = True
        self.outer_momentum: Tensor | None = None
        self._begun = self._common = self.way = self.shard.new_empty(0)
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
    def is_sharded(self) -> bool:
        """Whether ranks share the weights, gradients or state of the stage."""
        return self._level != "none"

    @property
    def weights_bytes(self) -> int:
        """Bytes of the gathered weights, if they have memory, and of the shard in the dtype of compute."""
        whole = self.whole_bytes if self.is_held else 0
        if self.frozen is not None:
            whole += self.frozen.held_bytes
        return whole + (0 if self._has_copy or self._level == "none" else self.shard.nbytes)

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradient: the whole one, if the stage has it, otherwise the shard's."""
        return (self.gradient if self.whole_gradient is None else self.whole_gradient).nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of the master weights, where they are wider than those of compute; part of the optimizer state."""
        return self.shard.nbytes if self._has_copy else 0

    def hold(self) -> None:
        """Allocate the whole weights; a gather fills them."""
        # The storage and not the tensor: views that autograd saved in a forward are valid again when it is filled.
        self.whole.untyped_storage().resize_(self.whole_bytes)
        if self.frozen is not None:
            self.frozen.hold()
        self.is_held = True

    def drop(self) -> None:
        """Free the whole weights, with full sharding."""
        if self._level == "full":
            self.whole.untyped_storage().resize_(0)
            if self.frozen is not None:
                self.frozen.drop()
            self.is_held = False

    @property
    def gathers(self) -> list[tuple[Tensor, Tensor]]:
        """What a gather fills, and this rank's part of it: trained weights, and frozen ones if they are sharded."""
        found = [(self.whole, self.shard)] if self.order.size else []
        if self.frozen is not None and self.frozen.is_sharded:
            found.append((self.frozen.whole, self.frozen.shard))
        return found

    @property
    def resting(self) -> list[Tensor]:
        """What no step changes before its update: master weights, a separate copy of them, and frozen weights.

        Gathered weights are not among them.
        """
        found = [self.shard]
        if self._level == "none" and self._has_copy:
            found.append(self.whole)
        return found if self.frozen is None else [*found, self.frozen.shard]

    def num_parameters(self, *, with_replicated: bool) -> int:
        """Number of elements without padding, with or without those that every tensor-parallel rank holds."""
        orders = [self.order] if self.frozen is None else [self.order, self.frozen.order]
        return sum(one.num_parameters(with_replicated=with_replicated) for one in orders)

    def refresh(self) -> None:
        """Copy updated master weights to ``whole``, where they are a separate copy and not sharded.

        Shards reach ``whole`` when they are gathered.
        """
        if self._level == "none" and self._has_copy:
            self.whole.copy_(self.shard)

    def prepare_alone(self, *, delays: bool = False) -> None:
        """Take memory for steps of replicas alone: where the weights begin, and the outer momentum.

        Args:
            delays: whether averages are delayed; these are of ``way``, beside the weights that all replicas have.
        """
        self.outer_momentum, self._begun = torch.zeros_like(self.shard), torch.empty_like(self.shard)
        if delays:
            self._common, self.way = torch.empty_like(self.shard), torch.empty_like(self.shard)

    def begin_alone(self) -> None:
        """Note where updates begin that the other replicas do not see."""
        self._begun.copy_(self.shard)

    def outer_step(self, lr: float, momentum: float) -> None:
        """Step from where they began towards the mean of the replicas, which the shard has, with Nesterov momentum."""
        self.shard.neg_().add_(self._begun)  # the outer gradient, in the memory of the weights
        self._outer_step(self._begun, self.shard, lr, momentum)
        self.shard.copy_(self._begun)

    def _outer_step(self, weights: Tensor, gradient: Tensor, lr: float, momentum: float) -> None:
        """Update weights by an outer gradient, which is overwritten."""
        assert self.outer_momentum is not None
        self.outer_momentum.mul_(momentum).add_(gradient)
        gradient.add_(self.outer_momentum, alpha=momentum)
        weights.sub_(gradient, alpha=lr)

    def note_common(self) -> None:
        """Note the weights as those that all replicas have."""
        self._common.copy_(self.shard)

    def delayed_step(self, lr: float, momentum: float) -> None:
        """The outer step of the weights that all replicas have, by the mean of their ways, which ``way`` has."""
        self._outer_step(self._common, self.way, lr, momentum)

    def leave_common(self) -> None:
        """Set ``way`` to the way of the updates since ``begin_alone``, and the weights to the end of that way.

        It begins at the weights that all replicas have, so what these moved meanwhile is not lost.
        """
        torch.sub(self._begun, self.shard, out=self.way)
        torch.sub(self._common, self.way, out=self.shard)

    def take_common(self, *, keeps: bool = False) -> None:
        """Set the weights to those that all replicas have.

        Args:
            keeps: whether ``take_own`` brings back the weights of this replica.
        """
        if keeps:
            self._begun.copy_(self.shard)
        self.shard.copy_(self._common)

    def take_own(self) -> None:
        """Set the weights to those of this replica before ``take_common``."""
        self.shard.copy_(self._begun)

    def lend(self, name: str) -> Tensor:
        """A parameter's weights for use by another stage until the step ends; the whole weights must have memory.

        A copy if they may be freed before that, otherwise the weights themselves; without gradient.
        """
        weights = self.module.get_parameter(name).detach()
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

    def open_gradient(self, buffer: Tensor, *, begins: bool = True) -> None:
        """Let backwards accumulate in a buffer, from zero if it begins."""
        if begins:
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

    def lend_gradient(self, buffer: Tensor) -> None:
        """Take the gradient of the shard from a buffer with the whole one, until ``forget_gradient``."""
        self.gradient = buffer[self.begin : self.begin + self.shard.numel()]
        self._show_gradient(self.parts)

    def forget_gradient(self) -> None:
        """End ``lend_gradient``."""
        self.gradient = self._no_gradient
        for part in self.parts:
            part.parameter.grad = None

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
            # Gradients are sums over micro-batches and ranks, and stay wide where weights do not.
            parameter.grad_dtype = self.gradient.dtype
            found.append(FlatPart(parameter, begin, decays, None if whole is None else whole.name))
        if self._owns_gradient:
            self._show_gradient(found)
        return found

    def _show_gradient(self, parts: Sequence[FlatPart]) -> None:
        """Set the gradients of the optimizer's parameters to views of the shard's."""
        for part in parts:
            begin, shape = part.begin - self.begin, part.parameter.shape
            part.parameter.grad = self.gradient[begin : begin + shape.numel()].view(shape)
