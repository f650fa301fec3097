"""The facts and figures of the breadth-first paper (arXiv 2211.05953) and BPipe's case, from simulation.

Run by ``make reproduce``. Writes data files, pictures and the tables of ``docs/reproduction/README.md`` and
``docs/reproduction/bpipe.md``. Nothing is typed there by hand.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.markdown import Markdown

from reproduction.batch import best, points
from reproduction.bpipe import blocks, bpipe_rows
from reproduction.cost_time import scaled, scaled_points, with_devices
from reproduction.facts import facts, group_traffic
from reproduction.kept import kept, kept_points
from reproduction.loops import loop_rows
from reproduction.machine import Row
from reproduction.pictures import draw_batch, draw_cost_time, draw_loops
from reproduction.sensitivity import gain_rows, needed_rows
from reproduction.tables import FOLDER, PAGE, fill, filled, write_rows


def main() -> None:
    """Compute everything, write it, print the page."""
    console = Console()
    data: dict[str, Sequence[Row]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        console.print("Searching layouts for every method and batch ...")
        found = {
            "batch": pool.map(best, *zip(*points(), strict=True)),
            "kept": pool.map(kept, *zip(*kept_points(), strict=True)),
            "scaled": pool.map(scaled, *zip(*scaled_points(), strict=True)),
        }
        console.print("Facts, loops, sensitivity ...")
        data |= {"facts": facts(), "group_traffic": group_traffic(), "loops": loop_rows()}
        data |= {"sensitivity": gain_rows(), "needed": needed_rows()}
        data |= {name: [row for row in rows if row is not None] for name, rows in found.items()}
    for name, rows in data.items():
        write_rows(name, rows)
    draw_loops(data["loops"], FOLDER / "loops.png")
    draw_batch(data["batch"], FOLDER / "batch.png")
    draw_cost_time(with_devices(data["batch"], data["scaled"]), FOLDER / "cost_time.png")
    page = filled(PAGE.read_text(encoding="utf-8"), data)
    PAGE.write_text(page, encoding="utf-8")
    console.print(Markdown(page))
    console.print(Markdown(write_bpipe()))


def write_bpipe() -> str:
    """Compute BPipe's case, write it; the page."""
    rows = bpipe_rows()
    write_rows("bpipe", rows)
    file = FOLDER / "bpipe.md"
    page = fill(file.read_text(encoding="utf-8"), blocks(rows))
    file.write_text(page, encoding="utf-8")
    return page


if __name__ == "__main__":
    main()
