"""Matplotlib figures without a display, and their files."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from pipeloom.errors import UserError
from pipeloom.system.files import picture_problem, replaced
from pipeloom.terminal.guard import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# No metadata such as the date: a picture that is drawn again does not change.
_METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".png": {"Software": None},
}
# Text is written as text, not as paths, so that it can be selected, searched and read aloud.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pipeloom", "pdf.fonttype": 42}


def new_figure(width: float, height: float) -> "Figure":
    """A figure of a size in inches, whose layout leaves room for all text."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    # pyplot would keep every figure in a global list, and might use a display.
    FigureCanvasAgg(figure)
    return figure


def headline(text: str, width: int) -> str:
    """A text wrapped to lines of ``width`` characters, since layouts do not leave room for long ones."""
    return "\n".join(wrap(plain(text), width))


def plain(text: str) -> str:
    """A text for matplotlib to print literally: control characters and $, which begins mathematics, are escaped."""
    return printable(text).replace("$", r"\$")


def check_formats(files: Sequence[Path]) -> None:
    """Check the endings of picture files.

    Raises:
        UserError: an ending is not supported.
    """
    for file in files:
        if (problem := picture_problem(file)) is not None:
            raise UserError(problem)


def save(figure: "Figure", file: Path) -> None:
    """Write a figure; the ending of the file selects the format.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib import rc_context

    try:
        with rc_context(_STYLE), replaced(file) as (draft,):
            figure.savefig(draft, dpi=150, metadata=_METADATA.get(file.suffix.lower()))
        # The layout is computed; further files need not repeat it.
        figure.set_layout_engine("none")
    except OSError as error:
        raise UserError(f"cannot write the picture {file}: {error.strerror}") from error


def svg_text(figure: "Figure") -> str:
    """A figure as SVG text."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata=_METADATA[".svg"])
    return text.getvalue()
