"""``pipeloom tokenize``: text in, a folder of tokens out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.cli.flags import SOURCE, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.config import DataConfig, RunConfig, find_problems
from pipeloom.errors import ConfigError
from pipeloom.terminal.words import quoted
from pipeloom.workload.limits import Common, Count, Limits


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom tokenize``.

    A run reads the folder with --data.path FOLDER --data.tokenizer FOLDER (bytes needs no tokenizer). After an
    interruption the same command continues; finished parts are in a folder next to it. Megatron-LM reads FOLDER/tokens.
    """

    text: Annotated[Path, Place("TEXT")]
    """File of text or records, or a folder of them, as data.path."""
    output: Annotated[Path, Place("FOLDER"), Output("folder")]
    """Folder for the tokens; it must not exist."""
    tokenizer: Common[Literal["bytes", "bpe"] | Path] = "bytes"
    """Bytes, byte-pair encoding trained on the text, or a tokenizer.json or a Hugging Face folder with one."""
    bpe_vocab_size: Annotated[int, Limits(least=257)] = 4096
    """Vocabulary size of the byte-pair encoding; with tokenizer bpe only."""
    field: Common[str] = "text"
    """Name of the text in each record: a key of JSON lines, or a column."""
    validation_fraction: Annotated[float, Limits(above=0, most=1)] = 0.05
    """Fraction of the text that is held out for validation."""
    workers: Common[Count | None] = None
    """Processes. None: one for each core, or one for a text below 64 MiB."""
    quiet: bool = False
    """Print no progress."""


COMMAND = Command(
    name="tokenize",
    options=Options,
    examples={
        "pipeloom tokenize web.jsonl tokens --tokenizer bpe": "train a tokenizer on the text and encode it",
        "pipeloom tokenize web/ web-tokens --tokenizer llama/": "with a tokenizer of a Hugging Face folder",
    },
)


def run(words: list[str]) -> int:
    """Parse the arguments, write the folder, print what it has."""
    options, problems = read_flags(COMMAND, words)
    config = DataConfig(
        path=options.text,
        tokenizer=options.tokenizer,
        bpe_vocab_size=options.bpe_vocab_size,
        field=options.field,
        validation_fraction=options.validation_fraction,
    )
    problems += [one for one in find_problems(RunConfig(data=config)) if one.startswith("data.")]
    if problems:
        raise ConfigError(problems, SOURCE)
    from pipeloom.data.prepared import tokenize_text

    written = tokenize_text(config, options.output, options.workers, is_quiet=options.quiet)
    name = options.output if options.tokenizer != "bytes" else "bytes"
    flags = quoted("--data.path", options.output, "--data.tokenizer", name)
    print(f"{written}\nwritten to {options.output}; train on it with {flags}")
    return 0
