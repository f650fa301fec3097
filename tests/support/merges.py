"""Command lines of merges, and the parameters of runs."""

from pathlib import Path

import torch

from pipeloom.checkpoint.checkpoint_folder import find_checkpoint
from pipeloom.training.checkpoints.storage import CheckpointReader
from pipeloom.training.conversions.export import stored_parameters


def merging(base: Path, folder: Path, *rest: Path | str) -> list[str]:
    """The words of a merge; of ``rest`` paths are models, and texts are flags."""
    models = [str(one) for one in rest if not isinstance(one, str)]
    flags = [one for one in rest if isinstance(one, str)]
    return ["convert", "merge", str(base), str(folder), "--models", *models, *flags]


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    """The parameters of the newest checkpoint of a run by name."""
    stored = stored_parameters(CheckpointReader(find_checkpoint(run)))
    return {name: stored.whole(name) for name in stored.shapes}
