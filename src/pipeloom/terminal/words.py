"""Formats of numbers with units, and suggestions for misspelled names."""

import math
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from difflib import SequenceMatcher

_UNITS = {"": 1, "B": 1, **{f"{letter}{b}": base**power for power, letter in enumerate("KMGT", 1)
                            for b, base in (("B", 1000), ("iB", 1024))}}  # fmt: skip


UNBREAKABLE = "\N{NO-BREAK SPACE}"
"""A space in a comment of a file at which a line is not wrapped."""


def has_line_break(text: str) -> bool:
    """Whether a text has a line feed. Other characters that break lines are escaped when printed."""
    return "\n" in text


def quoted(*words: object) -> str:
    """Words as a shell reads them: of a command that is printed, or its path.

    Examples:
        >>> print(quoted("pipeloom", "train", "my runs/config.toml"))
        pipeloom train 'my runs/config.toml'
    """
    return shlex.join(map(str, words))


def count(number: int, noun: str) -> str:
    """A number and its noun: ``1 stage``, ``2 stages``, ``3 micro-batches``."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Several of a noun: ``stages``, ``micro-batches``, ``strategies``."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


# difflib.get_close_matches has 0.6 and three by default; with 0.6, short names resemble unrelated ones.
_LEAST_LIKENESS, _SPREAD, _MOST_SUGGESTIONS = 0.63, 0.1, 3


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that equals a name up to case and ``_`` for ``-``; ``None`` if there is none."""
    wanted = _plain(name)
    return next((one for one in known if _plain(one) == wanted), None)


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """The names most similar to a wrong one, closest first: at most three, of about equal similarity."""
    likeness = {one: _likeness(_plain(name), _plain(one)) for one in known}
    best = max(likeness.values(), default=0.0)
    least = max(_LEAST_LIKENESS, best - _SPREAD)
    found = [one for one in likeness if likeness[one] >= least]
    return sorted(found, key=lambda one: (-likeness[one], one))[:_MOST_SUGGESTIONS]


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``did you mean 'train'?`` with the most similar names, each with a prefix; empty if none is similar."""
    return or_one_of([f"{prefix}{one}" for one in close_names(name, known)])


def or_one_of(names: Sequence[str]) -> str:
    """``did you mean 'a', 'b' or 'c'?``; empty without names."""
    close = [f"'{one}'" for one in names]
    return f"did you mean {or_list(close)}?" if close else ""


def or_list(names: Collection[str]) -> str:
    """Names with commas between them, and ``or`` before the last one."""
    return _list(names, "or")


def and_list(names: Collection[str]) -> str:
    """Names with commas between them, and ``and`` before the last one."""
    return _list(names, "and")


def _list(names: Collection[str], word: str) -> str:
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else last


def and_finite(limit: str, found: float) -> str:
    """``limit``, such as ``above 0``, for a message; with ``and finite`` if the number found is infinite."""
    return f"{limit} and finite" if found == math.inf else limit


def unknown_name(what: str, name: str, known: Collection[str], likely: Collection[str] | None = None) -> str:
    """The message about an unknown name, with similar names and all names.

    Args:
        what: a noun, such as ``cluster``.
        name: the unknown name.
        known: all names.
        likely: those of them that may be suggested; ``None``: all.
    """
    hint = did_you_mean(name, known if likely is None else likely)
    return f"there is no {what} '{name}'; {hint}{' ' if hint else ''}known: {', '.join(known)}"


def _plain(name: str) -> str:
    return name.casefold().replace("_", "-")


def _likeness(name: str, known: str) -> float:
    """Similarity, 0 to 1: by letters, and by words of names, since users often omit or add some of them."""
    if name == known:
        return 1.0
    words, others = set(name.split("-")), set(known.split("-"))
    is_half = 2 * len(words & others) >= len(words | others)
    by_words = 0.0 if not is_half else 0.98 if words < others else 0.9 if others < words else 0.0
    return max(by_words, SequenceMatcher(None, name, known).ratio())


def passes_of(keep: Sequence[int] | None, *, balance: bool, offload: bool, slices: int = 1) -> str:
    """What passes change in the schedule of a family, such as ``, balanced, offloaded``; empty for nothing."""
    words = [f"keeping {' '.join(map(str, keep))} inputs whole"] if keep is not None else []
    words += [f"in {slices} token slices"] if slices > 1 else []
    words += [word for word, is_on in (("balanced", balance), ("offloaded", offload)) if is_on]
    return "".join(f", {word}" for word in words)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``64MiB``, ``1.5 GB`` or ``4096``.

    Raises:
        ValueError: the text is not a size of at least one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if match is None or not 1 <= float(match[1]) * units.get(match[2].lower(), 0) < math.inf:
        raise ValueError(f"expected a size such as 64MiB or 1.5GB, found '{text}'")
    return int(float(match[1]) * units[match[2].lower()])


def leading_number(text: str) -> tuple[float, str] | None:
    """The finite number of at least 0 that a text begins with, and the text behind it; ``None`` without one."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)(.*)", text)
    try:
        number = float(found[1]) if found else math.inf
    except ValueError:  # such as 1.2.3
        return None
    return (number, found[2]) if found and math.isfinite(number) else None


