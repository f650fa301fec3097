"""Implements UNSHARD, RESHARD and REDUCE_GRAD: sharded weights of stages, gradient buffers, collectives."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pipeloom.errors import UserError
from pipeloom.execute.communication.collectives import Group, Groups, Job
from pipeloom.execute.communication.under_way import UnderWay, finish
from pipeloom.execute.lanes import Lane
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.flat_order import nothing_whole
from pipeloom.execute.stages.shared import SharedWeights, own_shared
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import FlatPart, StageWeights
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, COLLECTIVE_KINDS
from pipeloom.schedule.stage_swaps import Content, gradient_rooms
from pipeloom.workload.layout import Shard


class GradientBuffers:
    """Buffers for whole gradients.

    Args:
        count: buffers.
        size: elements of each.
        like: a tensor of their dtype and device.
        reuses: whether a buffer can be used again in the same step, in the order in which buffers are freed. Reductions
            end in row order, so that is the buffer whose reduction the backward waits for by the dependency relation.
            Without such waits a freed buffer is not used before the next step.
    """

    def __init__(self, count: int, size: int, like: Tensor, *, reuses: bool) -> None:
        self._count = count
        self._size = size
        self._like = like
        self._reuses = reuses
        self.forget()

    def begin(self) -> None:
        """Before a step; no reduction may be in progress."""
        self._free.extend(self._resting)
        self._resting.clear()

    def forget(self) -> None:
        """Replace all buffers: collectives of a failed step may still write to the old ones."""
        # All together, so that their number does not depend on when reductions end.
        self._free = deque(self._like.new_empty(self._size) for _ in range(self._count))
        self._resting: deque[Tensor] = deque()

    @property
    def num_taken(self) -> int:
        """Number of buffers in use."""
        return self._count - len(self._free) - len(self._resting)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._count * self._size * self._like.element_size()

    def take(self) -> Tensor:
        """A free buffer, uninitialized."""
        assert self._free, "no gradient buffer is free: the schedule did not wait for its reduction"
        return self._free.popleft()

    def give_back(self, buffer: Tensor) -> None:
        """Free a buffer; the lane's thread calls it."""
        (self._free if self._reuses else self._resting).append(buffer)


