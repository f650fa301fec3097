"""Seconds of token slices: what a stage takes for some tokens of a sequence that come behind others.

With T tokens of which ``c`` come before a slice of ``l``, everything but the core of attention takes as long as for a
sequence of ``l``, which a device fills less well. Attention's scores are ``l c`` more than those of a sequence of
``l``: in a kernel that leaves out what the causal mask hides, which counts ``T^2 / 2`` for the whole sequence, as in
one that does not, which counts ``T^2``. So a slice takes ``f(l) + a l c`` (TeraPipe, arXiv 2102.07988, section 3.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.analytic import layers_by_recompute, stage_costs, stage_layers
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.layers import Pieces
from pipeloom.cost.mixed import MixedCluster
from pipeloom.cost.ranks import placement_of, rank_parts
from pipeloom.cost.shape import Run
from pipeloom.cost.software import Software
from pipeloom.schedule import Action
from pipeloom.schedule.stage_swaps import Content

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
        run: what is trained; its slices do not count.
        cluster: where.
        software: with what.

    Raises:
        UserError: the cluster has not so many devices.
    """

    def __init__(self, run: Run, cluster: Cluster, software: Software) -> None:
        self._run = replace(run, slices=(), layers_by_stage=stage_layers(run, software)[0])
        self._cluster, self._software = _unmeasured(cluster), software
        self._whole = stage_costs(self._run, cluster, software)
        counted = stage_costs(self._run, self._cluster, software)
        self._factor = (
            _ratio(self._whole.forward_s, counted.forward_s),
            _ratio(self._whole.backward_s, counted.backward_s),
        )
        self._pair_s = _pair_s(self._run, self._cluster, software)

    def stage_costs(self, length: int, before: int) -> StageCosts:
        """What the stages take for a slice of some tokens behind others, and its messages."""
        alone = self._alone(length)
        sides = [
            tuple(
                factor * (seconds + pair_s * length * before)
                for factor, seconds, pair_s in zip(factors, side, pairs_s, strict=True)
            )
            for factors, side, pairs_s in zip(
                self._factor, (alone.forward_s, alone.backward_s), self._pair_s, strict=True
            )
        ]
        return replace(alone, forward_s=sides[0], backward_s=sides[1])

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
        owner = placement_of(self._run).rank_by_stage
        both = [f + b for f, b in zip(self._whole.forward_s, self._whole.backward_s, strict=True)]
        by_rank = [sum(s for s, one in zip(both, owner, strict=True) if one == rank) for rank in range(self._run.pp)]
        slowest = by_rank.index(max(by_rank))
        stages = [stage for stage, rank in enumerate(owner) if rank == slowest]
        different, where = np.unique(lengths.astype(np.int64), return_inverse=True)
        alone = [self._alone(length) for length in different.tolist()]
        total = np.zeros(lengths.shape)
        for stage in stages:
            forward_s = np.array([costs.forward_s[stage] for costs in alone])[where].reshape(lengths.shape)
            backward_s = np.array([costs.backward_s[stage] for costs in alone])[where].reshape(lengths.shape)
            pairs = lengths * before
            total += self._factor[0][stage] * (forward_s + self._pair_s[0][stage] * pairs)
            total += self._factor[1][stage] * (backward_s + self._pair_s[1][stage] * pairs)
        return total / len(stages)

    def _alone(self, length: int) -> StageCosts:
        """What a whole sequence of this length takes."""
        return _stage_costs(replace(self._run, seq=length), self._cluster, self._software)


@lru_cache(maxsize=4096)
def _stage_costs(run: Run, cluster: Cluster, software: Software) -> StageCosts:
    return stage_costs(run, cluster, software)


def _ratio(ones: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(one / other if other else 1.0 for one, other in zip(ones, others, strict=True))


def _pair_s(run: Run, cluster: Cluster, software: Software) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage the seconds of one more pair of a query and a key before its slice, forward and backward."""
    owner, parts = placement_of(run).rank_by_stage, rank_parts(run, cluster)
    is_masked = run.effective_attention in ("flash1", "flash2")
    pairs = run.seq * run.seq / (2 if is_masked else 1)
    sides: tuple[list[float], list[float]] = ([], [])
    for rank, layers in zip(owner, layers_by_recompute(run, software), strict=True):
        of_kind = [(Pieces(alike, parts[rank], software), count) for alike, count in layers]
        sides[0].append(sum(count * pieces.layer_forward().attention_s for pieces, count in of_kind) / pairs)
        sides[1].append(sum(count * pieces.layer_backward().attention_s for pieces, count in of_kind) / pairs)
    return tuple(sides[0]), tuple(sides[1])


def _unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without what was measured of models."""
    if isinstance(cluster, MixedCluster):
        groups = tuple(replace(group, cluster=replace(group.cluster, pieces=())) for group in cluster.groups)
        return replace(cluster, pieces=(), groups=groups)
    return replace(cluster, pieces=())
