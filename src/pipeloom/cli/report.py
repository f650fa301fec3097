"""``pipeloom report``: a run as one HTML page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pipeloom.cli.flags import parse_flags


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a run as one self-contained HTML page: loss, timelines, bubble account, communication, memory.

    The page of an unfinished run shows what there is and lists what is missing.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder that `pipeloom train` wrote."""
    output: Path | None = None
    """The page. None: report.html in the run folder."""


def run(words: list[str]) -> int:
    """Parse the arguments, write the page, print its path."""
    options = parse_flags(Options, words, "report", Options.__doc__ or "")
    from pipeloom.report import write_page
    from pipeloom.report.unfinished import unfinished_contents
    from pipeloom.runs.run_reading import read_run

    found = read_run(options.folder)
    print(f"report     {write_page(found, options.output)}")
    unfinished = unfinished_contents(found)
    if unfinished is not None:
        print(f"           {unfinished['headline']}. {unfinished['state']}".rstrip())
        print("           The page lists what is missing, and why.")
    return 0
