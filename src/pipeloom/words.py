"""Small words for people."""

import math
import re
from collections.abc import Sequence

_UNITS = {"": 1, "B": 1, **{f"{letter}{b}": base**power for power, letter in enumerate("KMGT", 1)
                            for b, base in (("B", 1000), ("iB", 1024))}}  # fmt: skip


def count(number: int, noun: str) -> str:
    """A number with its noun: ``1 stage``, ``2 stages``, ``3 micro-batches``."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def told_passes(keep: Sequence[int] | None, *, balance: bool, offload: bool, slices: int = 1) -> str:
    """What passes change in a family's schedule: ``, balanced, offloaded``; empty for nothing."""
    words = [f"keeping {' '.join(map(str, keep))} inputs whole"] if keep is not None else []
    words += [f"in {slices} token slices"] if slices > 1 else []
    words += [word for word, is_on in (("balanced", balance), ("offloaded", offload)) if is_on]
    return "".join(f", {word}" for word in words)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``64MiB``, ``1.5 GB`` or ``4096``.

    Raises:
        ValueError: the text is no size above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units or float(match[1]) * units[match[2].lower()] < 1:
        raise ValueError(f"expected a size such as 64MiB or 1.5GB, found '{text}'")
    return int(float(match[1]) * units[match[2].lower()])


def format_bytes(size: float, *, rounds_up: bool = False) -> str:
    """A number of bytes for people: ``64 MiB``, ``1.5 GiB``, ``512 bytes``.

    Args:
        size: the bytes.
        rounds_up: whether the number is never below, such as that of what is needed; else it is the nearest.
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            number = size / 1024**power
            digits = 2 - min(2, math.floor(math.log10(number)))
            number = math.ceil(number * 10**digits) / 10**digits if rounds_up else round(number, digits)
            return f"{number:.{digits}f}".rstrip("0").rstrip(".") + f" {unit}" if digits else f"{number:.0f} {unit}"
    return f"{math.ceil(size) if rounds_up else round(size)} bytes"
