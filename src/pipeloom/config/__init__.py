"""What a run is told: frozen dataclasses, the one truth. Files and flags only override them."""

from pipeloom.config.run import RunConfig, to_dict
from pipeloom.config.sections import (
    CheckpointConfig,
    DataConfig,
    MachineConfig,
    ModelConfig,
    OptimizerConfig,
    OutputConfig,
    ScheduleConfig,
    TrainingConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "MachineConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OutputConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainingConfig",
    "to_dict",
]
