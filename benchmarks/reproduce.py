"""What papers of breadth-first (arXiv 2211.05953), BPipe, TeraPipe, LOMO, SWARM and zero-bubble report, simulated.

Run by ``make reproduce``. Writes data files, pictures and the tables of ``docs/reproduction/``, where nothing is typed.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from reproduction import (
    bpipe,
    bpipe_cases,
    bpipe_tables,
    ep_alm,
    lomo,
    m6_10t,
    moesys,
    pwemoe,
    sparse,
    swarm,
    zero_bubble,
)
from reproduction.batch import best, points
from reproduction.bpipe_links import link_rows
from reproduction.cost_time import scaled, scaled_points, with_devices
from reproduction.facts import facts, group_traffic
from reproduction.kept import kept, kept_points
from reproduction.loops import loop_rows
from reproduction.machine import Row
from reproduction.pictures import draw_batch, draw_cost_time, draw_loops
from reproduction.sensitivity import gain_rows, needed_rows
from reproduction.tables import FOLDER, PAGE, fill, filled, read_rows, write_rows
from reproduction.terapipe import ablation_rows, curve_rows, setting_rows, terapipe_blocks

TERAPIPE = FOLDER / "terapipe.md"


def main() -> None:
    """Compute everything, write it, print the pages."""
    console = Console()
    data: dict[str, Sequence[Row]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        console.print("Searching layouts for every method and batch ...")
        found = {
            "batch": pool.map(best, *zip(*points(), strict=True)),
            "kept": pool.map(kept, *zip(*kept_points(), strict=True)),
            "scaled": pool.map(scaled, *zip(*scaled_points(), strict=True)),
        }
        balanced = pool.map(bpipe.described, *zip(*bpipe_cases.points(), strict=True))
        console.print("Facts, loops, sensitivity ...")
        data |= {"facts": facts(), "group_traffic": group_traffic(), "loops": loop_rows()}
        data |= {"sensitivity": gain_rows(), "needed": needed_rows()}
        data |= {name: [row for row in rows if row is not None] for name, rows in found.items()}
        pairs = {"bpipe": list(balanced), "bpipe_links": link_rows()}
    for name, rows in (data | pairs).items():
        write_rows(name, rows)
    draw_loops(data["loops"], FOLDER / "loops.svg")
    draw_batch(data["batch"], FOLDER / "batch.svg")
    draw_cost_time(with_devices(data["batch"], data["scaled"]), FOLDER / "cost_time.svg")
    console.print("TeraPipe ...")
    sliced = {"ablation": ablation_rows(), "curve": curve_rows(), "settings": setting_rows()}
    for name, rows in sliced.items():
        write_rows(f"terapipe_{name}", rows)
    console.print("LOMO ...")
    updates = lomo.memory_rows()
    write_rows(lomo.NAME, updates)
    console.print("Experts ...")
    routed = moesys.step_rows()
    write_rows(moesys.NAME, routed)
    console.print("Shared layers ...")
    shared = m6_10t.step_rows()
    write_rows(m6_10t.NAME, shared)
    console.print("SWARM ...")
    traffic, peers = swarm.traffic_rows(), swarm.peers_rows()
    write_rows(swarm.NAME, traffic)
    write_rows(swarm.PEERS, peers)
    console.print("Sparse, then dense ...")
    kept_blocks = sparse.step_rows()
    write_rows(sparse.NAME, kept_blocks)
    console.print("Zero bubble ...")
    pages = zero_bubble_page(console) | {
        PAGE: filled(PAGE.read_text(encoding="utf-8"), data),
        bpipe_tables.PAGE: bpipe_tables.filled(bpipe_tables.PAGE.read_text(encoding="utf-8"), *pairs.values()),
        ep_alm.PAGE: fill(ep_alm.PAGE.read_text(encoding="utf-8"), ep_alm.blocks(read_rows(ep_alm.NAME))),
        lomo.PAGE: fill(lomo.PAGE.read_text(encoding="utf-8"), lomo.memory_blocks(updates)),
        moesys.PAGE: fill(moesys.PAGE.read_text(encoding="utf-8"), moesys.blocks(routed, read_rows(moesys.BALANCE))),
        m6_10t.PAGE: fill(m6_10t.PAGE.read_text(encoding="utf-8"), m6_10t.blocks(shared, read_rows(m6_10t.LOSS))),
        pwemoe.PAGE: fill(pwemoe.PAGE.read_text(encoding="utf-8"), pwemoe.blocks(read_rows(pwemoe.NAME))),
        sparse.PAGE: fill(sparse.PAGE.read_text(encoding="utf-8"), sparse.page_blocks(kept_blocks)),
        swarm.PAGE: fill(
            swarm.PAGE.read_text(encoding="utf-8"),
            swarm.traffic_blocks(traffic) | swarm.peers_blocks(peers) | swarm.loss_blocks(read_rows(swarm.LOSS)),
        ),
        TERAPIPE: fill(TERAPIPE.read_text(encoding="utf-8"), terapipe_blocks(*sliced.values())),
    }
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")
        console.print(Markdown(page))


def zero_bubble_page(console: Console) -> dict[Path, str]:
    """Its data written, and the page; nothing where the measured steps are not at hand."""
    found = zero_bubble.cases()
    if not found:
        console.print(f"There is no {zero_bubble.TABLE}: {zero_bubble.PAGE.name} stays as it is.")
        return {}
    steps, bubbles = list(map(zero_bubble.step_row, found)), zero_bubble.bubble_rows(found)
    write_rows("zero_bubble_steps", steps)
    write_rows("zero_bubble_bubbles", bubbles)
    page = zero_bubble.PAGE.read_text(encoding="utf-8")
    return {zero_bubble.PAGE: fill(page, zero_bubble.zero_bubble_blocks(steps, bubbles))}


if __name__ == "__main__":
    main()
