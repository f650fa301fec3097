"""Closed forms of the bytes of a run's stages, as ``Sizes`` of a recipe."""

from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.catalog import load_software
from pipeloom.config import RunConfig
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.predict.describe import described_run, with_update_of
from pipeloom.predict.memory import kept_with_loss
from pipeloom.predict.stage_swaps import swapped_amounts, with_alike_stages
from pipeloom.recipe import Knobs
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.workload.dtypes import precision_of
from pipeloom.workload.run import Run


@dataclass(frozen=True)
class ClosedSizes:
    """Closed forms of the bytes of a run's stages.

    Attributes:
        run: model and layout, with its devices' kernels.
        software: the training program.
    """

    run: Run
    software: Software

    @classmethod
    def of(cls, run: Run, software: Software, *, is_gpu: bool) -> "ClosedSizes":
        """Sizes of a run. In this program a norm is one kernel on GPUs only, whatever ``run.fused_norm`` is."""
        return cls(replace(run, fused_norm=is_gpu) if software.has_lanes else run, software)

    def kept(self, _schedule: Schedule) -> KeptBytes:
        """Bytes that stages keep of a micro-batch for its backward."""
        return kept_with_loss(self.run, self.software)

    def stages(self) -> tuple[Amounts, ...]:
        """For each stage the bytes of its weights, gradient and optimizer state."""
        return swapped_amounts(self.run, self.software)


def device_type(placed: Placed, knobs: Knobs) -> Literal["cpu", "cuda"]:
    """The device type that a run's schedule is made for: that of training, which does not read the cluster."""
    return knobs.keeps_as or ("cuda" if placed.cluster.device.is_gpu else "cpu")


def placing_sizes(placed: Placed, knobs: Knobs) -> ClosedSizes:
    """Bytes by which a run's schedule is made, on the device type that it is made for."""
    return ClosedSizes.of(placed.run, placed.software, is_gpu=device_type(placed, knobs) == "cuda")


def sizes_in_training(config: RunConfig) -> ClosedSizes:
    """Closed forms of the bytes of the stages of a run, as ``pipeloom train`` executes it on any machine.

    Args:
        config: without problems, with the sizes of its model.

    Raises:
        UserError: they do not support its dtype.
    """
    precision = precision_of(config.training.known_dtype)
    if precision is None:
        raise UserError(f"training.dtype {config.training.known_dtype} has no closed forms of bytes; use float32")
    software = with_update_of(load_software("pipeloom"), config)
    run = described_run(config, precision)
    run = with_alike_stages(run, software) if config.swaps_stages else run
    return ClosedSizes.of(run, software, is_gpu=config.training.device == "cuda")
