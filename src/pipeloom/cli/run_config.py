"""``[CONFIG] [--section.setting value ...]`` -> a configuration, with all of its problems at once."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pipeloom.cli.flags import SOURCE, Words, read_words
from pipeloom.cli.reference import Command, Options_, options_of
from pipeloom.config import RunConfig, find_problems
from pipeloom.config.file import read_run_file
from pipeloom.errors import ConfigError, UserError
from pipeloom.predict.describe import machine_problems, with_model_sizes
from pipeloom.terminal.words import count
from pipeloom.workload.dtypes import dtype_of

PREDICTIONS = (
    *("model", "layout", "schedule", "machine", "data.seq_len", "data.tokenizer", "data.bpe_vocab_size"),
    *("optimizer.name", "optimizer.clip_grad_norm", "training.dtype", "training.device"),
)
"""Settings that predictions of a run read: sections and single ones. A flag of another setting is refused."""
VERIFICATION = ("model", "data", "layout", "schedule", "optimizer", "training")
TRAINING = (*VERIFICATION, "checkpoint", "output")
"""The same for a run that is trained, which happens on the machine where it is started."""


def described_problems(config: RunConfig, *, is_model_known: bool) -> list[str]:
    """What is wrong with a run that is described to the cost model and not trained here; for ``parse_config``."""
    return [*find_problems(config, trains=False, is_model_known=is_model_known), *machine_problems(config)]


def parse_config(
    command: Command[Options_], words: Sequence[str], judge: Callable[..., list[str]] = find_problems
) -> Options_:
    """Read the run file, if there is one, and the flags over it; take the model's sizes from its source.

    Args:
        command: its options are a ``RunConfig``, or one with more fields.
        words: behind the command.
        judge: returns what is wrong with a configuration; called with ``is_model_known``.

    Raises:
        ConfigError: everything that is wrong, in the file, in the flags and in the values.
        SystemExit: help was printed.
    """
    file = command.default or RunConfig()
    source, is_read = SOURCE, True

    def open_file(path: Path) -> list[str]:
        nonlocal file, source, is_read
        source = str(path) if len(words) == 1 else f"{path} with the flags over it"
        try:
            file, problems = read_run_file(path, file)
        except UserError as error:
            is_read = False
            return [str(error)]
        return problems

    found = read_words(command, words, open_file)
    config = _without_stale_sizes(_over(file, found), file)
    problems = found.problems
    # Judging defaults instead of a file that cannot be read would report what is not wrong.
    if is_read:
        config, unknown = with_model_sizes(config)
        values = [*unknown, *judge(config, is_model_known=not unknown)]
        # What follows from a wrong flag is not a problem of its own.
        problems += [one for one in values if not any(name in one for name in found.wrong)]
    if problems:
        raise ConfigError(problems, source)
    own = {option.name: found.values.get(option.name, option.default) for option in options_of(command)}
    own = {name: value for name, value in own.items() if "." not in name and name != "config"}
    return command.options(**{item.name: getattr(config, item.name) for item in fields(RunConfig)}, **own)


def _over(config: RunConfig, found: Words) -> RunConfig:
    """The configuration with the settings that words give."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in found.values.items():
        section, dot, key = name.partition(".")
        if dot:
            sections.setdefault(section, {})[key] = value
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()}
    )


def dtype_words(precision: str, *, is_default: bool) -> str:
    """A run's type of weights and activations, and whether nobody chose it."""
    return dtype_of(precision) + (" (the devices' default)" if is_default else "")


def other_axes(config: RunConfig) -> str:
    """What tensor and data parallelism add to the pipeline; nothing without them."""
    layout = config.layout
    tensor = f", each by {layout.tp} tensor-parallel ranks" if layout.tp > 1 else ""
    tensor += " (sequence too)" if layout.sequence_parallel else ""
    if layout.dp == 1:
        return tensor
    copies = f", {layout.replicate} copies" if layout.replicate is not None else ""
    return f"{tensor}; {count(layout.dp, 'replica')}, shard {layout.shard}{copies}"


def _without_stale_sizes(config: RunConfig, file: RunConfig) -> RunConfig:
    """The configuration without what the file derived from sizes that flags have changed.

    The file of a run folder names its partition and its group size, and a checkpoint goes on under any layout.
    """
    new, old = config.layout, file.layout
    if new.num_stages != old.num_stages and new.partition == old.partition:
        config = replace(config, layout=replace(new, partition=None))
    # A group of old.pp was the default that the run filled in; any other size was chosen.
    if new.pp != old.pp and config.schedule.group_size == file.schedule.group_size == old.pp:
        config = replace(config, schedule=replace(config.schedule, group_size=None))
    return config
