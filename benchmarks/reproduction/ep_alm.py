"""eP-ALM's case (arXiv 2303.11403): a frozen language model that answers about images."""

from collections.abc import Sequence

from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "ep_alm.md"
NAME = "ep_alm_accuracy"
"""Trained (``benchmarks/perceived.py``)."""
CHANCE = 0.25
"""One of four colors."""
_HEADS = {
    "seed": "seed",
    "trained": "trained",
    "share": "share",
    "untrained": "before training",
    "accuracy": "trained, images",
    "withheld": "images withheld",
    "frozen": "frozen bits",
    "backwards": "stages with backwards",
}


def blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The table of the page."""
    shown = [{**row, "share": f"{100 * float(row['share']):.2f} %"} for row in rows]
    return {"accuracy": table(tuple(_HEADS.values()), [[row[key] for key in _HEADS] for row in shown])}
