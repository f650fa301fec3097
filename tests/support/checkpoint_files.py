"""Folders of checkpoints without tensors, for whoever only looks for them."""

import json
from pathlib import Path

from pipeloom.checkpoint.checkpoint_folder import FOLDER, INFO, METADATA, CheckpointInfo, measure, name_of, write_info


def info_of(step: int) -> CheckpointInfo:
    """What a checkpoint of a step contains beside its tensors."""
    return CheckpointInfo(step, 8 * step, 64 * step, {"num_layers": 4}, {"text": "abc"}, {"pp": 2}, {"pipeloom": "0"})


def write_checkpoint(run: Path, step: int) -> Path:
    """A complete checkpoint of a run, as far as one can see without reading tensors."""
    path = run / FOLDER / name_of(step)
    path.mkdir(parents=True)
    files = [path / METADATA, path / "__0_0.distcp", path / "__1_0.distcp"]
    for number, file in enumerate(files):
        file.write_bytes(bytes(range(step % 100, step % 100 + 20 + number)))
    write_info(path, info_of(step), measure(files))
    return path


def without_hashes(checkpoint: Path) -> None:
    """Make a checkpoint one of the first format, which has no hashes of its files."""
    tree = json.loads((checkpoint / INFO).read_text())
    del tree["files"], tree["sha256"]
    (checkpoint / INFO).write_text(json.dumps({**tree, "format": 1}))
