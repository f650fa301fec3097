"""The report of a run: one self-contained HTML page that loads nothing and computes only its layout."""

import html
import json
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from pipeloom.report.contents import page_contents
from pipeloom.runs.run_folder import REPORT
from pipeloom.runs.run_reading import Run, read_run
from pipeloom.system.files import write_text

__all__ = ["format_page", "write_page", "write_report"]


def write_report(folder: Path, file: Path | None = None) -> Path:
    """Write the page of a run; of an unfinished run, with what there is so far.

    Args:
        folder: the run folder.
        file: to write; ``None`` for ``report.html`` in the run folder.

    Returns:
        The file.

    Raises:
        UserError: there is no run, a file in its folder is damaged, or the page cannot be written.
    """
    return write_page(read_run(folder), file)


def write_page(run: Run, file: Path | None = None) -> Path:
    """``write_report`` of a run that is already read."""
    file = file or run.folder / REPORT
    write_text(file, format_page(run), "the report", "choose another --output")
    return file


def format_page(run: Run) -> str:
    """HTML text of the page."""
    contents = page_contents(run)
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
    return "".join((files(__name__) / name).read_text(encoding="utf-8") for name in names)
