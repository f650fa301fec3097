"""Figure 2 of the paper: 52 billion parameters, TP = PP = 8, one replica, micro-batches of one, over the loops."""

from dataclasses import replace
from itertools import product

from pipeloom.planner.search import Candidate
from pipeloom.simulated_step import simulate_step
from reproduction.machine import (
    CLUSTER,
    MEGATRON,
    MESSAGES,
    OWN,
    Row,
    base_run,
    candidate,
    described,
    with_messages,
)

MICROBATCHES = (8, 9, 16, 64)
LOOPS = (1, 2, 4, 8)


def loop_rows() -> list[Row]:
    """Both looped schedules, each in its own program; with one loop they are GPipe and 1F1B."""
    rows: list[Row] = []
    for messages, count, looped, loops in product(MESSAGES, MICROBATCHES, ("breadth-first", "depth-first"), LOOPS):
        if looped == "depth-first" and loops > 1 and count % 8:
            continue  # Megatron-LM refuses it
        chosen = chosen_for(looped, messages, count, loops)
        step = simulate_step(chosen.run, CLUSTER, chosen.software, chosen.order)
        idle = {"bubble_fraction": f"{step.bubble_fraction:.4f}"}
        rows.append({"messages": messages, "schedule": looped, **described(step), **idle})
    return rows


def chosen_for(looped: str, messages: str, count: int, loops: int) -> Candidate:
    """One point of the figure."""
    run = replace(base_run("gpt-52b"), tp=8, pp=8, loops=loops, global_batch=count)
    if looped == "breadth-first":
        return candidate(run, with_messages(OWN, messages), looped if loops > 1 else "gpipe")
    return candidate(run, with_messages(MEGATRON, messages), looped if loops > 1 else "1f1b")
