"""Folders of checkpoints without tensors, for whoever only looks for them."""

from pathlib import Path

from pipeloom.checkpoint_folder import FOLDER, INFO, METADATA, CheckpointInfo, name_of


def info_of(step: int) -> CheckpointInfo:
    """What a checkpoint of a step says beside its tensors."""
    return CheckpointInfo(step, 8 * step, 64 * step, {"num_layers": 4}, {"text": "abc"}, {"pp": 2}, {"pipeloom": "0"})


def write_checkpoint(run: Path, step: int) -> Path:
    """A complete checkpoint of a run, as far as one can see without reading tensors."""
    path = run / FOLDER / name_of(step)
    path.mkdir(parents=True)
    (path / INFO).write_text(info_of(step).to_json())
    (path / METADATA).write_bytes(b"")
    return path
