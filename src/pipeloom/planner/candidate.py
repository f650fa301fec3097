"""One thing that may be chosen: a placed run and its schedule."""

from dataclasses import dataclass, replace
from functools import lru_cache

from pipeloom.cost.placed import OfPlaced
from pipeloom.predict.step import Order, SimulatedStep, lowered, simulate_step
from pipeloom.schedule import Schedule
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Candidate(OfPlaced):
    """One thing that may be chosen.

    Attributes:
        placed: what is trained, how it is laid out, where and with what.
        order: in which schedule.
    """

    order: Order

    def of(self, run: Run) -> "Candidate":
        """Another run in the same place and order."""
        return replace(self, placed=self.placed.of(run))

    @property
    def schedule(self) -> Schedule:
        """As it is simulated."""
        return lowered(self.run, self.software, self.order)

    def simulate(self) -> SimulatedStep:
        """Its step; the last few whose activations move are remembered, which takes long to find out."""
        return _moved(self) if self.order.moving.is_any else simulate_step(self.placed, self.order)


@lru_cache(maxsize=32)
def _moved(candidate: Candidate) -> SimulatedStep:
    return simulate_step(candidate.placed, candidate.order)
