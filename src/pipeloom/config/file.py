"""Reading and writing of run files (TOML). All problems of a file are reported together."""

import copy
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

from pipeloom.config import RunConfig, to_dict, unset, usual_values
from pipeloom.config.paths import table_of, with_absolute_paths
from pipeloom.errors import UserError
from pipeloom.system.files import parse_toml, read_text
from pipeloom.terminal.words import did_you_mean, has_line_break, or_one_of

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Config = TypeVar("_Config", bound=RunConfig)
RETIRED = {
    "machine.precision": "use training.dtype = 'float32', 'bfloat16' or 'float16', which predictions and training share"
}
"""Removed settings -> what to use instead."""


class RunFile(NamedTuple):
    """What a run file has.

    Attributes:
        config: with defaults in place of wrong settings.
        problems: a sentence for each.
        given: names of the settings that the file contains, such as ``model.num_layers``.
    """

    config: RunConfig
    problems: list[str]
    given: frozenset[str]


def settings_in(tree: Mapping[str, Any]) -> frozenset[str]:
    """Names of the settings in nested dictionaries."""
    return frozenset(
        f"{section}.{key}" for section, values in tree.items() if isinstance(values, Mapping) for key in values
    )


def read_run_file(path: Path, default: RunConfig | None = None) -> tuple[RunConfig, list[str]]:
    """The configuration and the problems of ``open_run_file``."""
    found = open_run_file(path, default)
    return found.config, found.problems


def open_run_file(path: Path, default: RunConfig | None = None) -> RunFile:
    """Read a run file. Its relative paths are relative to its folder.

    Args:
        path: a TOML file with the sections and keys of ``RunConfig``.
        default: values of settings that the file does not contain; without relative paths.

    Raises:
        UserError: it cannot be read, or is not TOML.
    """
    if path.is_dir():
        files = sorted(path.glob("*.toml"))
        raise UserError(
            f"cannot read the configuration {path}: expected a run file, found a folder"
            + (f"; did you mean '{files[0]}'?" if files else " without one")
        )
    tree = parse_toml(read_text(path, "the configuration"), path)
    config, problems = parse_run(tree, default)
    return RunFile(with_absolute_paths(config, path.parent), problems, settings_in(tree))


def parse_run(tree: dict[str, Any], default: RunConfig | None = None) -> tuple[RunConfig, list[str]]:
    """A configuration from nested dictionaries, and a sentence for each unknown key and wrong type."""
    from pydantic import ValidationError

    adapter = _adapter()
    # Wrong keys are removed from it below; the caller's tree stays as it is.
    tree = copy.deepcopy(tree)
    problems = _drop_unknown(tree, RunConfig, "")
    try:
        return adapter.validate_json(_json(default, tree), strict=True), problems
    except ValidationError as error:
        problems += _wrong_types(error.errors())
        for names in (item["loc"] for item in error.errors()):
            section = tree.get(str(names[0]))
            if len(names) > 1 and isinstance(section, dict):
                section.pop(str(names[1]), None)
            else:
                tree.pop(str(names[0]), None)
    # Again without the wrong settings, so that callers can check the values of the others for the same message.
    return adapter.validate_json(_json(default, tree), strict=True), problems


def _wrong_types(errors: Sequence[Any]) -> list[str]:
    """A sentence for each value of a wrong type, from pydantic's errors: one for each alternative of a type."""
    # A list with a wrong item is of no other alternative either.
    in_lists = {item["loc"][:2] for item in errors if _is_item(item)}
    wanted: dict[tuple[str, str], dict[str, None]] = {}
    for item in errors:
        # Section and setting; further parts are indices of a list or alternatives of a type.
        place, kind = item["loc"], item["type"]
        name = ".".join(map(str, place[:2]))
        one = item["ctx"]["expected"] if kind == "literal_error" else _WANTED.get(kind, item["msg"])
        if "sources" in place[1:2]:  # a list of tables: the place of one, and its key
            name += "".join(f"[{part + 1}]" if isinstance(part, int) else f".{part}" for part in place[2:])
            one = "given" if kind == "missing" else one
        elif _is_item(item):
            name = f"each of {name}"
        elif place[:2] in in_lists:
            continue
        wanted.setdefault((name, repr(item["input"])), {})[one] = None
    return [f"{name} must be {' or '.join(words)}, found {found}" for (name, found), words in wanted.items()]


def _is_item(error: Mapping[str, Any]) -> bool:
    """Whether an item of a list is wrong, not the number of them."""
    return isinstance(error["loc"][-1], int) and error["type"] != "missing"


@cache
def _adapter() -> "TypeAdapter[RunConfig]":
    from pydantic import TypeAdapter

    return TypeAdapter(RunConfig)  # takes about 30 ms


