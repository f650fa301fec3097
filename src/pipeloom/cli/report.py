"""``pipeloom report``: a finished run as one HTML page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pipeloom.cli.flags import parse_flags


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a finished run as one self-contained HTML page: timelines, bubble account, communication, memory, loss."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder that `pipeloom train` wrote."""
    output: Path | None = None
    """The page. None: report.html in the run folder."""


def run(words: list[str]) -> int:
    """Parse the arguments, write the page, say where it is."""
    options = parse_flags(Options, words, "report", Options.__doc__ or "")
    from pipeloom.page import write_report

    print(f"report     {write_report(options.folder, options.output)}")
    return 0
