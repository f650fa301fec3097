"""Seconds of token slices: of a stage for consecutive tokens of a sequence, which attend to earlier ones.

For a slice of ``l`` tokens after ``c`` earlier ones, everything except the core of attention takes as long as for a
sequence of ``l`` tokens. Attention has ``l c`` more scores than for such a sequence, both in kernels that skip masked
scores (``T^2 / 2`` for a sequence of T, fewer with a window) and in those that do not (``T^2``). Keys and values of the
``c`` tokens are read, and their gradients updated, once per slice. So a device takes about ``f(l) + a l c + b c``
(TeraPipe, arXiv 2102.07988, section 3.3, and the regression of its code). If the device waits for the host to launch
the kernels of a short slice, the additional work runs during that wait first.
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
from pipeloom.cost.layers import Pieces
from pipeloom.cost.mixed import MixedCluster
from pipeloom.cost.pieces import piece_seconds
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.cost.stages import layers_by_kind
from pipeloom.schedule import Action
from pipeloom.schedule.stage_swaps import Content
from pipeloom.workload.run import Run

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class SliceCosts:
    """Costs for each stage and token slice.

    Attributes:
        whole: costs of actions on a whole stage, such as gathers, reductions and messages of a tied matrix.
        slices: for each slice the costs of its compute and its messages.
    """

    ignores_microbatch: ClassVar[bool] = True

    whole: StageCosts
    slices: tuple[StageCosts, ...]

    def seconds(self, action: Action) -> float:
        """Seconds that ``action`` occupies its lane."""
        return (self.whole if action.microbatch is None else self.slices[action.slice]).seconds(action)

    def move_s(self, stage: int, content: Content) -> float:
        """Seconds of moving contents of a stage between device and host, in either direction."""
        return self.whole.move_s(stage, content)


def moved(part: StageCosts, whole: StageCosts, share: float) -> StageCosts:
    """``part``, the costs of a slice, with its share of the seconds of moving a micro-batch's activations."""
    return replace(
        part,
        evict_s=tuple(seconds * share for seconds in whole.evict_s),
        offload_s=tuple(seconds * share for seconds in whole.offload_s),
    )


class SliceModel:
    """Seconds of slices of a run's sequences.

    If the pieces of whole sequences were measured, the closed forms of slices are scaled by measured / closed form.

    Args:
        placed: the run; ``run.slices`` is ignored.

    Raises:
        UserError: the cluster has too few devices.
    """

    def __init__(self, placed: Placed) -> None:
        # Fix the partition: for shorter sequences the head's share is larger, and another partition would be chosen.
        whole = placed.of(replace(placed.run, slices=(), layers_by_stage=placed.layers))
        self._placed = replace(whole, cluster=_unmeasured(placed.cluster))
        self._whole = whole.costs
        counted = self._placed.costs
        self._factor = (
            _ratio(self._whole.forward_s, counted.forward_s),
            _ratio(self._whole.backward_s, counted.backward_s),
        )
        self._layers = _layers(self._placed)
        is_frozen = self._placed.run.frozen_pieces > 0
        self._trained = _layers(self._placed, trained=True) if is_frozen else self._layers

    def stage_costs(self, length: int, before: int) -> StageCosts:
        """Costs of the stages for a slice, and of its messages.

        The core of attention has no weights: its seconds for earlier tokens belong to the input half of a backward.

        Args:
            length: tokens of the slice.
            before: tokens before it.
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
            whole: of whole micro-batches, and of all other actions of the schedule.
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
        """Seconds of forward and backward of slices: mean over the stages of the rank slowest with a whole sequence.

        Args:
            lengths: tokens of each slice.
            before: tokens before each slice.
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
        """``seconds`` of slices, with a message forward and one back: their mean over all boundaries.

        Args:
            lengths: tokens of each slice.
            before: tokens before each slice.
        """
        # Few lengths recur at many positions, and each needs an evaluation of the whole model.
        different, where = np.unique(lengths.astype(np.int64), return_inverse=True)
        alone = [self._alone(length) for length in different.tolist()]
        message_s = np.array([fmean(costs.boundary_s or [costs.transfer_s]) for costs in alone])
        # The inverse is flat in NumPy 1, and has the shape of the input in NumPy 2 (release notes of 2.0).
        return self.seconds(lengths, before) + 2 * message_s[where].reshape(lengths.shape)

    def _more_s(self, stage: int, length: int, before: int) -> tuple[float, float]:
        """Additional seconds of a stage for the tokens before a slice, forward and backward."""
        forward_s = sum(count * layer.more_s(length, before)[0] for layer, count in self._layers[stage])
        return forward_s, sum(count * layer.more_s(length, before)[1] for layer, count in self._trained[stage])

    def _alone(self, length: int) -> StageCosts:
        """Costs of a whole sequence of this length."""
        return _costs(self._placed.of(replace(self._placed.run, seq=length)))


@lru_cache(maxsize=4096)
def _costs(placed: Placed) -> StageCosts:
    return placed.costs


def _ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / other if other else 1.0 for one, other in zip(ones, others, strict=True))


class _Layer:
    """A layer on some devices.

    Args:
        run: the run, whose layers all recompute and see the same.
        part: cluster of the devices.
        software: the training program.
    """

    def __init__(self, run: Run, part: Cluster, software: Software) -> None:
        self._run, self._part, self._software = run, part, software
        self._alone: dict[int, tuple[Run, tuple[float, float]]] = {}
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def more_s(self, length: int, before: int) -> tuple[float, float]:
        """Additional seconds for the tokens before a slice, forward and backward, less the wait for the host."""
        known = self._known.get((length, before))
        if known is None:
            run, free_s = self._alone.get(length) or self._of_length(length)
            behind_s = Pieces(run, self._part, self._software, before=before).attention_s()
            known = max(0.0, behind_s[0] - free_s[0]), max(0.0, behind_s[1] - free_s[1])
            self._known[length, before] = known
        return known

    def _of_length(self, length: int) -> tuple[Run, tuple[float, float]]:
        """The run with sequences of a length, and the seconds of attention that do not prolong a layer."""
        run = replace(self._run, seq=length)
        own_s = Pieces(run, self._part, self._software).attention_s()
        idle_s = piece_seconds(run, self._part, self._software).idle_s
        self._alone[length] = run, (own_s[0] + idle_s[0], own_s[1] + idle_s[1])
        return self._alone[length]


def _layers(placed: Placed, *, trained: bool = False) -> list[list[tuple[_Layer, int]]]:
    """For each stage its layers by kind, with their numbers: all layers, or those that are trained."""
    stages = [
        [((alike, placed.parts[rank]), count) for alike, count in kinds]
        for rank, kinds in zip(
            placed.placement.rank_by_stage,
            layers_by_kind(placed.run, placed.software, trained=trained),
            strict=True,
        )
    ]
    different = {key: _Layer(*key, placed.software) for kinds in stages for key, _ in kinds}
    return [[(different[key], count) for key, count in kinds] for kinds in stages]


def _unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without measured pieces."""
    if isinstance(cluster, MixedCluster):
        groups = tuple(replace(group, cluster=replace(group.cluster, pieces=())) for group in cluster.groups)
        return replace(cluster, pieces=(), groups=groups)
    return replace(cluster, pieces=())
