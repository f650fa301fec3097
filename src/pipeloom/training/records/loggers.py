"""Metrics of a run in the formats of other programs: TensorBoard, Weights & Biases, MLflow.

The run folder's ``metrics.jsonl`` has the same numbers and is complete; a logger that fails is left out with a warning,
and the run continues.
"""

import os
import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, Self

from pipeloom.config import RunConfig
from pipeloom.config.file import to_dict
from pipeloom.config.sections import LogName
from pipeloom.errors import reason_of
from pipeloom.terminal.guard import print_warning

_WANDB_ID = "wandb-id.txt"


class Logger(Protocol):
    """Takes the metrics of a run."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers of a step by name."""

    def close(self) -> None:
        """Send or write everything that is buffered."""


class MetricLog:
    """The logger of a run, on rank 0; without ``output.log`` it does nothing.

    Args:
        config: of the run.
        folder: of the run.
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._name = config.output.log
        self._logger: Logger | None = None

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Log a line of metrics with its ``step``; an element of a list as ``NAME/rank INDEX``, a text as 1."""
        if self._name is None:
            return
        values: dict[str, float] = {}
        for name, given in metrics.items():
            value = 1.0 if isinstance(given, str) else given
            is_list = isinstance(value, list)
            values |= {f"{name}/rank {n}": one for n, one in enumerate(value)} if is_list else {name: value}
        step = int(values.pop("step"))
        try:
            if self._logger is None:
                # With the first line: until a step has ended, nothing in the folder changes.
                self._logger = _LOGGERS[self._name](self._config, self._folder, step)
            self._logger.add(step, values)
        except Exception as error:  # a server that is not there, a missing login or a full disk must not end a run
            self._stop(error)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the log, also after a failure: the last steps are buffered."""
        if self._logger is not None:
            try:
                self._logger.close()
            except Exception as error:
                self._stop(error)

    def _stop(self, error: Exception) -> None:
        text = f"output.log {self._name} stopped: {reason_of(error)}; metrics.jsonl has all metrics"
        self._logger = self._name = None
        print_warning(text)


class _TensorBoard:
    """Event files in ``tensorboard/`` of the run folder."""

    def __init__(self, config: RunConfig, folder: Path, first_step: int) -> None:
        del config
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases, named as the run folder; WANDB_* variables set the rest."""

    def __init__(self, config: RunConfig, folder: Path, first_step: int) -> None:
        del first_step
        wandb: Any = import_module("wandb")
        # The same id for each process of a run in this folder, so that it has one history.
        file = folder / _WANDB_ID
        if not file.exists():
            file.write_text(secrets.token_hex(8), encoding="utf-8")
        settings = {"id": file.read_text(encoding="utf-8"), "name": folder.name, "resume": "allow", "dir": str(folder)}
        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", "pipeloom"), config=to_dict(config), **settings)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow, named as the run folder; MLFLOW_* variables name server and experiment."""

    def __init__(self, config: RunConfig, folder: Path, first_step: int) -> None:
        del first_step
        mlflow: Any = import_module("mlflow")

        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri((folder / "mlruns").absolute().as_uri())
        mlflow.start_run(run_name=folder.name)
        mlflow.log_dict(to_dict(config), "config.json")
        self._mlflow = mlflow

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


_LOGGERS: Mapping[LogName, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow}