class DataParallel(Part):
    """Shards the stages of one rank over its data-parallel group, and runs the group's collectives.

    Args:
        schedule: that trains; contains the reductions and the number of gradient buffers.
        modules: this rank's stages by index, with initial weights; emptied one by one.
        level: what is sharded.
        groups: process groups of the rank.
        lane: runs the collectives.
        replicated: returns the names of a stage's parameters that every tensor-parallel rank holds whole.
        sums_replicated: whether a rank's gradients of these come from its own tokens only (sequence parallelism), so
            that a reduction first sums them over the tensor-parallel ranks.
        dtype: in which the stages compute, where it is narrower than that of the modules, which the optimizer updates.
        store: holds the stages where they are swapped; ``None`` without swaps.
        is_whole: (name, shape) -> whether the optimizer updates a parameter as a whole.
        shared: first layer of each set of weights that several stages share, and this rank has -> ranks of the set.

    Attributes:
        weights: of each stage of the rank.
        shared: sets of weights that several stages share.
        counts_alone: whether each replica counts its own gradients, which are not reduced.
        num_stages: of the model.
    """

    kinds = COLLECTIVE_KINDS

    def __init__(
        self,
        schedule: Schedule,
        modules: Iterable[tuple[int, nn.Module]],
        level: Shard,
        groups: Groups,
        lane: Lane,
        *,
        replicated: Callable[[nn.Module], Collection[str]] = lambda _: (),
        sums_replicated: bool = False,
        dtype: torch.dtype | None = None,
        store: StageStore | None = None,
        is_whole: Callable[[str, tuple[int, ...]], bool] = nothing_whole,
        keeps_wide: bool = True,
        shared: Mapping[int, Group] | None = None,
    ) -> None:
        self._store = store
        self._groups, self.counts_alone = groups, False
        self.num_stages = schedule.num_stages
        self._sums_replicated = sums_replicated
        self._lane = lane
        reduced = [action.stage for _, _, action in schedule.actions() if action.kind is Kind.REDUCE_GRAD]
        # Swapped stages have their gradients in the store.
        self._rooms = {} if store is not None else _rooms_of(schedule)
        self.weights: dict[int, StageWeights] = {}
        sets, ranks_of = dict[int, nn.Module](), shared or {}
        for index, module in modules:
            without = own_shared(module, sets, ranks_of)
            self.weights[index] = StageWeights(
                module,
                level,
                groups.shard.size,
                groups.shard.index,
                # With fewer buffers than stages, stages share them.
                reduces_in_place=reduced.count(index) <= 1 and (level == "none" or schedule.gradient_buffers is None),
                replicated=replicated(module),
                dtype=dtype,
                is_whole=is_whole,
                owns_gradient=index not in self._rooms,
                keeps_wide=keeps_wide,
                without=without,
            )
            if store is not None:
                store.adopt(index, self.weights[index])
        self.shared = tuple(
            SharedWeights(owner, layer, ranks_of[owner], dtype=dtype, is_whole=is_whole)
            for owner, layer in sorted(sets.items())
        )
        if self._rooms:
            _refuse_parts_of_sums(Counter(reduced))
            self._buffers = _pools(self.weights, self._rooms)
        else:
            self._buffers = _buffers(self.weights, schedule.gradient_buffers, Counter(reduced))
        self._gathered: set[int] = set()
        self._open: dict[int, Tensor] = {}
        self._summed: dict[int, Tensor] = {}  # reduced in their buffers, until the update
        self._most_held = Held()
        self._start_of = {Kind.UNSHARD: self.unshard, Kind.RESHARD: self.reshard, Kind.REDUCE_GRAD: self.reduce}

    def counted_gradients(self, stage: int | None = None) -> list[Tensor]:
        """This rank's part of the gradients; over all ranks every element is included once.

        Args:
            stage: whose; ``None`` for all. Empty for a stage of another rank.
        """
        if self._groups.copies.index > 0 and not self.counts_alone:
            return []
        is_first = self._groups.tensor.index == 0
        weights = [one for index, one in self.weights.items() if stage in (None, index)]
        shared = [one.gradient for one in self.shared if stage is None and one.is_first]
        return shared + [g for one in weights for g in one.counted_gradients(with_replicated=is_first)]

    @property
    def copy_share(self) -> tuple[int, int]:
        """Index of this rank among those that hold the same shards, and their number."""
        return self._groups.copies.index, self._groups.copies.size

    @property
    def replica_share(self) -> tuple[int, int]:
        """Index of this rank among those that hold the same stages, and their number."""
        copies, shards = self._groups.copies, self._groups.shard
        return copies.index * shards.size + shards.index, copies.size * shards.size

    @property
    def parts(self) -> list[FlatPart]:
        """What this rank's optimizer updates, with gradients."""
        return [part for weights, _ in self.all_weights for part in weights.parts]

    @property
    def all_weights(self) -> list[tuple[StageWeights, Group | None]]:
        """Those of the stages, and those that stages share, with the ranks that have them."""
        own = [(one, None) for one in self.weights.values()]
        return [*own, *((one.weights, one.group) for one in self.shared)]

    def refresh(self) -> None:
        """Copy updated or loaded master weights to the weights that compute uses."""
        for weights, _ in self.all_weights:
            weights.refresh()

    def bind(self, row: RankRow) -> None:
        """Add a hook before each backward that provides a gradient buffer."""
        # Before every backward, though most have one: a stage that is reduced early
        # needs a second buffer in the same step.
        for slot in row.slots_of(*ADDS_TO_GRADIENT):
            row.before[slot].append(partial(self.before_backward, row.actions[slot].stage))

    def begin(self, row: RankRow) -> Sequence[Service]:
        """Before a step: no gradients."""
        self.reset(trains=row.schedule.first_backward_stage < row.schedule.num_stages)
        return ()

    def reset(self, *, trains: bool) -> None:
        """Free the gradients of the step before, if backwards follow."""
        self._close_all()
        for one in self.shared:
            one.begin(trains=trains)
        for buffers in self._buffers.values():
            buffers.begin()
        self._most_held = Held()
        if trains:
            for weights in self.weights.values():
                # A whole gradient begins with zeros at its first backward, as that of a swapped stage does.
                if weights.whole_gradient is None and not weights.is_swapped:
                    weights.gradient.zero_()
        self._count()  # a rank without gathers and backwards has weights, too

    def start(self, row: RankRow, slot: int) -> UnderWay:
        """Start the collective."""
        action = row.actions[slot]
        return self._start_of[action.kind](action.stage)

    def other_end(self, row: RankRow, slot: int) -> str:  # noqa: ARG002
        """The ranks of a collective, as text."""
        return "its data-parallel ranks"

    def held(self) -> Held:
        """Peaks of weights and gradients."""
        return self._most_held

    def unshard(self, stage: int) -> UnderWay:
        """Start gathering a stage's weights from its shards."""
        weights = self.weights[stage]
        weights.hold()
        self._gathered.add(stage)
        self._count()
        return self._lane.start(self._gather(weights.gathers))

    def _gather(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Job:
        for whole, shard in pairs:
            sent = shard.to(whole.dtype)  # weights are gathered in the dtype of compute
            yield self._groups.shard.gather(whole, sent)

    def reshard(self, stage: int) -> UnderWay:
        """Free a stage's gathered weights at once; the lane records the action in row order."""
        self.weights[stage].drop()
        self._gathered.discard(stage)
        return self._lane.start(iter(()))

    def before_backward(self, stage: int) -> None:
        """Provide a gradient buffer, if the stage has none."""
        if stage in self._open:
            return
        weights = self.weights[stage]
        buffer = self._buffers[stage].take() if weights.whole_gradient is None else weights.whole_gradient
        self._open[stage] = buffer
        weights.open_gradient(buffer[: weights.order.size])
        self._count()

    def reduce(self, stage: int) -> UnderWay:
        """Start reducing the gradient that backwards have accumulated since the last reduction."""
        weights, buffer = self.weights[stage], self._open.pop(stage)
        weights.close_gradient()
        buffers = self._buffers.get(stage)
        if stage in self._rooms:  # the update frees the buffer
            self._summed[stage], buffers = buffer, None
        return self._lane.start(self._reduction(weights, buffer, buffers))

    @contextmanager
    def complete_gradient(self, stage: int) -> Iterator[StageWeights]:
        """Context in which a stage has its gradient, which is complete, for its update within the step.

        Its buffer is free afterwards.
        """
        weights = self.weights[stage]
        buffer = self._summed.pop(stage, None)
        if buffer is None:
            buffer = self._open.pop(stage)
            weights.close_gradient()
        weights.lend_gradient(buffer)
        yield weights
        weights.forget_gradient()
        self._buffers[stage].give_back(buffer)

    def _reduction(self, weights: StageWeights, buffer: Tensor, buffers: GradientBuffers | None) -> Job:
        if not weights.order.size:  # backwards pass through a stage that trains nothing itself
            if buffers is not None:
                buffers.give_back(buffer)
            return
        if self._sums_replicated:
            for replicated in weights.order.replicated:
                yield self._groups.tensor.all_reduce(buffer[replicated])
        # In place, which NCCL takes and Megatron-LM does too: a second tensor would add a share of all gradients.
        part = buffer[weights.begin : weights.begin + weights.shard.numel()]
        if self._groups.shard.size > 1:
            yield self._groups.shard.reduce_scatter(part, buffer[: weights.order.size])
        yield self._groups.copies.all_reduce(part)
        if buffers is not None:
            weights.gradient.add_(part)
            buffers.give_back(buffer)

    def sum_shared(self, timeout_s: float, *, is_again: bool = False) -> None:
        """Sum the gradients of weights that stages share over the ranks that have them, after a row. Collective.

        Args:
            timeout_s: longest wait for other ranks.
            is_again: whether to sum also what is summed, to time it.

        Raises:
            PeerLostError: another rank ended.
            StallError: it took longer than ``timeout_s``.
        """
        # One after the other, and by the first layer: ranks with several sets take them in the same order.
        for one in self.shared:
            if one.is_pending or is_again:
                finish(self._lane.start(one.reduction()), timeout_s)

    def average(self, timeout_s: float, *, is_rehearsal: bool = False) -> None:
        """Replace the weights by their means over the replicas. Collective; errors as of ``sum_shared``.

        Args:
            timeout_s: longest wait for other replicas.
            is_rehearsal: whether to do so with zeros in place of the weights.
        """
        for weights in self.weights.values():
            tensor = torch.zeros_like(weights.shard) if is_rehearsal else weights.shard
            if tensor.numel():
                finish(self._lane.start(self._mean(tensor)), timeout_s)

    def _mean(self, tensor: Tensor) -> Job:
        yield self._groups.copies.all_reduce(tensor)
        tensor /= self._groups.copies.size

    def gather_gradient(self, stage: int, timeout_s: float) -> dict[str, Tensor]:
        """A stage's whole gradient by parameter name, after a step. All ranks of the group must call it in turn.

        Raises:
            PeerLostError: another rank ended.
            StallError: it took longer than ``timeout_s``.
        """
        weights = self.weights[stage]
        whole = torch.empty(weights.order.size, dtype=weights.gradient.dtype, device=weights.gradient.device)
        pairs = [(whole, weights.gradient)] if weights.order.size else []
        finish(self._lane.start(self._gather(pairs)), timeout_s)
        return weights.order.views(whole)

    @contextmanager
    def gathered(self, stage: int, timeout_s: float) -> Iterator[None]:
        """Context with a stage's whole weights, outside a step. All ranks of the group must enter it."""
        if self._store is not None:
            with self._store.visit(stage, Content.WEIGHTS):
                yield
            return
        if self.weights[stage].is_held:
            yield
            return
        finish(self.unshard(stage), timeout_s)
        yield
        self.reshard(stage)

    def forget(self) -> None:
        """Clear the state of a failed step."""
        self._close_all()
        for buffers in self._buffers.values():
            buffers.forget()

    def _close_all(self) -> None:
        for stage in self._open:
            self.weights[stage].close_gradient()
        for one in self.shared:
            one.close()
        for stage, buffer in (self._open | self._summed).items():
            if stage in self._rooms:
                self._buffers[stage].give_back(buffer)
        self._open.clear()
        self._summed.clear()

    def _count(self) -> None:
        """Update the peaks."""
        # Stages may share their buffers, which must count once.
        buffers = {id(one): one for one in self._buffers.values()}.values()
        weights = [one for one, _ in self.all_weights]
        now = Held(
            gathered=len(self._gathered),
            weights_bytes=sum(one.weights_bytes for one in weights),
            gradients=sum(one.num_taken for one in buffers)
            + sum(self.weights[stage].whole_gradient is not None for stage in self._open),
            gradients_bytes=sum(one.nbytes for one in buffers) + sum(one.gradients_bytes for one in weights),
        )
        self._most_held = self._most_held.most(now)


def _rooms_of(schedule: Schedule) -> dict[int, int]:
    """Stage -> number of its gradient's buffer on its rank (``gradient_rooms``), of all ranks."""
    return {stage: room for row in schedule.rows for stage, room in (gradient_rooms(row) or {}).items()}


def _refuse_parts_of_sums(num_reductions: Mapping[int, int]) -> None:
    """Check that stages which are updated within the step are reduced once: there is no memory for parts of sums."""
    found = [stage for stage, number in num_reductions.items() if number > 1]
    if found:
        raise UserError(f"stage {found[0]} is reduced more than once before its update; reduce it once")


def _pools(weights: Mapping[int, StageWeights], rooms: Mapping[int, int]) -> dict[int, GradientBuffers]:
    """For each stage the pool of its room, which has one buffer of the size of its largest stage."""
    sizes: dict[int, int] = {}
    own = [(rooms[index], one) for index, one in weights.items() if index in rooms]
    for number, one in own:
        sizes[number] = max(sizes.get(number, 0), one.order.size)
    like = {number: one.gradient for number, one in own}
    pools = {number: GradientBuffers(1, size, like[number], reuses=True) for number, size in sizes.items()}
    return {index: pools[rooms[index]] for index in weights if index in rooms}


def _buffers(
    weights: Mapping[int, StageWeights], count: int | None, num_reductions: Mapping[int, int]
) -> dict[int, GradientBuffers]:
    """For each stage without a gradient of its own the pool of its buffers: one for all stages, or one for each."""
    if count is None:
        return {
            stage: GradientBuffers(max(1, num_reductions[stage]), one.order.size, one.gradient, reuses=False)
            for stage, one in weights.items()
            if one.whole_gradient is None
        }
    largest = max(weights.values(), key=lambda one: one.order.size)
    # With as many buffers as stages no stage is reduced early.
    shared = GradientBuffers(min(count, len(weights)), largest.order.size, largest.gradient, reuses=True)
    return {stage: shared for stage, one in weights.items() if one.whole_gradient is None}
