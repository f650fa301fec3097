"""Where checkpoints lie and what is said beside them; nothing here needs the tensors.

    RUN/checkpoints/step-000100/
        checkpoint.json     what ``CheckpointInfo`` holds
        .metadata           of torch.distributed.checkpoint: which box of which tensor lies where
        __0_0.distcp, ...   what each rank wrote

A checkpoint is written under a hidden name and then renamed, so one with its name is complete.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeloom.errors import UserError

FOLDER = "checkpoints"
INFO = "checkpoint.json"
METADATA = ".metadata"
_FORMAT = 1
_PREFIX = "step-"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says about itself beside its tensors.

    Attributes:
        step: optimizer steps done.
        sequences: that these steps have read, over all replicas; the next batch begins behind them.
        tokens: in these sequences.
        model: every size of the model, as ``ModelConfig`` names them.
        data: what decides the order of the batches.
        layout: that wrote it; any other may read it.
        versions: of the programs that wrote it, by name.
    """

    step: int
    sequences: int
    tokens: int
    model: dict[str, Any]
    data: dict[str, Any]
    layout: dict[str, Any]
    versions: dict[str, str]

    def to_json(self) -> str:
        """As ``read_info`` reads it."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"


def name_of(step: int) -> str:
    """A checkpoint's folder in ``checkpoints/``."""
    return f"{_PREFIX}{step:06}"


def draft_of(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.part")


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest step first."""
    found = [path for path in (run / FOLDER).glob(f"{_PREFIX}*") if _lacks(path) == [] and _step_of(path) is not None]
    return sorted(found, key=lambda path: _step_of(path) or 0)


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in; ``None`` where it was put elsewhere."""
    folder = checkpoint.absolute().parent
    return folder.parent if folder.name == FOLDER else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the latest complete one of a run folder.

    Raises:
        UserError: there is none, or it is not complete.
    """
    if not path.is_dir():
        raise UserError(
            f"expected a run folder or a checkpoint, found {'a file' if path.exists() else 'nothing'} at {path}"
        )
    if (path / INFO).exists() or (path / METADATA).exists():
        missing = _lacks(path)
        if missing:
            raise UserError(f"the checkpoint {path} is not complete: it lacks {' and '.join(missing)}; use another one")
        return path
    found = list_checkpoints(path)
    if not found:
        drafts = sorted(draft.name for draft in (path / FOLDER).glob(f".{_PREFIX}*.part"))
        begun = f", only {', '.join(drafts)}, whose writing did not end" if drafts else ""
        raise UserError(f"expected a run folder or a checkpoint, found no complete checkpoint in {path}{begun}")
    return found[-1]


def read_info(checkpoint: Path) -> CheckpointInfo:
    """What a complete checkpoint says about itself.

    Raises:
        UserError: it cannot be read, or another version of pipeloom wrote it.
    """
    file = checkpoint / INFO
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or tree.pop("format", None) != _FORMAT:
            raise UserError(f"expected a checkpoint of format {_FORMAT}")
        return CheckpointInfo(**tree)
    except (OSError, ValueError, TypeError) as error:  # a UserError is a ValueError; a TypeError names wrong fields
        raise UserError(f"cannot read {file}: {error}") from error


def _lacks(checkpoint: Path) -> list[str]:
    """Files without which a checkpoint is not complete."""
    return [name for name in (METADATA, INFO) if not (checkpoint / name).is_file()]


def _step_of(checkpoint: Path) -> int | None:
    """The step in a folder's name."""
    digits = checkpoint.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() else None
