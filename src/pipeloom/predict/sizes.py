"""Closed forms of the bytes of a run's stages, by which its schedule is made."""

from dataclasses import dataclass, replace

from pipeloom.catalog import load_software
from pipeloom.config import RunConfig
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.predict.describe import described_run
from pipeloom.predict.memory import kept_with_loss
from pipeloom.predict.stage_swaps import swapped_amounts, with_alike_stages
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.workload.dtypes import precision_of
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class ClosedSizes:
    """Closed forms of the bytes of a run's stages.

    Attributes:
        run: what is trained.
        software: with what.
        is_gpu: whether devices are GPUs, where a norm of this program is one kernel, whatever the run says.
    """

    run: Run
    software: Software
    is_gpu: bool

    def kept(self, _schedule: Schedule) -> KeptBytes:
        """What stages keep of micro-batches for their backwards."""
        run = replace(self.run, fused_norm=self.is_gpu) if self.software.has_lanes else self.run
        return kept_with_loss(run, self.software)

    def stages(self) -> tuple[Amounts, ...]:
        """For each stage the bytes of its weights, gradient and state."""
        return swapped_amounts(self.run, self.software)


def sizes_in_training(config: RunConfig) -> ClosedSizes:
    """Closed forms of the bytes of the stages of a run, as ``pipeloom train`` executes it on any machine.

    Args:
        config: without problems, its model's sizes in place.

    Raises:
        UserError: there are none for its type.
    """
    precision = precision_of(config.training.known_dtype)
    if precision is None:
        raise UserError(f"training.dtype {config.training.known_dtype} has no closed forms of bytes; use float32")
    software = load_software("pipeloom")
    run = described_run(config, precision)
    run = run if config.schedule.budget_bytes is None else with_alike_stages(run, software)
    return ClosedSizes(run, software, config.training.device == "cuda")
