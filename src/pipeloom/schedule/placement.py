"""Which pipeline rank holds which stage."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pipeloom.calls import checked
from pipeloom.errors import UserError
from pipeloom.workload.limits import Count


@dataclass(frozen=True)
class Placement:
    """Stage -> pipeline rank.

    Examples:
        >>> from pipeloom import Placement
        >>> Placement.looped(num_ranks=2, loops=2)
        Placement(rank_by_stage=(0, 1, 0, 1))
        >>> Placement((0, 1, 1, 0)).stages_of(0)
        (0, 3)

    Attributes:
        rank_by_stage: for each stage, in order, the pipeline rank that holds it.

    Raises:
        UserError: a rank below the largest one holds no stage.
    """

    rank_by_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a placement that leaves a rank idle."""
        ranks = set(self.rank_by_stage)
        # The largest number is taken for the number of ranks.
        if not ranks or ranks != set(range(max(ranks) + 1)):
            raise UserError(
                f"placement {self.rank_by_stage} must give every pipeline rank 0..P-1 at least one stage; "
                f"found ranks {sorted(ranks)}"
            )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_by_stage)

    @cached_property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return max(self.rank_by_stage) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that a pipeline rank holds, ascending."""
        return self._stages.get(rank, ())

    @cached_property
    def _stages(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for stage, rank in enumerate(self.rank_by_stage):
            found.setdefault(rank, []).append(stage)
        return {rank: tuple(stages) for rank, stages in found.items()}

    def crosses(self, stage: int) -> bool:
        """Whether the boundary between ``stage`` and ``stage + 1`` is between two ranks."""
        return stage + 1 < self.num_stages and self.rank_by_stage[stage] != self.rank_by_stage[stage + 1]

    @classmethod
    @checked
    def linear(cls, num_ranks: Count, loops: Count = 1) -> "Placement":
        """Consecutive stages on one rank: stage ``k`` on rank ``k // loops``."""
        return cls(tuple(stage // loops for stage in range(num_ranks * loops)))

    @classmethod
    @checked
    def looped(cls, num_ranks: Count, loops: Count = 1) -> "Placement":
        """Stages go round the ranks: stage ``k`` on rank ``k % num_ranks`` (arXiv 2211.05953, section 4)."""
        return cls(tuple(stage % num_ranks for stage in range(num_ranks * loops)))

    @classmethod
    @checked
    def v(cls, num_ranks: Count, loops: Count = 2) -> "Placement":
        """Stages ascend to the last rank and descend again: rank 0 has the first and, for even loops, the last."""
        there = range(num_ranks)
        return cls(tuple(rank for loop in range(loops) for rank in (there if loop % 2 == 0 else reversed(there))))


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "linear": Placement.linear,
    "looped": Placement.looped,
    "v": Placement.v,
}
"""Placements by name; each takes the number of pipeline ranks and the loops (stages for each rank)."""
