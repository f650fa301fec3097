"""``[CONFIG] [--section.field value ...]`` -> a configuration, with all of its problems at once."""

import re
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from pipeloom.cli.flags import parse_flags
from pipeloom.config import RunConfig, find_problems, run_part
from pipeloom.config.file import RETIRED, read_run_file, without_stale_sizes
from pipeloom.config.paths import with_home
from pipeloom.errors import ConfigError
from pipeloom.predict.describe import completed
from pipeloom.workload.dtypes import dtype_of

_Config = TypeVar("_Config", bound=RunConfig)
_CONFIG = (
    "CONFIG is a TOML file with sections and fields as below; flags go over it. Relative paths begin at the file's "
    "folder, those of flags at the current one."
)


def parse_run_config(words: list[str], command: str, summary: str, default: RunConfig | None = None) -> RunConfig:
    """The configuration of a run that is trained here; see ``parse_config``."""
    return parse_config(words, command, summary, default or RunConfig(), find_problems)


def parse_config(
    words: list[str], command: str, summary: str, default: _Config, judge: Callable[..., list[str]]
) -> _Config:
    """Read the file that the first word names, if any, then the flags over it; take the model's sizes from its source.

    Args:
        words: of the command line, behind the command.
        command: its name.
        summary: a line for people.
        default: for settings that neither file nor flags set; its type is that of the result.
        judge: what is wrong with a configuration; called with ``is_model_known``.

    Raises:
        ConfigError: everything that is wrong, in the file, in the flags and in the values.
        UserError: the file cannot be read.
        SystemExit: for --help.
    """
    config, source = default, "the command line"
    problems: list[str] = []
    # A file comes first: behind a flag, a word may be the value of that flag.
    if words and not words[0].startswith("-"):
        run, problems = read_run_file(Path(words[0]), run_part(config))
        config = replace(config, **{item.name: getattr(run, item.name) for item in fields(run)})
        words, source = words[1:], words[0]
    # Path(".") is also how an empty path reads; a shell's "here" gets its name.
    words = [_named(word) for word in words]
    if words:
        refuse_retired(words, {f"--{name}": what for name, what in RETIRED.items()}, command)
        words, found = _without_truths(words, config)
        problems += [*found, *_unused_flags(words, command)]
        given = config
        config = parse_flags(
            type(given),
            words,
            f"{command} [CONFIG]",
            f"{summary}\n\n{_CONFIG}",
            default=given,
            # Lazily: it reads the model's file, and is only wanted where the flags are wrong.
            beside=lambda: [*problems, *completed(given, judge)[1]],
            source=source if source == "the command line" else f"{source} with the flags over it",
        )
        config = without_stale_sizes(config, given)
    # A shell expands ~ at the beginning of a word, not in --data.path=~/text.
    config, found = completed(with_home(config), judge)
    problems = [*problems, *found]
    if problems:
        raise ConfigError(problems, source)
    return config


def refuse_retired(words: list[str], retired: dict[str, str], command: str) -> None:
    """Refuse flags that there were.

    Args:
        words: of the command line.
        retired: a flag -> what to use instead.
        command: that takes it no longer.

    Raises:
        ConfigError: naming each of them.
    """
    given = {word.partition("=")[0].replace("_", "-") for word in words}
    problems = [f"{command} has no flag {flag} any more; {what}" for flag, what in retired.items() if flag in given]
    if problems:
        raise ConfigError(problems, "the command line")


_USED_BY = {
    "predictions": (
        *("model", "layout", "schedule", "machine", "data.seq-len", "data.tokenizer", "data.bpe-vocab-size"),
        *("optimizer.name", "optimizer.clip-grad-norm", "training.dtype", "training.device"),
    ),
    "training": ("model", "data", "layout", "schedule", "optimizer", "training", "checkpoint", "output"),
}
"""What commands do -> the settings that they read. A run file is for all commands; a flag is for one."""
_DOES = {"simulate": "predictions", "slices": "predictions", "train": "training", "verify": "training"}


def _unused_flags(words: list[str], command: str) -> list[str]:
    """A sentence for each flag of a setting that the command does not read."""
    if command not in _DOES:
        return []
    used = tuple(f"{name}." for name in _USED_BY[_DOES[command]])  # the dot ends a section, or the whole name
    flags = [word.partition("=")[0].replace("_", "-") for word in words if re.match(r"--[\w-]+\.\w", word)]
    names = {flag: f"{flag.removeprefix('--').replace('.no-', '.')}." for flag in flags}
    return [
        f"{flag} has no effect on {command}; leave it out (a run file may have the setting for other commands)"
        for flag, name in names.items()
        if not name.startswith(used)
    ]


def dtype_words(precision: str, *, is_default: bool) -> str:
    """A run's type of weights and activations, and whether nobody chose it."""
    return dtype_of(precision) + (" (the devices' default)" if is_default else "")


def _without_truths(words: list[str], config: RunConfig) -> tuple[list[str], list[str]]:
    """The words without values of flags that take none, and a sentence for each of these."""
    is_given = [_is_truth(flag, word, config) for flag, word in pairwise(["", *words])]
    problems = [
        f"{flag} takes no value: write {flag} for true, {'.no-'.join(flag.rsplit('.', 1))} for false"
        for flag, is_followed in zip(words, is_given[1:], strict=False)
        if is_followed
    ]
    return [word for word, is_extra in zip(words, is_given, strict=True) if not is_extra], problems


def _named(word: str) -> str:
    """A word, or ``--flag=word``, with the current folder by its name."""
    flag, is_joined, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    return f"{flag}{is_joined}{Path.cwd()}" if value and Path(value) == Path() else word


def _is_truth(flag: str, word: str, config: RunConfig) -> bool:
    """Whether a word is the value of a flag that takes none, such as ``--schedule.balance true``."""
    section, _, name = flag.removeprefix("--").replace("-", "_").partition(".")
    return word.lower() in ("true", "false") and isinstance(
        getattr(getattr(config, section, None), name or "-", None), bool
    )