def format_bytes(size: float, *, rounds_up: bool = False) -> str:
    """A number of bytes in decimal units: ``64 MB``, ``1.5 GB`` (10^9 bytes), ``512 bytes``.

    Args:
        size: in bytes.
        rounds_up: whether to round up, as for a requirement, instead of to the nearest.
    """
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if size >= 1000**power:
            number = size / 1000**power
            # Three significant digits: most sizes are estimates.
            digits = 2 - min(2, math.floor(math.log10(number)))
            number = math.ceil(number * 10**digits) / 10**digits if rounds_up else round(number, digits)
            return f"{number:.{digits}f}".rstrip("0").rstrip(".") + f" {unit}" if digits else f"{number:.0f} {unit}"
    return f"{math.ceil(size) if rounds_up else round(size)} bytes"


def unit_s(seconds: float) -> tuple[float, str]:
    """The unit for a time: its length in seconds, and its name."""
    # Milliseconds up to ten seconds, so that compared steps usually have the same unit.
    return (1.0, "s") if seconds >= 10 else (1e-3, "ms")


def unit_bytes(size: float) -> tuple[float, str]:
    """The unit for an amount of memory: its size in bytes, and its name."""
    return (1e9, "GB") if size >= 1e10 else (1e6, "MB")


def seconds(value: float) -> str:
    """A time with its unit, such as ``12.3 ms``."""
    unit, name = unit_s(value)
    return f"{short(value / unit)} {name}"


def short(value: float) -> str:
    """A number with at least three significant digits, such as ``1.23`` or ``1,234``."""
    if not value:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f}"


def amount(number: float) -> str:
    """A number of parameters: 127 K, 3.6 M, 51.8 B, 1.01 T."""
    scale, letter = next(
        pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (0.0, "")) if number >= pair[0]
    )
    return f"{number / (scale or 1):.3g} {letter}".strip()


def parameters(whole: float, active: float) -> str:
    """Numbers of parameters in words: 8.03 B parameters; 46.7 B parameters (12.9 B for a token)."""
    return f"{amount(whole)} parameters{'' if active == whole else f' ({amount(active)} for a token)'}"


def ms(value_s: float) -> str:
    """A time in milliseconds, without the unit."""
    return f"{value_s * 1e3:,.1f}"


def percent(share: float) -> str:
    """A fraction in percent, such as ``12.3 %``."""
    return f"{share * 100:.1f} %"


def in_days(value: float) -> str:
    """With three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_dollars(value: float) -> str:
    """Three digits, in thousands or millions where it is as much."""
    scale, letter = next(pair for pair in ((1e6, "M"), (1e3, "k"), (0.0, "")) if value >= pair[0])
    return f"${value / (scale or 1):.3g}{letter}"


def memory_lack(rank: int, needed: float, room: float) -> str:
    """What a pipeline rank lacks: ``pipeline rank 0 needs 93.1 GB of 80``, from both sizes in bytes."""
    unit, name = unit_bytes(room)
    return f"pipeline rank {rank} needs {short(needed / unit)} {name} of {room / unit:.4g}"
