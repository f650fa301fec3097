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
        figures=_figures(contents),
        version=html.escape(version("pipeloom")),
        style=_joined("colors.css", "drawing.css", "page.css"),
        script=_joined("drawing.js", "page.js"),
        # Without "<", text of the run cannot end the script element or begin another one. With allow_nan=False a number
        # that is not finite fails here instead of in the reader's browser, since JSON has none.
        contents=json.dumps(contents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _figures(contents: Mapping[str, Any]) -> str:
    """What a browser without JavaScript shows: the verdict, and a table of the facts and of measured and predicted."""
    rows = list(contents["facts"])
    for card in contents["headline"]:
        rows += [
            (f"{card['name']}, {kind}", card[kind]) for kind in ("measured", "predicted") if card[kind] is not None
        ]
    verdict = [] if contents["verdict"] is None else [f"<p>{html.escape(contents['verdict']['headline'])}</p>"]
    cells = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows]
    return "\n".join([*verdict, "<table>", *cells, "</table>"])


def _joined(*names: str) -> str:
    """Concatenated text of files in this folder."""
    return "".join((files(__package__ or "pipeloom.report") / name).read_text(encoding="utf-8") for name in names)
