"""The settings of a run: frozen dataclasses, whose defaults run files and flags override."""

from pipeloom.config.hyperparameters import (
    hyperparameter_problems,
    training_problems,
    unset,
    usual_values,
    with_demo_hyperparameters,
    with_pretrained,
)
from pipeloom.config.problems import decided_problems, find_problems, in_order
from pipeloom.config.run import RunConfig, run_part, to_dict
from pipeloom.config.sections import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    MachineConfig,
    OptimizerConfig,
    OutputConfig,
    RestartConfig,
    ScheduleConfig,
    SourceConfig,
    TrainingConfig,
)
from pipeloom.workload.model import ModelConfig

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "DataConfig",
    "MachineConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OutputConfig",
    "RestartConfig",
    "RunConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TrainingConfig",
    "decided_problems",
    "find_problems",
    "hyperparameter_problems",
    "in_order",
    "run_part",
    "to_dict",
    "training_problems",
    "unset",
    "usual_values",
    "with_demo_hyperparameters",
    "with_pretrained",
]
