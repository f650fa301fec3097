"""The report of a run, and of a simulated step: one self-contained HTML page each."""

from pathlib import Path

from pipeloom.report.contents import page_contents
from pipeloom.report.page import page_text
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
    return page_text(page_contents(run))
