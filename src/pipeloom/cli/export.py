"""``pipeloom export``: the weights of a checkpoint as safetensors files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.catalog.model_files import CONFIG_JSON
from pipeloom.checkpoint.checkpoint_choice import choose_checkpoint, reading
from pipeloom.checkpoint.checkpoint_folder import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    UNCHECKED,
    can_be_checked,
)
from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.errors import ConfigError
from pipeloom.workload.limits import Common, Positive


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom export``.

    Writes whole parameters, for any layout of the run, without optimizer state.
    """

    checkpoint: Annotated[Path, Place("CHECKPOINT")]
    """A checkpoint, or a run folder for its newest one."""
    output: Annotated[Path, Place("FOLDER"), Output("folder")]
    """Folder for the files; it is created if it does not exist."""
    format: Common[Literal["pipeloom", "hf"]] = "pipeloom"
    """Names of the tensors. pipeloom: its own. hf: a Hugging Face folder with config.json, which from_pretrained of
    transformers loads; a run that started from such a folder gets its files again, with the trained weights."""
    dtype: Common[Literal["float32", "bfloat16", "float16", "float64"] | None] = None
    """Data type of the written weights. None: that of the checkpoint, or with format hf that of the folder that the run
    started from."""
    merge: Common[bool] = False
    """Of a run with adapters, the weights with the adapters added, and no adapters. Otherwise format pipeloom has both,
    and hf is a folder of PEFT with the adapters alone."""
    file_gb: Common[Positive | None] = None
    """Maximum size of one file in GB (10^9 bytes). Several files get an index. None: 5, or with format hf the
    division of the folder that the run started from."""


COMMAND = Command(
    name="export",
    options=Options,
    examples={
        "pipeloom export outputs/demo weights": "the newest checkpoint of a run",
        "pipeloom export outputs/demo weights --dtype bfloat16": "in another data type",
        "pipeloom export outputs/demo folder --format hf": "for Hugging Face's transformers",
        "pipeloom export outputs/tuned folder --format hf --merge": "with the adapters of the run in its weights",
    },
)


def _kind(file: Path) -> str:
    """A word for a file, as wide as ``checkpoint``."""
    from pipeloom.training.conversions.export_content import PEFT_CONFIG

    if file.suffix == ".safetensors":
        return "weights   "
    words = {
        TOKENIZER: "tokenizer ",
        TOKENIZER_CONFIG: "tokenizer ",
        CONFIG_JSON: "model     ",
        PEFT_CONFIG: "adapter   ",
    }
    return words.get(file.name, "index     " if file.name.endswith(".index.json") else "text      ")


def run(words: list[str]) -> int:
    """Parse the arguments, write the files, print their paths."""
    options, problems = read_flags(COMMAND, words)
    choice = or_note(lambda: choose_checkpoint(options.checkpoint), problems)
    if problems or choice is None:
        raise ConfigError(problems, SOURCE)
    checkpoint = choice.path
    choice.print_remarks()

    from pipeloom.training.conversions.export import export_checkpoint

    file_bytes = None if options.file_gb is None else round(options.file_gb * 1e9)
    with reading(checkpoint):
        files = export_checkpoint(
            checkpoint,
            options.output,
            format=options.format,
            dtype=options.dtype,
            file_bytes=file_bytes,
            merge=options.merge,
        )
    remark = "" if can_be_checked(checkpoint) else f" ({UNCHECKED})"
    print("\n".join([f"checkpoint {checkpoint}{remark}", *(f"{_kind(file)} {file}" for file in files)]))
    return 0
