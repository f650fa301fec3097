"""The model of a checkpoint, which does not depend on the files that its run was started from."""

from pathlib import Path

from pipeloom.checkpoint.checkpoint_folder import read_info
from pipeloom.errors import UserError
from pipeloom.workload.model import ModelConfig


def model_in(checkpoint: Path) -> ModelConfig:
    """The model of a complete checkpoint, by its sizes.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return ModelConfig(**read_info(checkpoint).model)
    except TypeError as error:
        raise UserError(f"cannot read the model of {checkpoint}: {error}") from None
