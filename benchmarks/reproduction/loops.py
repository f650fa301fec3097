"""Figure 2 of the paper: 52 billion parameters, TP = PP = 8, one replica, micro-batches of one, over the loops."""

from dataclasses import replace
from itertools import product

from reproduction.machine import (
    MEGATRON,
    OWN,
    Candidate,
    Row,
    base_run,
    candidate,
    described,
    with_efficiency,
    with_messages,
)

NETWORKS = {
    "cut": ("cut", MEGATRON.efficiency.p2p),
    "whole": ("whole", MEGATRON.efficiency.p2p),
    "slow": ("whole", 0.16),
}
"""Messages between stages, and the fraction of the link that they reach: the programs' default, and about the least
that calibration has found for any program of the catalog (``zero-bubble``)."""

MICROBATCHES = (8, 9, 16, 64)
LOOPS = (1, 2, 4, 8)


def loop_rows() -> list[Row]:
    """Both looped schedules, each in its own program; with one loop they are GPipe and 1F1B."""
    rows: list[Row] = []
    for network, count, looped, loops in product(NETWORKS, MICROBATCHES, ("breadth-first", "depth-first"), LOOPS):
        if looped == "depth-first" and loops > 1 and count % 8:
            continue  # Megatron-LM refuses it
        chosen = chosen_for(looped, network, count, loops)
        step = chosen.simulate()
        idle = {"bubble_fraction": f"{step.bubble_fraction:.4f}"}
        rows.append({"network": network, "schedule": looped, **described(step), **idle})
    return rows


def chosen_for(looped: str, network: str, count: int, loops: int) -> Candidate:
    """One point of the figure."""
    messages, p2p = NETWORKS[network]
    run = replace(base_run("gpt-52b"), tp=8, pp=8, loops=loops, global_batch=count)
    program, plain = (OWN, "gpipe") if looped == "breadth-first" else (MEGATRON, "1f1b")
    software = with_efficiency(with_messages(program, messages), p2p=p2p)
    return candidate(run, software, looped if loops > 1 else plain)
