"""Seconds of token slices: what a stage takes for some tokens of a sequence that come behind others.

With T tokens of which ``c`` come before a slice of ``l``, everything but the core of attention takes as long as for a
sequence of ``l``, which a device fills less well. Attention's scores are ``l c`` more than those of a sequence of
``l``: in a kernel that leaves out what the causal mask hides, which counts ``T^2 / 2`` for the whole sequence, as in
one that does not, which counts ``T^2``. Keys and values of the ``c`` tokens are read, and gradients are added to
theirs, however short the slice is. So a device takes about ``f(l) + a l c + b c`` (TeraPipe, arXiv 2102.07988, section
3.3, and the regression of its code), and a little more where the products are small. Where it waits for the host to
launch the kernels of a short slice, what comes on top of ``f(l)`` fills that time first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.layers import Pieces, piece_seconds
from pipeloom.cost.mixed import MixedCluster
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.cost.stages import layers_by_recompute
from pipeloom.schedule import Action
from pipeloom.schedule.stage_swaps import Content
from pipeloom.workload.run import Run

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class SliceCosts:
    """Every stage its own, and every token slice its own.

    Attributes:
        whole: of what concerns a stage as a whole: gathers, reductions, a tied matrix.
        slices: for each slice what the stages take for it, and its messages.
    """

    ignores_microbatch: ClassVar[bool] = True

    whole: StageCosts
    slices: tuple[StageCosts, ...]

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` keeps its lane busy."""
        return (self.whole if action.microbatch is None else self.slices[action.slice]).seconds(action)

    def move_s(self, stage: int, content: Content) -> float:
        """Seconds of moving some of what there is of a stage between device and host."""
        return self.whole.move_s(stage, content)


def moved(part: StageCosts, whole: StageCosts, share: float) -> StageCosts:
    """With a slice's share of what it takes to move a micro-batch's activations away and back."""
    return replace(
        part,
        evict_s=tuple(seconds * share for seconds in whole.evict_s),
        offload_s=tuple(seconds * share for seconds in whole.offload_s),
    )


class SliceModel:
    """What slices of a run's sequences take.

    Where the cluster's file has measured the pieces of whole sequences, slices take the same multiple of what closed
    forms say as these do.

    Args:
        placed: what is trained; its slices do not count.

    Raises:
        UserError: the cluster has not so many devices.
    """

    def __init__(self, placed: Placed) -> None:
        # The cut is fixed here: with shorter sequences the head weighs
        # otherwise, and layers would be cut in another way.
        whole = placed.of(replace(placed.run, slices=(), layers_by_stage=placed.layers))
        self._placed = replace(whole, cluster=_unmeasured(placed.cluster))
        self._whole = whole.costs
        counted = self._placed.costs
        self._factor = (
            _ratio(self._whole.forward_s, counted.forward_s),
            _ratio(self._whole.backward_s, counted.backward_s),
        )
        self._layers = _layers(self._placed)

    def stage_costs(self, length: int, before: int) -> StageCosts:
        """What the stages take for a slice of some tokens behind others, and its messages.

        Attention's core has no weights: what it takes for the tokens before belongs to the first half of a backward.
        """
        alone = self._alone(length)
        more_s = [self._more_s(stage, length, before) for stage in range(len(self._layers))]
        sides = [
            tuple(
                factor * (seconds + more[side])
                for factor, seconds, more in zip(self._factor[side], alone_s, more_s, strict=True)
            )
            for side, alone_s in enumerate((alone.forward_s, alone.backward_s))
        ]
        weight_s = tuple(factor * seconds for factor, seconds in zip(self._factor[1], alone.weight_s, strict=True))
        return replace(alone, forward_s=sides[0], backward_s=sides[1], weight_s=weight_s)

    def costs(self, whole: StageCosts, lengths: Sequence[int]) -> SliceCosts:
        """Costs of the actions of a schedule of slices.

        Args:
            whole: of whole micro-batches, with everything beside compute that the schedule has.
            lengths: tokens of each slice.
        """
        parts: list[StageCosts] = []
        before = 0
        for length in lengths:
            part = self.stage_costs(length, before)
            parts.append(moved(part, whole, length / sum(lengths)))
            before += length
        return SliceCosts(whole, tuple(parts))

    def seconds(self, lengths: Seconds, before: Seconds) -> Seconds:
        """Forward and backward of slices on the rank for which a whole sequence takes longest, all its stages.

        Args:
            lengths: tokens of each.
            before: tokens before each.
        """
        owner = self._placed.placement.rank_by_stage
        both = [f + b for f, b in zip(self._whole.forward_s, self._whole.backward_s, strict=True)]
        by_rank = [sum(s for s, one in zip(both, owner, strict=True) if one == rank) for rank in range(max(owner) + 1)]
        slowest = by_rank.index(max(by_rank))
        stages = [stage for stage, rank in enumerate(owner) if rank == slowest]
        places = list(zip(lengths.astype(int).tolist(), before.astype(int).tolist(), strict=True))
        total = np.zeros(lengths.shape)
        alone = {length: self._alone(length) for length in {length for length, _ in places}}
        for stage in stages:
            factors = (self._factor[0][stage], self._factor[1][stage])
            both_s = {length: (costs.forward_s[stage], costs.backward_s[stage]) for length, costs in alone.items()}
            seconds = np.array([both_s[length] for length, _ in places])
            seconds += np.array([self._more_s(stage, *place) for place in places])
            total += seconds @ np.array(factors)
        return total / len(stages)

    def through_s(self, lengths: Seconds, before: Seconds) -> Seconds:
        """From when a slice comes to a rank to when it comes to the next one, there and back: with its messages.

        Of messages that differ the mean counts, for a slice passes all of them.

        Args:
            lengths: tokens of each.
            before: tokens before each.
        """
        # The same few lengths recur at many places, and each costs an evaluation of the whole model.
        different, where = np.unique(lengths.astype(np.int64), return_inverse=True)
        alone = [self._alone(length) for length in different.tolist()]
        message_s = np.array([fmean(costs.boundary_s or [costs.transfer_s]) for costs in alone])
        # NumPy 1 gives the inverse flat, NumPy 2 in the shape of its input (its release notes).
        return self.seconds(lengths, before) + 2 * message_s[where].reshape(lengths.shape)

    def _more_s(self, stage: int, length: int, before: int) -> tuple[float, float]:
        """Seconds that a stage takes more for what comes before a slice, forward and backward."""
        more_s = [(count, *layer.more_s(length, before)) for layer, count in self._layers[stage]]
        return sum(count * one for count, one, _ in more_s), sum(count * one for count, _, one in more_s)

    def _alone(self, length: int) -> StageCosts:
        """What a whole sequence of this length takes."""
        return _costs(self._placed.of(replace(self._placed.run, seq=length)))


