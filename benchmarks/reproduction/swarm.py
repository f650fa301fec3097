"""SWARM's square-cube law (arXiv 2301.11913): the wider the model, the less its pipeline needs of a network."""

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.catalog import load_cluster, load_software
from pipeloom.cost.hardware import Link
from pipeloom.cost.placed import Placed
from pipeloom.predict.traffic import Traffic, boundary_traffic
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run
from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "swarm.md"
NAME = "swarm_traffic"
CLUSTER = "dgx-1-v100"
"""The published ones are V100, too; here with one to a node."""
MBIT = 500.0
LATENCY_S = 0.01
WIDTHS = (768, 1536, 3072, 6144, 12288)
SEQ = 512


def traffic_of(width: int, boundary: str | None) -> Traffic:
    """A pipeline of stages of one layer each, one sequence to a micro-batch, in float16."""
    cluster = load_cluster(CLUSTER)
    network = Link(latency_s=LATENCY_S, bytes_per_s=MBIT * 1e6 / 8)
    alone = replace(cluster, name="one V100 to a node", devices_per_node=1, inter=network)
    sizes = {"layers": 8, "hidden": width, "heads": width // 64, "kv_heads": width // 64, "ffn": 4 * width}
    shape = ModelShape(**sizes, vocab=0, family="gpt2", tied=False)
    run = Run(shape=shape, seq=SEQ, pp=8, global_batch=64, precision="fp16", boundary=boundary)
    found = boundary_traffic(Placed(run, alone, load_software("pipeloom")))
    assert found is not None, "nodes have a network"
    return found


def traffic_rows() -> list[Row]:
    """For each width a message beside a forward, as it is and in 8 bits."""
    return [_row(width) for width in WIDTHS]


def _row(width: int) -> Row:
    exact, coded = traffic_of(width, None), traffic_of(width, "int8")
    return {
        "width": width,
        "message_mb": f"{exact.message_bytes / 1e6:.2f}",
        "int8_mb": f"{coded.message_bytes / 1e6:.2f}",
        "forward_ms": f"{exact.forward_s * 1e3:.2f}",
        "message_to_forward": f"{exact.message_s / exact.forward_s:.1f}",
        "int8_to_forward": f"{coded.message_s / coded.forward_s:.1f}",
        "kb_per_ms": f"{exact.message_bytes / exact.forward_s / 1e6:.0f}",
    }


def traffic_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The table of the page."""
    heads = {
        "width": "width",
        "message_mb": "message, MB",
        "int8_mb": "int8, MB",
        "forward_ms": "forward, ms",
        "message_to_forward": "message / forward",
        "int8_to_forward": "int8 / forward",
        "kb_per_ms": "KB for each ms",
    }
    return {"traffic": table(tuple(heads.values()), [[str(row[name]) for name in heads] for row in rows])}
