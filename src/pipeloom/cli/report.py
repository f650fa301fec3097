"""``pipeloom report``: a run as one HTML page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.errors import ConfigError
from pipeloom.workload.limits import Common


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom report``.

    The page shows loss, timelines, the bubble by cause, communication and memory. It is one file, without external
    resources. For an unfinished run it shows what exists and lists what is missing.
    """

    folder: Annotated[Path, Place("RUN")]
    """Run folder of `pipeloom train`."""
    output: Common[Annotated[Path | None, Output("file")]] = None
    """HTML file to write. None: report.html in the run folder."""


COMMAND = Command(
    name="report", options=Options, examples={"pipeloom report outputs/demo": "writes outputs/demo/report.html"}
)


def run(words: list[str]) -> int:
    """Parse the arguments, write the page, print its path and the verdict."""
    options, problems = read_flags(COMMAND, words)
    from pipeloom.report import write_page
    from pipeloom.report.contents import verdict_of
    from pipeloom.report.unfinished import unfinished_contents
    from pipeloom.runs.run_reading import read_run
    from pipeloom.terminal.console import hanging

    output = options.output
    if output is not None and output.is_file() and output.suffix not in (".html", ".htm"):
        problems.append(f"--output replaces a file whose name ends in .html, found {output}; name another one")
    found = or_note(lambda: read_run(options.folder), problems)
    if problems or found is None:
        raise ConfigError(problems, SOURCE)
    print(f"report     {write_page(found, output)}")
    verdict = verdict_of(found)
    if verdict is not None:
        print(hanging("step       " + "\n           ".join(verdict.lines), 11))
    unfinished = unfinished_contents(found)
    if unfinished is not None:
        print(f"           {unfinished['headline']}. {unfinished['state']}".rstrip())
        print("           The page lists what is missing, and why.")
    return 0
