"""Whole stages that visit the one device of a run, in the search: where weights and their state are too large for it.

What a step takes is not bounded by what swapping does, only estimated: it takes at least as long as its compute, and as
the way of everything to the device and back. A search tries the few layouts that come first by that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeloom.config import OptimizerConfig
from pipeloom.cost.analytic import layers_of_pieces
from pipeloom.errors import UserError
from pipeloom.generate import Choice
from pipeloom.layout import Way
from pipeloom.planner.candidate import Candidate
from pipeloom.planner.settle import TRIES
from pipeloom.planner.space import Arrangement, Leaf
from pipeloom.planner.stage_swaps import SwapQuestion, plan_swaps, question_of
from pipeloom.predict.describe import Described
from pipeloom.predict.stage_swaps import Swapping
from pipeloom.predict.step import Order

FAMILY = "breadth-first"
"""The order that visits each stage twice a step, however many micro-batches there are."""


@dataclass(frozen=True, eq=False)
class Swapped:
    """A leaf on one device that is too small for its model, with stages that visit it.

    Attributes:
        leaf: its way ``swap``.
        num_stages: as many as are asked for; ``None`` for any number, whatever that of the leaf is.
    """

    leaf: Leaf
    num_stages: int | None
    way: Way = "swap"

    @cached_property
    def estimate_s(self) -> float:
        """Seconds of the step, about; infinite where activations leave no room for the largest layer."""
        cut, (level,) = self.leaf.cut, self.leaf.sharding.levels
        if max(one.total for one in self._question(0).pieces) > self._room:
            return float("inf")
        moved_s = self._whole_bytes / cut.arrangement.cluster.host_link.bytes_per_s
        return max(cut.time.sharded(level).step_s, moved_s)

    @cached_property
    def _whole_bytes(self) -> float:
        return sum(one.total for one in self._question(0).pieces)

    @property
    def _room(self) -> float:
        """Bytes that a device has for stages, about, beside what all micro-batches keep."""
        memory, run = self.leaf.cut.memory, self.leaf.cut.run
        held = memory.sharded("none").held_bytes(np.full((1, run.loops), float(run.num_microbatches)))
        return float((memory.rooms - held).min()) + self._whole_bytes

    def settle(self) -> Candidate | None:
        """With the cut that is fastest in the bytes that activations leave; ``None`` if they leave too few."""
        budget, cluster = self._room, self.leaf.cut.arrangement.cluster
        for _ in range(TRIES):
            try:
                chosen = self._within(int(budget))
            except UserError:  # a piece of the model is larger
                return None
            prediction = chosen.simulate(cluster).prediction
            if prediction.fits:
                return chosen
            budget -= prediction.memory.total_bytes - prediction.device_bytes[0]
        return None

    def _within(self, budget: int) -> Candidate:
        """With so many bytes for stages at once.

        Raises:
            UserError: a piece of the model is larger.
        """
        run, question = self.leaf.cut.run, self._question(budget)
        partition = plan_swaps(question, [run.num_microbatches], num_stages=self.num_stages).partition
        choice = replace(self.leaf.choice, loops=len(partition))
        run = replace(run, loops=len(partition), layers_by_stage=layers_of_pieces(partition))
        software = self.leaf.cut.arrangement.question.software
        return Candidate(run, software, Order(choice=choice, swapping=Swapping(budget, question.needs_norm)))

    def _question(self, budget: int) -> SwapQuestion:
        arrangement = self.leaf.cut.arrangement
        described = Described(self.leaf.cut.run, arrangement.cluster, arrangement.question.software)
        return question_of(described, Swapping(budget, needs_norm=OptimizerConfig().clips))


def swappable(arrangements: Iterable[Arrangement]) -> Iterator[Swapped]:
    """Leaves on one device that do not fit it, whatever is recomputed, and may be swapped through it."""
    for arrangement in arrangements:
        run, question = arrangement.run, arrangement.question
        is_alone = run.num_devices == 1 and FAMILY in question.families and arrangement.cluster.host is not None
        if not is_alone or arrangement.kept == "some" or arrangement.splits:
            continue
        is_asked = question.limits.loops is not None
        for cut in arrangement.cuts():
            leaf, loops = next(cut.leaves()), cut.run.loops
            if (is_asked or loops == 1) and leaf.narrowed() is None:
                choice = Choice(family=FAMILY, pp=1, loops=loops, num_microbatches=run.num_microbatches)
                yield Swapped(replace(leaf, choice=choice, way="swap"), loops if is_asked else None)
