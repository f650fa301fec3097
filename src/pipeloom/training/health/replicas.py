"""Finds ranks whose memory changes between steps, and ranks that compute wrongly (``training.check_every``).

Three comparisons, in this order, since each rests on the one before:

- memory: a digest of weights and optimizer state behind an update, and before the next one. In every step, on each
  rank alone.
- copies: digests of what several ranks hold alike. Every N steps.
- products: all ranks compute the same visit of a stage, each stage in turn. Every N steps.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeloom.config import RunConfig
from pipeloom.errors import RunError
from pipeloom.execute.processes.world import World
from pipeloom.execute.stages.digest import digest
from pipeloom.execute.stages.visit import Visited
from pipeloom.measure.host import cpu_name
from pipeloom.training.health.odd_ones import Group, Odd, odd_ones, with_owners
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.visits import Visits

_MOST = 3
"""Findings after which a run that goes back ends: a broken device stays broken."""


@dataclass(frozen=True)
class Damage:
    """What a check found.

    Attributes:
        step: in which.
        rank: that has it; the first of those between which no majority decides.
        words: one sentence: what, ranks with their hosts, stage, step.
        good_step: checkpoints up to this step are from before it.
    """

    step: int
    rank: int
    words: str
    good_step: int


class _Own(NamedTuple):
    """What a rank hands in for a comparison.

    Attributes:
        resting: digest of its weights and optimizer state.
        visited: its results.
    """

    resting: int
    visited: Visited


class Health:
    """Checks of a run; without ``training.check_every`` it does nothing. Construction is collective.

    Args:
        config: resolved.
        world: all ranks.
        pipeline: of this rank.
        optimizer: of its parameters.
        step: steps that are done.
    """

    def __init__(
        self, config: RunConfig, world: World, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int
    ) -> None:
        self._every = config.training.check_every
        self._config, self._world, self._pipeline, self._optimizer = config, world, pipeline, optimizer
        self._noted: int | None = None
        self._begun = self._good = step
        self._num_found = 0
        self._visits: Visits | None = None
        if self._every is not None:
            self._visits = pipeline.visits()
            every: list[tuple[str, str]] = world.from_first(
                world.gather((socket.gethostname(), _kind_of(world.device)))
            )
            self._hosts, kinds = zip(*every, strict=True)
            self._is_alike = len(set(kinds)) == 1

    def note(self) -> None:
        """Note what must stay until the next update; called behind one, and before the first."""
        if self._every is not None:
            self._noted = digest(self._resting())

    def go_back(self, step: int) -> None:
        """Begin anew behind a step, with the weights of its checkpoint."""
        self._begun = self._good = step
        self.note()

    def own(self) -> list[float]:
        """By rank 1 if its memory has changed: that of this rank, and 0 for the others; called before the update."""
        if self._every is None:
            return []
        found = [0.0] * self._world.size
        found[self._world.rank] = float(self._noted is not None and digest(self._resting()) != self._noted)
        return found

    def judge(self, step: int, changed: Sequence[float], windows: npt.NDArray[np.int64]) -> Damage | None:
        """What is wrong in a step, before its update; the same on all ranks. Collective.

        Args:
            step: counted from 1.
            changed: sums of ``own`` over all ranks.
            windows: of the step.

        Raises:
            RunError: something was found too often.
        """
        if self._every is None:
            return None
        if any(changed):
            ranks = [rank for rank, number in enumerate(changed) if number]
            words = f"{self._names(ranks)} has memory that changed since the update of step {step - 1}"
            # A checkpoint of the step before may have been written behind the change.
            found: Damage | None = Damage(step, ranks[0], f"step {step}: {words}", max(self._begun, step - 2))
        elif step % self._every == 0:
            found = self._compare(step, windows)
            self._good = self._good if found else max(self._begun, step - 1)
        else:
            found = None
        self._num_found += found is not None
        if found is not None and self._num_found == _MOST:
            raise RunError(f"{found.words}; after {_MOST} such findings the run ends")
        return found

    def _compare(self, step: int, windows: npt.NDArray[np.int64]) -> Damage | None:
        assert self._every is not None
        assert self._visits is not None
        stage = (step // self._every - 1) % self._pipeline.schedule.num_stages
        assert self._noted is not None
        visited = self._visits.result(stage, self._pipeline.batch(windows, replica=0), step)
        every: list[_Own] | None = self._world.gather(_Own(self._noted, visited))
        found: tuple[int, str] | None = self._world.from_first(None if every is None else self._verdict(every, stage))
        return None if found is None else Damage(step, found[0], f"step {step}: {found[1]}", self._good)

    def _verdict(self, every: Sequence[_Own], stage: int) -> tuple[int, str] | None:
        """The first rank that is wrong, and what and where in words; ``None`` for nothing."""
        if self._is_alike:  # updates of unlike devices may round differently
            for ranks in self._config.layout.copy_groups():
                if (odd := odd_ones({(rank,): every[rank].resting for rank in ranks})) is not None:
                    return self._words(odd, f"another copy of the weights that {self._names(ranks)} hold")
        values = self._values(every)
        if (odd := odd_ones(values)) is None:
            return None
        owner = self._pipeline.schedule.placement.rank_by_stage[stage]
        odd = with_owners(odd, values, self._replicas, owner)
        return self._words(odd, f"other results of stage {stage} than the other ranks, from the same micro-batch")

    def _words(self, odd: Odd, what: str) -> tuple[int, str]:
        names, rank = [self._names(one) for one in odd.groups], odd.groups[0][0]
        if odd.is_decided:
            return rank, f"{' and '.join(names)} has {what}"
        return rank, f"{' or '.join(names)} has {what}; no majority shows which one is wrong"

    def _names(self, ranks: Sequence[int]) -> str:
        hosts = dict.fromkeys(self._hosts[rank] for rank in ranks)
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} on {', '.join(hosts)}"

    @property
    def _replicas(self) -> list[list[Group]]:
        """The groups that make a visit together, for each replica in the order of the pipeline."""
        return [[tuple(ranks) for ranks in groups] for groups in self._config.layout.computing_groups()]

    def _values(self, every: Sequence[_Own]) -> dict[Group, int]:
        """For each group the number of its results, the same for equal ones."""
        seen: list[list[Visited]] = []
        found: dict[Group, int] = {}
        for group in (group for groups in self._replicas for group in groups):
            own = [every[rank].visited for rank in group]
            number = next((n for n, other in enumerate(seen) if self._are_equal(own, other)), len(seen))
            seen[number:] = seen[number:] or [own]
            found[group] = number
        return found

    def _are_equal(self, some: Sequence[Visited], others: Sequence[Visited]) -> bool:
        return all(one.equals(other, is_alike=self._is_alike) for one, other in zip(some, others, strict=True))

    def _resting(self) -> list[Tensor]:
        """What no step changes before its update."""
        parallel = self._pipeline.data_parallel
        weights = [one for its in parallel.segments() for one in its.weights.resting]
        states = [self._optimizer.state[part.parameter] for part in parallel.parts]
        # Without the count of steps, which a skipped step raises without an update.
        return weights + [tensor for one in states for name, tensor in one.items() if name != "step"]


def _kind_of(device: torch.device) -> str:
    """What results in the same bits: the device, and what chooses its kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()}, {torch.__version__}"
