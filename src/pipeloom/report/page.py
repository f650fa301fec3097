"""The HTML around the contents of a page: one self-contained file that loads nothing and computes only its layout."""

import html
import json
from collections.abc import Mapping
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import Any


def page_text(contents: Mapping[str, Any]) -> str:
    """HTML text of a page.

    Args:
        contents: for ``build`` in ``page.js``, with a ``title``.
    """
    return Template(_joined("page.html")).substitute(
        title=html.escape(contents["title"]),
        version=html.escape(version("pipeloom")),
        style=_joined("colors.css", "drawing.css", "page.css"),
        script=_joined("drawing.js", "page.js"),
        # Without "<", text of the run cannot end the script element or begin another one. With allow_nan=False a number
        # that is not finite fails here instead of in the reader's browser, since JSON has none.
        contents=json.dumps(contents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _joined(*names: str) -> str:
    """Concatenated text of files in this folder."""
    return "".join((files(__package__ or "pipeloom.report") / name).read_text(encoding="utf-8") for name in names)
