"""Keys of kept blocks in files of the catalog's format: of models, and of measured layers."""

from typing import Any

from pipeloom.catalog.reading import Reader
from pipeloom.workload.model import BLOCK
from pipeloom.workload.model_shape import Blocks


def read_blocks(reader: Reader) -> Blocks | None:
    """The blocks of which matrices consist; ``None`` for a table without."""
    if "density" not in reader.names():
        reader.needs("density", "density_block")
        return None
    found = Blocks(density=reader.positive("density"), size=reader.integer("density_block", BLOCK))
    if not reader.has_problems and found.density >= 1:
        reader.complain(f"density must be below 1, found {found.density:g}; leave it out for dense matrices")
    return found


def block_keys(blocks: Blocks | None) -> dict[str, Any]:
    """The keys and values that ``read_blocks`` reads."""
    return {} if blocks is None else {"density": blocks.density, "density_block": blocks.size}