def without_stale_sizes(config: _Config, file: _Config) -> _Config:
    """Reset the settings of a run folder's file that follow from sizes which flags have changed.

    That file contains the partition, the group size and the number of micro-batches of its run, but a checkpoint can be
    resumed with any layout, and a new run may have another number of layers.
    """
    new, old = config.with_known_loops().layout, file.with_known_loops().layout
    is_other = new.num_stages != old.num_stages or config.model.num_layers != file.model.num_layers
    if is_other and new.partition == old.partition:
        config = replace(config, layout=replace(config.layout, partition=None))
    config = replace(config, layout=config.layout.with_most_microbatches(old))
    # A group of old.pp micro-batches was the default; the user chose any other size.
    if new.pp != old.pp and config.schedule.group_size == file.schedule.group_size == old.pp:
        config = replace(config, schedule=replace(config.schedule, group_size=None))
    return config


_WANTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text",
    "path_type": "text that names a path",
    "tuple_type": "a list",
    # The only list of a fixed length is optimizer.betas.
    "missing": "a list of two numbers",
    "too_long": "a list of two numbers",
    "dataclass_type": "a section",
    "value_error": "of its type",
}
"""pydantic's type of an error -> what was expected, in TOML's terms."""


def _json(default: RunConfig | None, tree: dict[str, Any]) -> str:
    """The settings of ``tree`` over those of ``default``, as JSON.

    From JSON, unlike from Python values, pydantic converts objects to dataclasses and lists to tuples in strict mode.
    """
    merged = to_dict(default or RunConfig())
    for section, values in tree.items():
        merged[section] = {**merged[section], **values} if isinstance(values, dict) else values
    # Paths become text.
    return json.dumps(merged, default=str)


def format_run(config: RunConfig) -> str:
    """The configuration as a run file, without defaults that another setting overrides.

    A line ``# SET`` marks each setting without which the run cannot train (``pipeloom.config.unset``).
    Paths are absolute, so that the file can be moved.
    """
    import tomli_w

    tree = to_dict(with_absolute_paths(config))
    if config.model.preset is not None or config.model.file is not None:
        defaults = to_dict(RunConfig())["model"]
        tree["model"] = {name: value for name, value in tree["model"].items() if value != defaults.get(name)}
    if config.layout.recompute_layers is not None and config.layout.recompute == "none":
        # A file with both is refused, since both set what is recomputed.
        del tree["layout"]["recompute"]
    # tomli_w writes each element on a line of its own; a partition of 64 stages is easier to read on one.
    text = re.sub(r"= \[\n((?: {4}.*,\n)+)\]", _in_a_line, tomli_w.dumps(tree))
    return _with_comments(text, config)


def _in_a_line(array: re.Match[str]) -> str:
    return f"= [{', '.join(line.strip().removesuffix(',') for line in array[1].splitlines())}]"


def _with_comments(text: str, config: RunConfig) -> str:
    """Add comments to the sections: settings that the user must set, and defaults that are not the model's recipe."""
    missing, usual = unset(config), usual_values(config)
    if usual is not None:
        comment = "\n".join(textwrap.wrap(usual, 118, initial_indent="# ", subsequent_indent="# "))
        text = text.replace("[optimizer]\n", f"[optimizer]\n{comment}\n")
    # Each is inserted directly below the head of its section, so the last one inserted is on top.
    for name, what in reversed(missing.items()):
        section, key = name.split(".")
        text = text.replace(f"[{section}]\n", f"[{section}]\n# SET: {key} = ...    # {what}\n")
    if missing:
        text = (
            "# SET marks what the user must set: `pipeloom train` does not start without these settings, here or as\n"
            f"# flags.\n\n{text}"
        )
    return text


def _elsewhere(key: str) -> list[str]:
    """The settings of this name, with their tables."""
    tables = get_type_hints(RunConfig).items()
    return [f"{table}.{key}" for table, its_class in tables if key in {one.name for one in fields(its_class)}]


def _drop_unknown(tree: dict[str, Any], config_class: type, prefix: str) -> list[str]:
    """Remove keys that ``config_class`` does not have; return a sentence with a suggestion for each."""
    hints = get_type_hints(config_class)
    known = {item.name: item for item in fields(config_class)}
    problems: list[str] = []
    for key in list(tree):
        if prefix + key in RETIRED:
            problems.append(f"there is no setting '{prefix}{key}' any more; {RETIRED[prefix + key]}")
            del tree[key]
        elif key not in known:
            hint = or_one_of(_elsewhere(key)) or did_you_mean(key, known, prefix) or f"known: {', '.join(known)}"
            problems.append(f"there is no setting '{prefix}{key}'; {hint}")
            del tree[key]
        elif tree[key] == "" and Path in (hints[key], *get_args(hints[key])):
            problems.append(f"{prefix}{key} must be a path, found ''")  # which Path takes for the folder it is in
            if known[key].default is not MISSING:
                del tree[key]
        elif isinstance(tree[key], str) and has_line_break(tree[key]):
            problems.append(f"{prefix}{key} must be one line, found {tree[key]!r}")
            del tree[key]
        elif is_dataclass(hints[key]) and isinstance(tree[key], dict):
            problems += _drop_unknown(tree[key], hints[key], f"{prefix}{key}.")
        elif (table := table_of(hints[key])) is not None and isinstance(tree[key], list):
            for one in tree[key]:
                problems += _drop_unknown(one, table, f"{prefix}{key}.") if isinstance(one, dict) else ()
    return problems
