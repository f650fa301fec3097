"""Parses the words of a command line into the options of a command, and reports all problems at once."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pipeloom.cli.help import help_page, usage
from pipeloom.cli.reference import (
    RUN_FIELD,
    RUN_FILE,
    Command,
    Option,
    Options_,
    Output,
    options_of,
    replacement_of,
    settings_of_runs,
)
from pipeloom.config.paths import expand_home, names_file
from pipeloom.errors import ConfigError, UserError
from pipeloom.system.files import picture_problem, write_problem
from pipeloom.terminal.words import close_names, count, did_you_mean, or_one_of, unknown_name
from pipeloom.workload.limits import Limits, Names

_Value = TypeVar("_Value")
SOURCE = "the command line"
_HELP = {"-h": False, "--help": False, "--help-all": True}
"""Flags that print help -> whether that has all options."""
_ELSEWHERE = {
    "gpus": "devices",
    "num-gpus": "devices",
    "ngpus": "devices",
    "world-size": "devices",
    "nproc-per-node": "devices",
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "learning-rate": "lr",
    "train-iters": "steps",
    "bf16": "dtype",
    "fp16": "dtype",
}
"""Names that Megatron-LM, torchrun and others have for a setting -> its name here."""


@dataclass
class Words:
    """The parsed words of a command line.

    Attributes:
        values: of the given options, by name.
        problems: one sentence each, in the order of the words.
        wrong: names of the options with wrong values.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)


def parse_flags(command: Command[Options_], words: Sequence[str]) -> Options_:
    """Parse words without any problem.

    Raises:
        ConfigError: all problems.
        SystemExit: help was printed.
    """
    options, problems = read_flags(command, words)
    if problems:
        raise ConfigError(problems, SOURCE)
    return options


def read_flags(command: Command[Options_], words: Sequence[str]) -> tuple[Options_, list[str]]:
    """Parse words; returns the options, and one sentence for each problem.

    Defaults replace wrong values, so that the caller can report further problems in the same message.

    Raises:
        ConfigError: an option without a default is missing or wrong; with all other problems.
        SystemExit: help was printed.
    """
    found = read_words(command, words)
    required = {option.name for option in options_of(command) if option.default is MISSING}
    if required - found.values.keys():
        # The command itself reports wrong names, but it needs all options.
        raise ConfigError([*found.problems, *_unknown_names(command, found)], SOURCE)
    return command.options(**found.values), found.problems


def _unknown_names(command: Command[Any], found: Words) -> Iterator[str]:
    """A sentence for each value that names neither a part of the catalog nor a file."""
    for option in options_of(command):
        value = found.values.get(option.name)
        if isinstance(value, str) and option.is_named and not names_file(value) and value not in option.choices:
            yield f"{option.flags[0]}: {unknown_name(option.name, value, option.choices)}"


def or_note(make: Callable[[], _Value], problems: list[str]) -> _Value | None:
    """What a function returns; if it refuses its input, adds the reasons to ``problems`` and returns ``None``."""
    try:
        return make()
    except ConfigError as error:
        is_file = error.source not in (SOURCE, "the configuration")
        problems += [f"{error.source}: {problem}" if is_file else problem for problem in error.problems]
    except UserError as error:
        problems.append(str(error))
    return None


def read_words(
    command: Command[Any], words: Sequence[str], open_file: Callable[[Path], list[str]] | None = None
) -> Words:
    """Read the words after a command.

    ``--flag value`` and ``--flag=value`` are the same, and so are ``_`` and ``-`` in a flag. A list has its values
    after one flag, separated by spaces or commas. A word that begins with a dash and is not a number is a flag;
    as a value, write it as ``--flag=-value``. Flags cannot be abbreviated. If a flag is given twice, the last one
    applies.

    Args:
        command: whose options the words set.
        words: after the command.
        open_file: called with the run file if the command takes one; returns its problems.

    Raises:
        SystemExit: help was printed.
    """
    if help_words := [word for word in words if word in _HELP]:
        print(help_page(command, is_whole=any(_HELP[word] for word in help_words)))
        raise SystemExit(0)
    options = options_of(command)
    found, given = Words(), set[str]()
    for option, flag, texts in _groups(command, options, words):
        if isinstance(option, str):
            found.problems.append(option)
            continue
        value, problem = _value(option, flag, texts)
        given.add(option.name)
        if problem:
            found.problems.append(problem)
            found.wrong.add(option.name)
        else:
            found.values[option.name] = value
            if option.name == RUN_FIELD and open_file is not None:
                found.problems += open_file(value)
    for option in options:
        if option.default is MISSING and option.name not in given:
            about = f"; {usage(command)}" if option.place else ""
            found.problems.append(f"{option.place or option.shown} is missing: {_short_text(option)}{about}")
    found.problems += [
        problem
        for option in options
        for note in option.notes
        if isinstance(note, Output) and (problem := _output_problem(note, option, found)) is not None
    ]
    return found


