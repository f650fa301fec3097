"""The facts and figures of the breadth-first paper (arXiv 2211.05953), from simulation. Run by ``make reproduce``.

Writes data files, pictures and the tables of ``docs/reproduction/README.md``. Nothing is typed there by hand.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.markdown import Markdown

from reproduction.batch import best, points
from reproduction.facts import facts, group_traffic
from reproduction.loops import loop_rows
from reproduction.machine import Row
from reproduction.pictures import draw_batch, draw_loops
from reproduction.sensitivity import gain_rows, needed_rows
from reproduction.tables import FOLDER, PAGE, filled, write_rows


def best_of(point: tuple[str, str, str, int]) -> Row | None:
    """``best``, for another process."""
    return best(*point)


def main() -> None:
    """Compute everything, write it, print the page."""
    console = Console()
    data: dict[str, Sequence[Row]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        console.print("Searching layouts for every method and batch ...")
        found = pool.map(best_of, points())
        console.print("Facts, loops, sensitivity ...")
        data |= {"facts": facts(), "group_traffic": group_traffic(), "loops": loop_rows()}
        data |= {"sensitivity": gain_rows(), "needed": needed_rows()}
        data["batch"] = [row for row in found if row is not None]
    for name, rows in data.items():
        write_rows(name, rows)
    draw_loops(data["loops"], FOLDER / "loops.png")
    draw_batch(data["batch"], FOLDER / "batch.png")
    page = filled(PAGE.read_text(encoding="utf-8"), data)
    PAGE.write_text(page, encoding="utf-8")
    console.print(Markdown(page))


if __name__ == "__main__":
    main()
