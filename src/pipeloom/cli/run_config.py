"""``[CONFIG] [--section.field value ...]`` -> a configuration, with all of its problems at once."""

from pathlib import Path

import tyro

from pipeloom.config import RunConfig
from pipeloom.config_file import read_run_file
from pipeloom.errors import ConfigError


def parse_run_config(words: list[str], command: str, summary: str, default: RunConfig | None = None) -> RunConfig:
    """Read the file, if the first word names one, then the flags over it.

    Args:
        words: of the command line, behind the command.
        command: its name.
        summary: a line for people.
        default: where neither file nor flags say anything.

    Raises:
        ConfigError: everything that is wrong, in the file and in the values.
        UserError: the file cannot be read.
        SystemExit: a flag is unknown or malformed (status 2, with a suggestion), or help was asked for.
    """
    config, source = default or RunConfig(), "the command line"
    problems: list[str] = []
    if words and not words[0].startswith("-"):
        config, problems = read_run_file(Path(words[0]), config)
        words, source = words[1:], words[0]
    try:
        config = tyro.cli(
            RunConfig,
            args=words,
            default=config,
            prog=f"pipeloom {command} [CONFIG]",
            description=f"{summary}\n\nCONFIG is a TOML file with sections and fields as below; flags go over it.",
        )
    except SystemExit as end:
        problems += config.problems() if end.code else []
        if not problems:
            raise
        raise ConfigError(problems, f"beside the flags above, {source}") from None
    problems = [*problems, *config.problems()]
    if problems:
        raise ConfigError(problems, source)
    return config