def _short_text(option: Option) -> str:
    text = option.first_sentence.partition(";")[0]
    return text[:1].lower() + text[1:]


def _output_problem(note: Output, option: Option, found: Words) -> str | None:
    """Why the file or the folder of an option could not be written, before the work that it is for."""
    path = found.values.get(option.name, option.default)
    if not isinstance(path, Path):
        return None
    from pipeloom.checkpoint.checkpoint_folder import among_checkpoints  # not at the start of every command

    problem = write_problem(path, is_folder=note.kind == "folder") or among_checkpoints(path)
    if note.kind == "picture":
        problem = picture_problem(path) or problem
    return problem and f"{(*option.flags, option.place)[0]}: {problem}"


def _groups(
    command: Command[Any], options: Sequence[Option], words: Sequence[str]
) -> Iterator[tuple[Option | str, str, list[str]]]:
    """For each flag its option, the flag and its values, in the order of the words; for a wrong flag a sentence."""
    by_flag = {flag: option for option in options for flag in option.flags}
    elsewhere = {flag: option for option in settings_of_runs() for flag in option.flags} if command.settings else {}
    places = [option for option in options if option.place]
    rest = list(words)
    before = ""
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            yield (places.pop(0) if places else _unexpected(word, before, by_flag)), word, [word]
            continue
        flag, is_joined, text = word.partition("=")
        flag = flag.replace("_", "-")
        option = by_flag.get(flag) or elsewhere.get(flag)
        texts = [text] if is_joined else []
        most = None if option is None else option.most_values
        while rest and not _is_flag(rest[0]) and (most is None or len(texts) < most):
            if option is None and places and _fits(places[0], rest[0]):
                break  # An unknown flag may take any number of values; the run file is checked, too.
            texts.append(rest.pop(0))
        if most == 0 and rest and rest[0].lower() in ("true", "false"):
            texts.append(rest.pop(0))
        before = flag if most is not None else ""
        yield (by_flag.get(flag) or _unknown(flag, option, by_flag, command)), flag, texts


def _fits(place: Option, word: str) -> bool:
    """Whether a word names what a place takes: one of its choices, or a file."""
    with suppress(OSError):  # such as a name that is too long
        # Any other file after an unknown flag is more likely its value than a run file.
        return word in place.choices or word.endswith(".toml") or (place.place != RUN_FILE and Path(word).exists())
    return False


def _is_flag(word: str) -> bool:
    if re.match(r"--?[A-Za-z]", word) is None:
        return False
    with suppress(ValueError):
        float(word)  # -inf
        return False
    return True


def _unexpected(word: str, before: str, by_flag: dict[str, Option]) -> str:
    close = or_one_of(_close_flags(word, by_flag))
    after = (
        f" after {before}, which takes {'no' if by_flag[before].is_switch else 'one'} value"
        if before in by_flag
        else ""
    )
    if not close and not after and "--data.path" in by_flag and Path(word).exists():
        close = "--data.path takes a text"
    return f"expected no word '{_cut(word)}'{after}{f'; {close}' if close else ''}"


def _unknown(flag: str, option: Option | None, by_flag: dict[str, Option], command: Command[Any]) -> str:
    if option is not None:
        return (
            f"{flag} has no effect on {command.name}; leave it out (a run file may have the setting for other commands)"
        )
    if any(flag == f"--{one.name}" for one in settings_of_runs() if one.is_table):
        return f"{flag} is a list of tables, which no flag can set; write [[{flag[2:]}]] in a run file"
    if (instead := replacement_of(flag, command)) is not None:
        return f"{command.name} has no flag {flag} any more; {instead}"
    close = or_one_of(_close_flags(flag, by_flag))
    return f"there is no flag {flag}{f'; {close}' if close else ''}"


def _close_flags(word: str, by_flag: dict[str, Option]) -> list[str]:
    """At most three flags that a word may mean: those of its section, or those with similar names.

    A word without a section is compared with the names of flags without their sections.
    """
    wanted = word.lstrip("-")
    if of_section := [flag for flag in by_flag if flag.startswith(f"--{wanted}.")]:
        return of_section[:3]
    # A command with flags of its own, such as `plan`, has them without the sections of a run file.
    if (own := f"--{wanted.rpartition('.')[2]}") in by_flag:
        return [own]
    # A setting in another section than its own.
    if "." in wanted and (others := [flag for flag in by_flag if flag.endswith(f".{wanted.rpartition('.')[2]}")]):
        return others[:3]
    names: dict[str, list[str]] = {}
    for flag in (*by_flag, *_HELP):
        name = flag.lstrip("-")
        names.setdefault(name if "." in wanted else name.rpartition(".")[2], []).append(flag)
    if (here := _ELSEWHERE.get(wanted, wanted)) in names:
        return names[here][:3]
    return [flag for name in close_names(wanted, names) for flag in names[name]][:3]


