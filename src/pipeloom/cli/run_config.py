"""``[CONFIG] [--section.setting value ...]`` -> a configuration, with all of its problems at once."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple

from pipeloom.catalog.model_files import CONFIG_JSON
from pipeloom.checkpoint.checkpoint_folder import TOKENIZER, find_checkpoint, is_hugging_face
from pipeloom.cli.flags import SOURCE, Words, read_words
from pipeloom.cli.reference import RUN_FIELD, Command, Options_, all_but, options_of
from pipeloom.config import OptimizerConfig, RunConfig, ScheduleConfig, decided_problems, in_order
from pipeloom.config.file import open_run_file, without_stale_sizes
from pipeloom.config.resumed import run_file_of
from pipeloom.errors import ConfigError, UserError
from pipeloom.families import AUTO, FAMILIES
from pipeloom.predict.describe import completed, pretrained_run
from pipeloom.runs.run_folder import CONFIG
from pipeloom.system.files import exists
from pipeloom.workload.dtypes import dtype_of
from pipeloom.workload.optimizers import OPTIMIZERS

PREDICTIONS = (
    *("model", "layout", "schedule", "machine", "data.seq_len", "data.tokenizer", "data.bpe_vocab_size"),
    "data.attention",
    *("optimizer.name", "optimizer.clip_grad_norm", "optimizer.clip", "optimizer.update", "optimizer.wide_weights"),
    "optimizer.outer_delayed",
    *("training.dtype", "training.matmul_dtype", "training.device", "training.freeze_layers"),
    *("adapter.rank", "adapter.targets"),
)
"""Settings that predictions of a run read: sections and single ones. A flag of another setting is refused."""
VERIFICATION = (
    *("model", "data", "layout", "schedule", "optimizer.name", "optimizer.clip_grad_norm", "optimizer.clip"),
    "optimizer.update",
    *("training.dtype", "training.device", "training.threads", "training.seed", "training.compile"),
    *("training.compile_backend", "training.run_ahead", "training.stall_timeout_s", "training.freeze_layers"),
    "training.z_loss",
    *("adapter.rank", "adapter.targets", "adapter.alpha"),
)
"""The same for gradients that are verified, which takes no optimizer's step."""
EVALUATION = (
    "data",
    *all_but("layout", "token_slices", "recompute", "recompute_layers", "average_every", "boundary"),
    *("schedule.placement", "schedule.receive_buffers", "schedule.residency", "schedule.prefetch"),
    *("schedule.device_budget", "schedule.swap_folder"),
    *("training.dtype", "training.device", "training.threads", "training.run_ahead", "training.stall_timeout_s"),
)
"""The same for a trained model that is evaluated: forwards of whole sequences, whose messages have no code."""
TRAINING = (
    *("model", "data", "layout", "schedule", "optimizer", "adapter", "training", "checkpoint", "restart", "output"),
)
"""The same for a run that is trained, which happens on the machine where it is started."""


class Parsed(NamedTuple, Generic[Options_]):
    """What words set.

    Attributes:
        options: the configuration, without problems, and the command's own options.
        file: the run file that was read, that of the folder for the folder of a run; ``None`` without one.
        flags: names of the settings that flags set, such as ``data.path``.
        is_resumed: whether the run file is that of the run which ``checkpoint.resume`` names, for want of another one.
    """

    options: Options_
    file: Path | None
    flags: frozenset[str]
    is_resumed: bool = False


def parse_config(
    command: Command[Options_], words: Sequence[str], judge: Callable[..., list[str]] = decided_problems
) -> Options_:
    """The options of ``parse_words``."""
    return parse_words(command, words, judge).options


