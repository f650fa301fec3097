"""What a rule yields where it is broken."""

from collections.abc import Iterator
from typing import NamedTuple


class Violation(NamedTuple):
    """What is wrong, and where: a rank and a slot of its row, if one place is to blame."""

    message: str
    rank: int | None = None
    slot: int | None = None


Violations = Iterator[Violation]
