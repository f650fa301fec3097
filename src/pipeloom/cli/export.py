"""``pipeloom export``: the weights of a checkpoint as safetensors files."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, UNCHECKED, can_be_checked, find_checkpoint
from pipeloom.cli.flags import parse_flags
from pipeloom.errors import UserError
from pipeloom.terminal.words import and_finite


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write the weights of a checkpoint as safetensors files: whole parameters, without the optimizer's state."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint, or a run folder, which means its latest one."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Where the files go; made if it is not there."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Type of the written weights. None: as in the checkpoint."""
    file_gb: float = 5.0
    """Most gigabytes (10^9 bytes) of one file; several files get an index."""


def _kind(file: Path) -> str:
    return "tokenizer " if file.name == TOKENIZER else "weights   "


def run(words: list[str]) -> int:
    """Parse the arguments, write the files, print their paths."""
    options = parse_flags(Options, words, "export", Options.__doc__ or "")
    # Also refuses NaN, which compares with nothing.
    if not 0 < options.file_gb < math.inf:
        raise UserError(f"--file-gb must be {and_finite('above 0', options.file_gb)}, found {options.file_gb:g}")
    checkpoint = find_checkpoint(options.checkpoint)
    from pipeloom.training.export import export_weights

    files = export_weights(checkpoint, options.output, dtype=options.dtype, file_bytes=round(options.file_gb * 1e9))
    remark = "" if can_be_checked(checkpoint) else f" ({UNCHECKED})"
    print("\n".join([f"checkpoint {checkpoint}{remark}", *(f"{_kind(file)} {file}" for file in files)]))
    return 0
