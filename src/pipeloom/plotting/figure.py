"""Figures without a display, and the files that they become."""

from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from pipeloom.errors import UserError
from pipeloom.terminal.guard import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A file depends on what it shows and on nothing else, such as the date: a picture that is drawn again does not change.
_METADATA: dict[str, dict[str, None]] = {
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".png": {"Software": None},
}
# Text stays text, to be selected, searched and read aloud; its fonts end with the generic one.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pipeloom", "pdf.fonttype": 42}


def new_figure(width: float, height: float) -> "Figure":
    """A figure of so many inches, whose layout leaves room for all texts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    # Not pyplot: it keeps every figure in a global list, and may look for a display.
    FigureCanvasAgg(figure)
    return figure


def headline(text: str, width: int) -> str:
    """A text in lines of so many letters: no layout leaves room for a long one."""
    return "\n".join(wrap(plain(text), width))


def plain(text: str) -> str:
    """A text that may hold foreign names, as it is: a pair of $ would begin mathematics."""
    return printable(text).replace("$", r"\$")


def save(figure: "Figure", file: Path) -> None:
    """Write a figure; the ending of the file is its format.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib import rc_context

    try:
        with rc_context(_STYLE):
            figure.savefig(file, dpi=150, metadata=_METADATA.get(file.suffix.lower()))
        figure.set_layout_engine("none")  # it has placed everything; a second file needs it no more
    except OSError as error:
        raise UserError(f"cannot write the picture {file}: {error.strerror}") from error


def svg_text(figure: "Figure") -> str:
    """A figure as the text of an SVG picture."""
    from matplotlib import rc_context

    text = StringIO()
    with rc_context(_STYLE):
        figure.savefig(text, format="svg", metadata=_METADATA[".svg"])
    return text.getvalue()