def _value(option: Option, flag: str, texts: list[str]) -> tuple[Any, str]:
    """The value of an option, and its problem or an empty text."""
    if option.is_switch:
        on, off = option.flags
        problem = f"{flag} takes no value: write {on} for true, {off} for false"
        return flag == on, problem if texts else ""
    if (problem := _separator_problem(option, flag, texts)) is not None:
        return None, problem
    if option.most_values is None:
        texts = [part for text in texts for part in text.split(",")] if any(texts) else texts
    try:
        value = _convert(option.hint, texts)
    except ValueError:
        found = f"found {_shown(texts)}" if texts else "found nothing"
        choices = [str(one) for one in option.choices if not option.is_named]
        wrong = [text for text in texts if text not in choices]
        close = did_you_mean(wrong[0], choices) if len(wrong) == 1 else ""
        name = option.place or flag
        return None, f"{name} must be {_called(option.hint)}, {found}{f'; {close}' if close else ''}"
    # Settings of a run are checked together with those of its file.
    limits = () if option.group else (note for note in option.notes if isinstance(note, Limits))
    numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int | float)]
    for refusal in (limit.refusal(number) for limit in limits for number in numbers):
        if refusal is not None:
            return None, f"{option.place or flag} {refusal}"
    if isinstance(value, str) and any(isinstance(note, Names) and note.or_file for note in option.notes):
        # A shell expands ~ at the beginning of a word, not in --cluster=~/cluster.toml.
        value = str(expand_home(Path(value))) if names_file(value) else value
    return value, ""


def _separator_problem(option: Option, flag: str, texts: Sequence[str]) -> str | None:
    """The problem of a number with separators of thousands, such as 1,024, or with leading zeros.

    A list has its values between commas, too, so there only a zero at the beginning of a group shows the separator:
    64,128 is two values.
    """
    if int not in (inner := _inner_types(option.hint)) or str in inner:
        return None
    is_list = option.most_values is None
    for text in texts:
        parts = text.split(",")
        has_zeros = any(re.fullmatch(r"-?0[0-9]+", part) for part in parts)
        is_one = re.fullmatch(r"-?[1-9][0-9]{0,2}(,[0-9]{3})+", text) is not None
        if has_zeros if is_list else is_one:
            plain = [str(int(part)) if re.fullmatch(r"-?[0-9]+", part) else part for part in parts]
            values = f"{' '.join(plain)} for {count(len(parts), 'value')}" if is_list else ""
            ways = [f"{text.replace(',', '')} without commas"] * is_one + [values] * bool(values)
            wanted = "numbers without leading zeros" if is_list else _called(option.hint)
            return f"{option.place or flag} must be {wanted}, found '{_cut(text)}'; write {', or '.join(ways)}"
    return None


def _inner_types(hint: Any) -> set[Any]:
    """The types of the values of an option: those of its alternatives, and of the items of a list."""
    inner = [one for one in get_args(hint) if one is not ...]
    is_nested = get_origin(hint) in (Union, UnionType, tuple)
    return {kind for one in inner for kind in _inner_types(one)} if is_nested else {hint}


def _path(text: str) -> Path:
    """A path; ``.`` becomes absolute, so that messages name the folder."""
    return Path.cwd() if Path(text) == Path() else expand_home(Path(text))


_READ: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", int),
    float: ("a number", float),
    NoneType: ("None", {"None": None}.__getitem__),
    Path: ("a path", _path),
    str: ("a text that is not empty", str),
}
"""Type of a value -> how messages call it, and what reads it."""


def _convert(hint: Any, texts: Sequence[str]) -> Any:
    """The value that words have by their type; a ``ValueError`` without one."""
    origin, inner = get_origin(hint), get_args(hint)
    # `int | None` and `Optional[int]` have different origins.
    if origin in (Union, UnionType):
        # Any text is a path, so what is more exact comes first.
        for one in sorted(inner, key=lambda one: one in (str, Path)):
            with suppress(ValueError):
                return _convert(one, texts)
    elif origin is tuple and texts:
        wanted = [inner[0]] * len(texts) if inner[-1] is ... else list(inner)
        return tuple(_convert(one, [text]) for one, text in zip(wanted, texts, strict=True))
    elif len(texts) == 1 and texts[0]:
        if origin is Literal:
            return inner[[str(one) for one in inner].index(texts[0])]
        with suppress(KeyError):
            return _READ[hint][1](texts[0])
    raise ValueError


def _called(hint: Any) -> str:
    """Description of the valid values, for messages."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        # None is what an option without its flag has; nobody has to write it.
        return " or ".join(_called(one) for one in inner if one is not NoneType)
    if origin is tuple:
        if get_origin(inner[0]) is Literal and inner[-1] is ...:
            return f"one or more of {', '.join(map(str, get_args(inner[0])))}"
        many = "one value or more" if inner[-1] is ... else f"{len(inner)} values"
        return f"{many}, each {_called(inner[0])}"
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else str(inner[0])
    return _READ[hint][0]


def _shown(texts: list[str]) -> str:
    return f"'{_cut(' '.join(texts))}'"


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
