"""SWARM (arXiv 2301.11913): the square-cube law, and peers that come and go.

The wider the model, the less its pipeline needs of a network. Peers that return serve any stage; moving one from the
richest to the poorest stage keeps the stages even.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from statistics import fmean

from pipeloom.catalog import load_cluster, load_software
from pipeloom.cost.hardware import Link
from pipeloom.cost.placed import Placed
from pipeloom.planner.peers import Swarm, serve
from pipeloom.planner.survival import random_events
from pipeloom.predict.traffic import Traffic, boundary_traffic
from pipeloom.workload.model import ModelShape
from pipeloom.workload.run import Run
from reproduction.machine import Row
from reproduction.tables import FOLDER, table

PAGE = FOLDER / "swarm.md"
NAME, PEERS = "swarm_traffic", "swarm_peers"
LOSS, SEEDS = "swarm_loss", (0, 1, 2)
"""Trained (``benchmarks/boundary_loss.py``)."""
EXACT, CODED, ROUNDED = "exact", "int8", "exact, rounded otherwise"
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


HOUR_S = 3600.0
NUM_PEERS, UP_S, AWAY_S, SPAN_S, MOVE_S = 64, 8 * HOUR_S, HOUR_S, 32 * HOUR_S, 60.0
NUM_TRACES = 50
EVERY_S = (inf, 300.0, 60.0)


def peers_rows() -> list[Row]:
    """What peers serve of the sum of the speeds of those that are up, over generated preemptions."""
    return [_peers_row(num_stages, every_s) for num_stages in (4, 8) for every_s in EVERY_S]


def _peers_row(num_stages: int, every_s: float) -> Row:
    found = []
    for seed in range(NUM_TRACES):
        events = random_events(NUM_PEERS, UP_S, AWAY_S, SPAN_S, seed)
        swarm = Swarm(work=(1.0,) * num_stages, move_s=MOVE_S, every_s=every_s, seed=seed)
        found.append(serve(events, NUM_PEERS, swarm, SPAN_S))
    shares = [one.share for one in found]
    return {
        "stages": num_stages,
        "every_s": "never" if every_s == inf else f"{every_s:.0f}",
        "mean": f"{fmean(shares):.3f}",
        "least": f"{min(shares):.3f}",
        "most": f"{max(shares):.3f}",
        "best": f"{sum(one.of_whole for one in found) / sum(one.of_up for one in found):.3f}",
        "moves": f"{fmean(one.num_moves for one in found):.0f}",
    }


def peers_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The table of peers that come and go."""
    heads = {
        "stages": "stages",
        "every_s": "a move every, s",
        "mean": "share of the speed",
        "least": "least",
        "most": "most",
        "best": "best division",
        "moves": "moves",
    }
    return {"peers": table(tuple(heads.values()), [[str(row[name]) for name in heads] for row in rows])}


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


def loss_changes(rows: Sequence[Row], kind: str, messages: str = CODED) -> list[float]:
    """By seed how much the loss of this kind is higher than with exact messages, in percent."""
    found = {(row["seed"], row["messages"]): float(row[f"{kind}_loss"]) for row in rows}
    return [100 * (found[str(seed), messages] / found[str(seed), EXACT] - 1) for seed in SEEDS]


def loss_blocks(rows: Sequence[Row]) -> dict[str, str]:
    """The table of losses, and what differs from exact messages."""
    losses = {(row["seed"], row["messages"]): row for row in rows}
    lines: list[list[str]] = []
    for kind, (place, seed) in product(("training", "validation"), enumerate(SEEDS)):
        line = [kind, str(seed), losses[str(seed), EXACT][f"{kind}_loss"]]
        for messages in (CODED, ROUNDED):
            change = loss_changes(rows, kind, messages)[place]
            line += [losses[str(seed), messages][f"{kind}_loss"], f"{change:+.2f} %"]
        lines.append(line)
    return {"loss": table(("loss", "seed", EXACT, CODED, "", ROUNDED, ""), lines)}