def parse_words(
    command: Command[Options_], words: Sequence[str], judge: Callable[..., list[str]] = decided_problems
) -> Parsed[Options_]:
    """Read the run file, if there is one, and the flags over it; take the model's sizes from its source.

    Without a run file, a run that resumes has that of the run which wrote its checkpoint.

    Args:
        command: its options are a ``RunConfig``, or one with more fields.
        words: after the command.
        judge: returns what is wrong with a configuration; called with ``is_model_known``.

    Raises:
        ConfigError: everything that is wrong, in the file, in the flags and in the values.
        SystemExit: help was printed.
    """
    file = command.default or RunConfig()
    source, is_read, of_file, given = SOURCE, True, list[str](), frozenset[str]()
    read: Path | None = None

    def open_file(path: Path) -> list[str]:
        nonlocal file, source, read, is_read, of_file, given
        run_file = _file_of_run(path)
        try:
            if run_file is None and command.needs_run:
                file = _pretrained(path, file)
            else:
                read = run_file or path
                file, of_file, given = open_run_file(read, file)
                file = _without_missing_plugins(_with_stored_model(file, path)) if command.needs_run else file
        except UserError as error:
            is_read = False
            return [str(error)]
        source = source_of(path, words)
        return []

    found = read_words(command, words, open_file)
    resume: Path | None = found.values.get("checkpoint.resume")
    own = None if resume is None or RUN_FIELD in found.values else run_file_of(resume)
    if own is not None:
        found.problems += open_file(own)
    config = without_stale_sizes(_over(file, found), file)
    problems = found.problems
    # Judging defaults instead of a file that cannot be read would report what is not wrong.
    if is_read:
        config, values = completed(config, judge, given | found.values.keys())
        # What follows from a wrong flag is not a problem of its own.
        problems += in_order([*of_file, *(one for one in values if not any(name in one for name in found.wrong))])
    if problems:
        raise ConfigError(problems, source)
    more = {option.name: found.values.get(option.name, option.default) for option in options_of(command)}
    more = {name: value for name, value in more.items() if "." not in name and name in command.options.__annotations__}
    options = command.options(**{item.name: getattr(config, item.name) for item in fields(RunConfig)}, **more)
    return Parsed(options, read, frozenset(found.values), is_resumed=own is not None)


def _pretrained(path: Path, default: RunConfig) -> RunConfig:
    """The configuration of a Hugging Face folder in the place of a run's.

    Raises:
        UserError: it is none, or cannot be read.
    """
    if not is_hugging_face(path):
        kinds = f"of a run, with {CONFIG} and checkpoints, or of Hugging Face, with {CONFIG_JSON} and safetensors"
        raise UserError(f"RUN must be the folder {kinds}, found {path}")
    return pretrained_run(path, default)


def _with_stored_model(config: RunConfig, run: Path) -> RunConfig:
    """The run's configuration with its newest checkpoint, which has the model, if the file of its model is gone.

    Raises:
        UserError: there is no checkpoint.
    """
    file = config.model.file
    if file is None or exists(file):
        return config
    return replace(config, checkpoint=replace(config.checkpoint, resume=find_checkpoint(run)))


def _without_missing_plugins(config: RunConfig) -> RunConfig:
    """The configuration of a run with defaults for an optimizer or a family of schedules that is not installed.

    What reads a trained model runs forwards alone: weights and losses depend on neither.
    """
    schedule = config.schedule
    if config.optimizer.name not in OPTIMIZERS:
        config = replace(config, optimizer=OptimizerConfig())
    if schedule.family != AUTO and schedule.family not in FAMILIES:
        kept = ScheduleConfig(device_budget=schedule.device_budget, swap_folder=schedule.swap_folder)
        config = replace(config, schedule=kept)
    return config


def starts_from_folder(config: RunConfig) -> bool:
    """Whether the weights of a run are those of a Hugging Face folder."""
    init = config.checkpoint.init
    return init is not None and is_hugging_face(init)


def tokenizer_problems(config: RunConfig) -> list[str]:
    """The problem of a Hugging Face folder that is used as it is, without a tokenizer."""
    if not starts_from_folder(config) or config.data.tokenizer is not None:
        return []
    which = f"to one, to a folder with one, or to bytes, since {config.checkpoint.init} has no {TOKENIZER}"
    return [f"data.tokenizer must be set {which}"]


def _file_of_run(path: Path) -> Path | None:
    """The run file in a run folder; ``None`` if the path is none."""
    with suppress(OSError):  # such as a name that is too long
        return path / CONFIG if (path / CONFIG).is_file() else None
    return None


def source_of(path: Path, words: Sequence[str]) -> str:
    """The headline of a message about a run file and the words after the command."""
    return str(path) if len(words) == 1 else f"{path} with the flags over it"


def _over(config: RunConfig, found: Words) -> RunConfig:
    """The configuration with the settings that words give."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in found.values.items():
        if "." in name:
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
    if "path" in sections.get("data", {}):  # one text instead of the several of a run file
        sections["data"]["sources"] = None
    return replace(
        config, **{section: replace(getattr(config, section), **values) for section, values in sections.items()}
    )


def dtype_words(precision: str, products: str | None = None, *, is_default: bool) -> str:
    """A run's type of weights and activations, and whether it is the default."""
    default = " (the devices' default)" if is_default else ""
    return dtype_of(precision) + default + (f" with {products} linear layers" if products else "")
