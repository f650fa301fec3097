"""Refuses options that are on the command line and have no effect, as a command declares them (``Command.idle``), and
equal values in a list.

An option is given if its flag is on the command line, also with the default value. ``pipeloom.config.problems`` has the
same for the settings of a run file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from pipeloom.cli.flags import Words, read_words
from pipeloom.cli.reference import Command, Idle, Option, options_of
from pipeloom.config import RunConfig


def without(*names: str) -> Idle[Any]:
    """That an option has no effect unless one of these fields is set."""
    reason = f"without {' or '.join(map(_flag, names))}"
    return lambda options: "" if any(_is_set(getattr(options, name)) for name in names) else reason


def beside(*names: str) -> Idle[Any]:
    """That an option has no effect if one of these fields is set."""

    def reason(options: Any) -> str:
        found = [_flag(name) for name in names if _is_set(getattr(options, name))]
        return f"with {' and '.join(found)}" if found else ""

    return reason


def each(names: Iterable[str], *reasons: Idle[Any]) -> Mapping[str, Sequence[Idle[Any]]]:
    """The same reasons for several options."""
    return dict.fromkeys(names, reasons)


def given_in(command: Command[Any], words: Sequence[str]) -> frozenset[str]:
    """Names of the options on a command line."""
    return frozenset(read_words(command, words).values)


def idle_problems(command: Command[Any], words: Sequence[str], config: RunConfig | None = None) -> list[str]:
    """A sentence for the options of a command line that have no effect for the same reason, and for repeated values.

    Args:
        command: declares them.
        words: of the command line.
        config: of the run that the command reads, for reasons that depend on its settings; ``None`` if there is none.
    """
    found, known = read_words(command, words), {one.name: one for one in options_of(command)}
    options = _read(command, found, known, config)
    idle: dict[str, list[str]] = {}
    for name, reasons in command.idle.items():
        why = next((text for reason in reasons if (text := reason(options))), "") if name in found.values else ""
        # What follows from a wrong value is not a problem of its own.
        if why and not any(flag in why.split() for wrong in found.wrong for flag in known[wrong].flags):
            flags = known[name].flags
            idle.setdefault(why, []).append(flags[-1] if found.values[name] is False else flags[0])
    return [*(idle_sentence(flags, why) for why, flags in idle.items()), *_repeated(command, found, known)]


def with_idle_check(
    command: Command[Any], words: Sequence[str], judge: Callable[..., list[str]]
) -> Callable[..., list[str]]:
    """``judge`` of a configuration, and the options of the command line that have no effect."""

    def both(config: RunConfig, *, is_model_known: bool) -> list[str]:
        return [*judge(config, is_model_known=is_model_known), *idle_problems(command, words, config)]

    return both


def idle_sentence(flags: Sequence[str], why: str) -> str:
    """That flags have no effect for a reason such as ``without --fit`` or ``with --trace``, and what to do."""
    is_one, gives = len(flags) == 1, why.startswith("without ")
    leave = "leave it out" if is_one else "leave them out"
    advice = f"give {'both' if is_one else 'that'} or {leave}" if gives else leave
    return f"{', '.join(flags)} {'has' if is_one else 'have'} no effect {why}; {advice}"


def _repeated(command: Command[Any], found: Words, known: Mapping[str, Option]) -> Iterator[str]:
    for name, value in found.values.items():
        if isinstance(value, tuple) and not known[name].group and name not in command.repeatable:
            twice = [str(one) for one in dict.fromkeys(value) if value.count(one) > 1]
            if twice:
                yield f"{known[name].flags[0]} has {', '.join(twice)} more than once; give each value once"


def _read(command: Command[Any], found: Words, known: Mapping[str, Option], config: RunConfig | None) -> Any:
    """The options that words give, with defaults for wrong and missing ones, and the settings of the run."""
    own = {one.name for one in fields(command.options)}
    values = {name: found.values.get(name, one.default) for name, one in known.items() if name in own}
    settings = () if config is None else fields(config)
    return command.options(**{item.name: getattr(config, item.name) for item in settings} | values)


def _is_set(value: Any) -> bool:
    # Not by equality: 0 equals False, and is set.
    return value != () and not any(value is unset for unset in (None, False, MISSING))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
