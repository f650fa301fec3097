"""Tables and pictures of ``docs/schedules``: every family of schedules side by side. Run by ``make schedules``."""

from collections.abc import Iterator
from itertools import product, starmap
from pathlib import Path

from rich.console import Console

from pipeloom import families
from pipeloom.cli.families import COLUMNS, lines
from pipeloom.plotting.timelines import plot_timeline
from pipeloom.simulation import simulate
from pipeloom.terminal.console import cells_of
from reproduction.tables import fill
from schedule_pictures import PICTURES

FOLDER = Path(__file__).parents[1] / "docs" / "schedules"
PAGE = FOLDER / "README.md"
SIZES = tuple((pp, factor * pp) for pp, factor in product((4, 8, 16), (1, 2, 4)))
"""(ranks, micro-batches) of the tables."""
LOOPS = 2


def own_families() -> list[str]:
    """The families that train and belong to the package, not to another installed distribution."""
    own = f"{families.__name__}."
    return [name for name, one in families.FAMILIES.items() if one.has_backward and one.rule.__module__.startswith(own)]


def table_of(pp: int, num_microbatches: int) -> tuple[str, str]:
    """A table of the page: its name, and its text."""
    return f"P {pp} M {num_microbatches}", "\n".join(_rows(pp, num_microbatches))


def _rows(pp: int, num_microbatches: int) -> Iterator[str]:
    yield f"P = {pp}, M = {num_microbatches}:\n"
    yield f"| family | {' | '.join(title for title, _ in COLUMNS.values())} |"
    yield f"|---|{'---:|' * len(COLUMNS)}"
    for line in lines(pp, num_microbatches, LOOPS, own_families()):
        yield f"| {line['name']} | {' | '.join(cells_of(line, COLUMNS))} |"


def main() -> None:
    """Make the tables and the pictures."""
    console = Console()
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), dict(starmap(table_of, SIZES))), encoding="utf-8")
    for picture in PICTURES:
        schedule, costs = picture.schedule(), picture.costs
        trace = simulate(schedule, costs)
        plot_timeline(trace, [FOLDER / f"{picture.page}.svg"], title=picture.title, unit="forwards of a rank")
        console.print(f"drawn: {picture.page}.svg")
    console.print(f"filled: {PAGE.name}")


if __name__ == "__main__":
    main()
