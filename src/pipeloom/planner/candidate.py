"""One thing that may be chosen: a run, its program, its schedule."""

from dataclasses import dataclass
from functools import lru_cache

from pipeloom.cost.hardware import Cluster
from pipeloom.cost.software import Software
from pipeloom.predict.step import Order, SimulatedStep, lowered, simulate_step
from pipeloom.schedule import Schedule
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Candidate:
    """One thing that may be chosen.

    Attributes:
        run: what is trained, and how it is laid out.
        software: with what.
        order: in which schedule.
    """

    run: Run
    software: Software
    order: Order

    @property
    def schedule(self) -> Schedule:
        """As it is simulated."""
        return lowered(self.run, self.software, self.order)

    def simulate(self, cluster: Cluster) -> SimulatedStep:
        """Its step on a cluster; the last few whose activations move are remembered, which takes long to find out."""
        return _moved(self, cluster) if self.order.moving.is_any else _simulate(self, cluster)


def _simulate(candidate: Candidate, cluster: Cluster) -> SimulatedStep:
    return simulate_step(candidate.run, cluster, candidate.software, candidate.order)


_moved = lru_cache(maxsize=32)(_simulate)
