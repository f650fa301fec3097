"""A run as one self-contained HTML page: no request leaves it, and it computes nothing but where the ink goes."""

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
    """Write the page of a run: all of a finished one, and of another what there is.

    Args:
        folder: the run folder.
        file: where to; ``None`` for ``report.html`` in the run folder.

    Returns:
        The file.

    Raises:
        UserError: there is no run, its folder is broken, or the file cannot be written.
    """
    return write_page(read_run(folder), file)


def write_page(run: Run, file: Path | None = None) -> Path:
    """The same of a run that is read already."""
    file = file or run.folder / REPORT
    write_text(file, format_page(run), "the report", "choose another --output")
    return file


def format_page(run: Run) -> str:
    """The page as text."""
    contents = page_contents(run)
    return Template(_joined("page.html")).substitute(
        title=html.escape(contents["title"]),
        version=html.escape(version("pipeloom")),
        style=_joined("colors.css", "drawing.css", "page.css"),
        script=_joined("drawing.js", "page.js"),
        # whatever the run wrote, nothing in it can end the element or begin another
        # allow_nan=False: JSON has no NaN, and JSON.parse would fail in the browser of whoever opens the page.
        contents=json.dumps(contents, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    )


def _joined(*names: str) -> str:
    """Files of this folder, one behind the other."""
    return "".join((files(__name__) / name).read_text(encoding="utf-8") for name in names)
