"""A ``config.json`` of Hugging Face while it is read."""

import json
from dataclasses import dataclass
from typing import Any

from pipeloom.catalog.architectures import Architecture
from pipeloom.catalog.reading import Reader

_WIDTH = 100
"""Most characters of a value in a message."""


@dataclass(frozen=True)
class ConfigJson:
    """A ``config.json`` while it is read.

    Attributes:
        table: its keys and values.
        reader: reads values and collects problems.
        known: its architecture.
        name: its ``model_type``.
    """

    table: dict[str, Any]
    reader: Reader
    known: Architecture
    name: str

    def must_be(self, key: str, wanted: str, default: Any = None) -> None:
        """Add a problem: the required and the actual value of a key, or its default if it is missing."""
        found = as_json(self.table[key]) if key in self.table else f"none, which means {as_json(default)}"
        self.reader.complain(f"{key} must be {wanted}, found {found}")


def as_json(value: Any) -> str:
    """A value as JSON, shortened; in ASCII, so without control characters."""
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
