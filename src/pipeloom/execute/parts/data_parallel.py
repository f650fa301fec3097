"""Implements UNSHARD, RESHARD and REDUCE_GRAD: sharded weights of stages, gradient buffers, collectives."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.execute.communication.group import Alone, Group, Groups, Job
from pipeloom.execute.communication.under_way import UnderWay, finish
from pipeloom.execute.lanes import Lane
from pipeloom.execute.parts.part import Held, Part, RankRow, Service
from pipeloom.execute.stages.flat_order import nothing_whole
from pipeloom.execute.stages.gradient_buffers import (
    GradientBuffers,
    buffers_of,
    pools,
    refuse_parts_of_sums,
    rooms_of,
)
from pipeloom.execute.stages.shared import SharedWeights, own_shared
from pipeloom.execute.stages.stage_store import StageStore
from pipeloom.execute.stages.weights import FlatPart, StageWeights
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.kinds import ADDS_TO_GRADIENT, COLLECTIVE_KINDS
from pipeloom.schedule.stage_swaps import Content
from pipeloom.workload.layout import Shard


@dataclass(frozen=True)
class Share:
    """Which parameters of a stage some of its replicas hold, and how.

    Attributes:
        takes: name -> whether a parameter is one of them.
        level: what is sharded.
        groups: of the ranks that hold the same ones.
        is_alone: whether this rank is the only one, so that there is nothing to reduce.
    """

    takes: Callable[[str], bool]
    level: Shard
    groups: Groups
    is_alone: bool


class Segment(NamedTuple):
    """Parameters of a stage that the same ranks hold.

    Attributes:
        weights: the parameters.
        groups: of these ranks.
    """

    weights: StageWeights
    groups: Groups

    @property
    def copy_share(self) -> tuple[int, int]:
        """Index of this rank among those that hold the same shards, and their number."""
        return self.groups.copies.index, self.groups.copies.size

    @property
    def replica_share(self) -> tuple[int, int]:
        """Index of this rank among those that hold the same parameters, and their number."""
        copies, shards = self.groups.copies, self.groups.shard
        return copies.index * shards.size + shards.index, copies.size * shards.size


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
        experts: those parameters that only some replicas have; ``None`` if all have the same ones.

    Attributes:
        weights: of each stage of the rank, but for those of ``experts``.
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
        experts: Share | None = None,
    ) -> None:
        self._store = store
        self._groups, self.counts_alone = groups, False
        self.num_stages = schedule.num_stages
        self._sums_replicated = sums_replicated
        self._lane = lane
        reduced = Counter(action.stage for _, _, action in schedule.actions() if action.kind is Kind.REDUCE_GRAD)
        # Swapped stages have their gradients in the store.
        self._rooms = {} if store is not None else rooms_of(schedule)
        sets, ranks_of = dict[int, nn.Module](), shared or {}
        self._segments: dict[int, list[Segment]] = {}
        for index, module in modules:
            without = own_shared(module, sets, ranks_of)
            self._segments[index] = [
                _segment(
                    module,
                    share,
                    # With fewer buffers than stages, stages share them. What no other rank holds is never reduced.
                    reduces_in_place=share.is_alone
                    or (reduced[index] <= 1 and (share.level == "none" or schedule.gradient_buffers is None)),
                    replicated=replicated(module),
                    dtype=dtype,
                    is_whole=is_whole,
                    owns_gradient=index not in self._rooms,
                    keeps_wide=keeps_wide,
                    without=without,
                )
                for share in _shares(module, Share(lambda _: True, level, groups, is_alone=False), experts)
            ]
            if store is not None:  # of a stage in segments the experts, which no other rank has
                store.adopt(index, self._segments[index][-1].weights)
        self.shared = tuple(
            SharedWeights(owner, layer, ranks_of[owner], dtype=dtype, is_whole=is_whole)
            for owner, layer in sorted(sets.items())
        )
        self.weights = {index: own[0].weights for index, own in self._segments.items()}
        self._buffers = self._make_buffers(schedule.gradient_buffers, reduced)
        self._gathered: set[int] = set()
        self._open: dict[StageWeights, Tensor] = {}
        self._begun: set[StageWeights] = set()  # whose gradient in this step is not from zero any more
        self._summed: dict[int, Tensor] = {}  # reduced in their buffers, until the update
        self._most_held = Held()
        self._start_of = {Kind.UNSHARD: self.unshard, Kind.RESHARD: self.reshard, Kind.REDUCE_GRAD: self.reduce}

    def _make_buffers(
        self, count: int | None, num_reductions: Mapping[int, int]
    ) -> dict[StageWeights, GradientBuffers]:
        """For each stage, and its experts, without a gradient of their own the pool of their buffers."""
        if self._rooms:
            refuse_parts_of_sums(num_reductions)
            return pools(self.weights, self._rooms)
        found = dict[StageWeights, GradientBuffers]()
        of_experts = {index: own[1].weights for index, own in self._segments.items() if own[1:]}
        for weights in filter(None, (self.weights, of_experts)):
            found |= buffers_of(weights, count, num_reductions)
        return found

    def counted_gradients(self, stage: int | None = None) -> list[Tensor]:
        """This rank's part of the gradients; over all ranks every element is included once.

        Args:
            stage: whose; ``None`` for all. Empty for a stage of another rank, and without what is swapped.
        """
        is_first = self._groups.tensor.index == 0
        counts = self._groups.copies.index == 0 or self.counts_alone
        shared = [one.gradient for one in self.shared if stage is None and one.is_first and counts]
        return shared + [
            gradient
            for segment in self._of_stages(stage)
            if (segment.groups.copies.index == 0 or self.counts_alone) and not segment.weights.is_swapped
            for gradient in segment.weights.counted_gradients(with_replicated=is_first)
        ]

    def segments(self) -> list[Segment]:
        """The parameters of this rank by the ranks that hold them: those of stages, and those that stages share."""
        return [*self._of_stages(), *(Segment(one.weights, Groups(Alone(), one.group)) for one in self.shared)]

    def segments_of(self, stage: int) -> list[Segment]:
        """Of a stage, which is this rank's, the parameters by the ranks that hold them."""
        return self._segments[stage]

    def _of_stages(self, stage: int | None = None) -> list[Segment]:
        return [one for index, own in self._segments.items() if stage in (None, index) for one in own]

    @property
    def modules(self) -> dict[int, nn.Module]:
        """This rank's stages by index."""
        return {index: one.module for index, one in self.weights.items()}

    @property
    def parts(self) -> list[FlatPart]:
        """What this rank's optimizer updates, with gradients."""
        return [part for segment in self.segments() for part in segment.weights.parts]

    def refresh(self) -> None:
        """Copy updated or loaded master weights to the weights that compute uses, without stages at rest."""
        for segment in self.segments():
            if not segment.weights.is_swapped:
                segment.weights.refresh()

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
        self._begun.clear()
        if trains:
            for weights, _ in self._of_stages():
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
        for segment in self._segments[stage]:
            if not segment.weights.is_swapped:
                segment.weights.hold()
        self._gathered.add(stage)
        self._count()
        held = [segment for segment in self._segments[stage] if segment.weights.is_sharded]
        return self._lane.start(_gather((groups.shard, *pair) for weights, groups in held for pair in weights.gathers))

    def reshard(self, stage: int) -> UnderWay:
        """Free a stage's gathered weights at once; the lane records the action in row order."""
        for segment in self._segments[stage]:
            segment.weights.drop()
        self._gathered.discard(stage)
        return self._lane.start(iter(()))

    def before_backward(self, stage: int, *, in_step: bool = True) -> None:
        """Provide a gradient buffer, if the stage has none; that of swapped weights is on the device within a step."""
        for weights, _ in self._segments[stage]:
            if weights not in self._open and (in_step or not weights.is_swapped):
                whole = weights.whole_gradient
                buffer = self._open[weights] = self._buffers[weights].take() if whole is None else whole
                is_first = whole is None or weights not in self._begun
                weights.open_gradient(buffer[: weights.order.size], begins=is_first)
                self._begun.add(weights)
        self._count()

    def reduce(self, stage: int) -> UnderWay:
        """Start reducing the gradient that backwards have accumulated since the last reduction."""
        jobs: list[Job] = []
        for segment in self._segments[stage]:
            weights = segment.weights
            if weights.is_swapped:  # which no other rank has, and which may leave the device now
                self._open.pop(weights, None)
                weights.close_gradient()
                continue
            buffer, buffers = self._open.pop(weights), self._buffers.get(weights)
            weights.close_gradient()
            if stage in self._rooms:  # the update frees the buffer
                self._summed[stage], buffers = buffer, None
            jobs.append(self._reduction(segment, buffer, buffers))
        return self._lane.start(chain.from_iterable(jobs))

    @contextmanager
    def complete_gradient(self, stage: int) -> Iterator[StageWeights]:
        """Context in which a stage has its gradient, which is complete, for its update within the step.

        Its buffer is free afterwards.
        """
        weights = self.weights[stage]
        buffer = self._summed.pop(stage, None)
        if buffer is None:
            buffer = self._open.pop(weights)
            weights.close_gradient()
        weights.lend_gradient(buffer)
        yield weights
        weights.forget_gradient()
        self._buffers[weights].give_back(buffer)

    def _reduction(self, segment: Segment, buffer: Tensor, buffers: GradientBuffers | None) -> Job:
        weights, groups = segment
        if not weights.order.size:  # backwards pass through a stage that trains nothing itself
            if buffers is not None:
                buffers.give_back(buffer)
            return
        if self._sums_replicated:
            for replicated in weights.order.replicated:
                yield self._groups.tensor.all_reduce(buffer[replicated])
        # In place, which NCCL takes and Megatron-LM does too: a second tensor would add a share of all gradients.
        part = buffer[weights.begin : weights.begin + weights.shard.numel()]
        if groups.shard.size > 1:
            yield groups.shard.reduce_scatter(part, buffer[: weights.order.size])
        yield groups.copies.all_reduce(part)
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
            for pending in self.averages([tensor], self._lane):
                finish(pending, timeout_s)

    def averages(self, tensors: Iterable[Tensor], lane: Lane) -> list[UnderWay]:
        """Start to replace tensors by their means over the replicas, on a lane. Collective; steps may run meanwhile."""
        return [lane.start(self._mean(tensor)) for tensor in tensors if tensor.numel()]

    def _mean(self, tensor: Tensor) -> Job:
        yield self._groups.copies.all_reduce(tensor)
        tensor /= self._groups.copies.size

    def gather_gradient(self, stage: int, timeout_s: float) -> dict[str, Tensor]:
        """A stage's whole gradient by parameter name, after a step. All ranks of the group must call it in turn.

        Of ranks that hold the same parameters, the first one gets their gradients.

        Raises:
            PeerLostError: another rank ended.
            StallError: it took longer than ``timeout_s``.
        """
        found: dict[str, Tensor] = {}
        pairs: list[tuple[Group, Tensor, Tensor]] = []
        for segment in self._segments[stage]:
            weights, groups = segment
            whole = torch.empty(weights.order.size, dtype=weights.gradient.dtype, device=weights.gradient.device)
            pairs += [(groups.shard, whole, weights.gradient)] if weights.order.size else []
            found |= weights.order.views(whole) if segment.replica_share[0] == 0 else {}
        finish(self._lane.start(_gather(pairs)), timeout_s)
        return found

    @contextmanager
    def gathered(self, stage: int, timeout_s: float) -> Iterator[None]:
        """Context with a stage's whole weights, outside a step. All ranks of the group must enter it."""
        with nullcontext() if self._store is None else self._store.visit(stage, Content.WEIGHTS):
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
        for one in self.shared:
            one.close()
        for weights, buffer in self._open.items():
            weights.close_gradient()
            if self._rooms and weights in self._buffers:
                self._buffers[weights].give_back(buffer)
        for stage, buffer in self._summed.items():
            self._buffers[self.weights[stage]].give_back(buffer)
        self._open.clear()
        self._summed.clear()

    def _count(self) -> None:
        """Update the peaks."""
        # Stages may share their buffers, which must count once.
        every = {id(one): one for one in self._buffers.values()}.values()
        of_stages = {
            id(self._buffers[one]): self._buffers[one] for one in self.weights.values() if one in self._buffers
        }
        held = [segment.weights for segment in self.segments() if not segment.weights.is_swapped]
        now = Held(
            gathered=len(self._gathered),
            weights_bytes=sum(one.weights_bytes for one in held),
            gradients=sum(one.num_taken for one in of_stages.values())
            + sum(one.whole_gradient is not None for one in self.weights.values() if one in self._open),
            gradients_bytes=sum(one.nbytes for one in every) + sum(one.gradients_bytes for one in held),
        )
        self._most_held = self._most_held.most(now)


def _shares(module: nn.Module, whole: Share, experts: Share | None) -> list[Share]:
    """The parts of a stage's parameters: all of them, or all but the experts, and these."""
    if experts is None:
        return [whole]
    every = [replace(whole, takes=lambda name: not experts.takes(name)), experts]
    return [one for one in every if any(one.takes(name) for name, _ in module.named_parameters())]


def _segment(module: nn.Module, share: Share, **settings: Any) -> Segment:
    """The parameters of a share, with settings of ``StageWeights``."""
    shards = share.groups.shard
    weights = StageWeights(module, share.level, shards.size, shards.index, takes=share.takes, **settings)
    return Segment(weights, share.groups)


def _gather(pairs: Iterable[tuple[Group, Tensor, Tensor]]) -> Job:
    """Gather shards of the second tensors over their groups into the first ones, in the dtype of these."""
    for group, whole, shard in pairs:
        yield group.gather(whole, shard.to(whole.dtype))  # weights are gathered in the dtype of compute
