"""A run on a cluster, as a training program executes it."""

from dataclasses import dataclass, replace
from functools import cached_property

from pipeloom.cost.analytic import stage_costs, stage_layers, stage_parameters, with_own_layers
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.hardware import Cluster
from pipeloom.cost.ranks import placement_of, rank_device_bytes
from pipeloom.cost.software import Software
from pipeloom.schedule import Placement
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class Placed:
    """A run with everything that its prediction depends on but its schedule.

    Attributes:
        run: what is trained.
        cluster: where.
        software: with what.
    """

    run: Run
    cluster: Cluster
    software: Software

    def of(self, run: Run) -> "Placed":
        """Another run in the same place."""
        return self if run is self.run else replace(self, run=run)

    @cached_property
    def placement(self) -> Placement:
        """The pipeline rank of each stage."""
        return placement_of(self.run)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return stage_layers(self.run, self.software)[0]

    @cached_property
    def parameters(self) -> tuple[float, ...]:
        """Parameters of each stage that one device holds."""
        return stage_parameters(self.run, self.software)

    @cached_property
    def costs(self) -> StageCosts:
        """Seconds of each stage, without collectives.

        Raises:
            UserError: the cluster has not so many devices.
        """
        return stage_costs(self.run, self.cluster, self.software)

    @cached_property
    def device_bytes(self) -> tuple[float, ...]:
        """What a device of each pipeline rank can hold.

        Raises:
            UserError: the cluster has not so many devices.
        """
        return rank_device_bytes(self.run, self.cluster)

    @property
    def balanced(self) -> "Placed":
        """With the layers of each stage where its program balances them and its ranks are not equally fast.

        Raises:
            UserError: more stages than pieces, or the cluster has not so many devices.
        """
        return self.of(with_own_layers(self.run, self.cluster, self.software))


@dataclass(frozen=True)
class OfPlaced:
    """Base of values about a placed run.

    Attributes:
        placed: the run.
    """

    placed: Placed

    @property
    def run(self) -> Run:
        """What is trained, and how it is laid out."""
        return self.placed.run

    @property
    def cluster(self) -> Cluster:
        """Where."""
        return self.placed.cluster

    @property
    def software(self) -> Software:
        """With what."""
        return self.placed.software
