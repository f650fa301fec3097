"""How much breadth-first gains on 52 billion parameters, if the constants that nobody measured were different."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from pipeloom.cost.hardware import Group
from pipeloom.cost.software import Software
from reproduction.batch import METHODS, Setting
from reproduction.fastest import fastest
from reproduction.machine import CLUSTER, MEGATRON, OWN, Row, base_run, tflop_per_s, with_efficiency, with_messages

PUBLISHED_GAIN = 0.43
"""Breadth-first over Megatron-LM at a small batch for each device (arXiv 2211.05953 v2, abstract)."""
MODEL = "gpt-52b"
SMALLEST = 8
LARGEST = 384
BASELINES = ("depth-first", "1F1B")


@cache
def best_tflop_per_s(method: str, batch: int, own: Software, megatron: Software) -> float:
    """TFLOP/s of a method's best configuration; 0 if none fits."""
    step = fastest(METHODS[method](Setting(MODEL, batch), own, megatron))
    return 0.0 if step is None else tflop_per_s(step)


def gain_rows() -> list[Row]:
    """The gain at four batches for each change of both programs."""
    return [
        gain_row(title, messages, batch, own, megatron)
        for title, messages, own, megatron in variants()
        for batch in (SMALLEST, 16, 64, LARGEST)
    ]


def variants() -> Iterator[tuple[str, str, Software, Software]]:
    """(what is changed, messages, breadth-first's program, Megatron-LM)."""
    usual = MEGATRON.efficiency
    for messages in ("cut", "whole"):
        own, megatron = with_messages(OWN, messages), with_messages(MEGATRON, messages)
        yield "as in the catalog", messages, own, megatron
        for value in (0.16, 0.4, 1.0):
            changed = (with_efficiency(each, p2p=value) for each in (own, megatron))
            yield f"p2p bandwidth: {value:g} of the link instead of {usual.p2p:.2g}", messages, *changed
        if messages == "cut":
            joined_s = own.efficiency.exchange_s + gather_of_pieces_s()
            changed = (with_efficiency(each, exchange_s=joined_s) for each in (own, megatron))
            yield "the pieces of a message are put together again over NVLink", messages, *changed
        for value in (5e-4, 2e-3, 1e-2):
            slow = with_efficiency(megatron, exchange_s=value)
            yield (
                f"Megatron-LM: {value * 1e3:g} ms for each exchange instead of {usual.exchange_s * 1e3:.2g}",
                messages,
                own,
                slow,
            )
        for value in (0.6, 1.1):
            changed = (with_efficiency(each, matmul=value) for each in (own, megatron))
            yield f"matrix products: {value:g} of the curve instead of {usual.matmul:.2g}", messages, *changed
        changed = (with_efficiency(each, data_bus=0.2) for each in (own, megatron))
        yield f"data-parallel bandwidth: 0.2 of the link instead of {usual.data_bus:.2g}", messages, *changed
    own, megatron = with_messages(OWN, "whole"), with_messages(MEGATRON, "cut")
    yield "only Megatron-LM cuts messages", "mixed", own, megatron


def gather_of_pieces_s() -> float:
    """Seconds in which eight tensor-parallel ranks gather a message of one sequence, at the catalog's efficiency."""
    run = replace(base_run(MODEL), tp=CLUSTER.devices_per_node)
    message = run.tokens * run.shape.hidden * run.element_bytes
    group = Group.strided(run.tp, 1, CLUSTER.devices_per_node)
    return CLUSTER.collective_s("all_gather", message, group, OWN.efficiency.tensor_bus)


def gain_row(title: str, messages: str, batch: int, own: Software, megatron: Software) -> Row:
    """One variant at one batch."""
    ours = best_tflop_per_s("breadth-first", batch, own, megatron)
    depth_first, plain = (best_tflop_per_s(method, batch, own, megatron) for method in BASELINES)
    return {
        "change": title,
        "messages": messages,
        "batch": str(batch),
        "breadth_first": f"{ours:.4f}",
        "depth_first": f"{depth_first:.4f}",
        "1f1b": f"{plain:.4f}",
        "gain": f"{ours / max(depth_first, plain) - 1:.4f}",
        "gain_over_1f1b": f"{ours / plain - 1:.4f}",
    }


def needed_rows() -> list[Row]:
    """Seconds that an exchange of Megatron-LM would have to cost besides its bytes, for two published observations."""
    rows: list[Row] = []
    for messages in ("cut", "whole"):
        own, megatron = with_messages(OWN, messages), with_messages(MEGATRON, messages)
        ours = best_tflop_per_s("breadth-first", SMALLEST, own, megatron)

        def has_gain(seconds: float, own: Software = own, megatron: Software = megatron, ours: float = ours) -> bool:
            slow = with_efficiency(megatron, exchange_s=seconds)
            others = max(best_tflop_per_s(method, SMALLEST, own, slow) for method in BASELINES)
            return ours / others - 1 >= PUBLISHED_GAIN

        def is_below(seconds: float, own: Software = own, megatron: Software = megatron) -> bool:
            slow = with_efficiency(megatron, exchange_s=seconds)
            looped, plain = (best_tflop_per_s(method, SMALLEST, own, slow) for method in BASELINES)
            return looped <= plain

        for what, holds in (
            (f"breadth-first gains {PUBLISHED_GAIN:.0%}", has_gain),
            ("depth-first is no faster than 1F1B", is_below),
        ):
            rows.append({"observation": what, "messages": messages, "exchange_ms": f"{least(holds) * 1e3:.1f}"})
    return rows


def least(holds: Callable[[float], bool], most: float = 0.1) -> float:
    """The least number of seconds with which something holds, to 0.01 ms; infinite if it does not up to ``most``."""
    if not holds(most):
        return float("inf")
    low, high = 0.0, most
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