@lru_cache(maxsize=4096)
def _costs(placed: Placed) -> StageCosts:
    return placed.costs


def _ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / other if other else 1.0 for one, other in zip(ones, others, strict=True))


class _Layer:
    """A layer on some devices.

    Args:
        run: as if all layers recomputed the same.
        part: the devices.
        software: with what.
    """

    def __init__(self, run: Run, part: Cluster, software: Software) -> None:
        self._run, self._part, self._software = run, part, software
        self._alone: dict[int, tuple[Run, tuple[float, float]]] = {}
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def more_s(self, length: int, before: int) -> tuple[float, float]:
        """Seconds more for what comes before a slice, forward and backward, beyond those of waiting for the host."""
        known = self._known.get((length, before))
        if known is None:
            run, free_s = self._alone.get(length) or self._of_length(length)
            behind_s = Pieces(run, self._part, self._software, before=before).attention_s()
            known = max(0.0, behind_s[0] - free_s[0]), max(0.0, behind_s[1] - free_s[1])
            self._known[length, before] = known
        return known

    def _of_length(self, length: int) -> tuple[Run, tuple[float, float]]:
        """The run with sequences of a length, and how long attention may take without making a layer longer."""
        run = replace(self._run, seq=length)
        own_s = Pieces(run, self._part, self._software).attention_s()
        idle_s = piece_seconds(run, self._part, self._software).idle_s
        self._alone[length] = run, (own_s[0] + idle_s[0], own_s[1] + idle_s[1])
        return self._alone[length]


def _layers(placed: Placed) -> list[list[tuple[_Layer, int]]]:
    """Of each stage its layers by what they recompute, and how many they are."""
    stages = [
        [((alike, placed.parts[rank]), count) for alike, count in kinds]
        for rank, kinds in zip(
            placed.placement.rank_by_stage, layers_by_recompute(placed.run, placed.software), strict=True
        )
    ]
    different = {key: _Layer(*key, placed.software) for kinds in stages for key, _ in kinds}
    return [[(different[key], count) for key, count in kinds] for kinds in stages]


def _unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without what was measured of models."""
    if isinstance(cluster, MixedCluster):
        groups = tuple(replace(group, cluster=replace(group.cluster, pieces=())) for group in cluster.groups)
        return replace(cluster, pieces=(), groups=groups)
    return replace(cluster, pieces=())
