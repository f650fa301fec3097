"""``pipeloom export``: the weights of a checkpoint as safetensors files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, UNCHECKED, can_be_checked, find_checkpoint
from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.errors import ConfigError
from pipeloom.workload.limits import Common, Positive


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom export``.

    Parameters are written whole, whatever the layout of the run, and without the optimizer's state.
    """

    checkpoint: Annotated[Path, Place("CHECKPOINT")]
    """A checkpoint, or a run folder for its newest one."""
    output: Annotated[Path, Place("FOLDER"), Output("folder")]
    """Folder for the files; made if it does not exist."""
    dtype: Common[Literal["float32", "bfloat16", "float16", "float64"] | None] = None
    """Data type of the written weights. None: that of the checkpoint."""
    file_gb: Common[Positive] = 5.0
    """Most GB (10^9 bytes) of one file. Several files get an index."""


COMMAND = Command(
    name="export",
    options=Options,
    examples={
        "pipeloom export outputs/demo weights": "the newest checkpoint of a run",
        "pipeloom export outputs/demo weights --dtype bfloat16": "in another data type",
    },
)


def _kind(file: Path) -> str:
    return "tokenizer " if file.name == TOKENIZER else "weights   "


def run(words: list[str]) -> int:
    """Parse the arguments, write the files, print their paths."""
    options, problems = read_flags(COMMAND, words)
    checkpoint = or_note(lambda: find_checkpoint(options.checkpoint), problems)
    if problems or checkpoint is None:
        raise ConfigError(problems, SOURCE)

    from pipeloom.training.export import export_weights

    files = export_weights(checkpoint, options.output, dtype=options.dtype, file_bytes=round(options.file_gb * 1e9))
    remark = "" if can_be_checked(checkpoint) else f" ({UNCHECKED})"
    print("\n".join([f"checkpoint {checkpoint}{remark}", *(f"{_kind(file)} {file}" for file in files)]))
    return 0
