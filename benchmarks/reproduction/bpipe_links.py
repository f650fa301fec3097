"""Where BPipe's partners are: on one node or on two, and how much is moved."""

from collections.abc import Iterator
from dataclasses import replace

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.errors import UserError
from pipeloom.passes import balance
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.workload.run import Run
from reproduction.bpipe import (
    balanced,
    costs_of,
    input_room,
    kept_bytes,
    paired,
    partners_of,
    plain,
    run_of,
    stepped,
)
from reproduction.bpipe_cases import CLUSTER, GPT_96B, LLAMA_65B, PROGRAM, Case, Setting, program_of
from reproduction.machine import Row


def message_s(run: Run, software: Software) -> float:
    """Seconds of the slowest message between stages; a blocking program has them in its compute."""
    costs = Placed(run, CLUSTER, replace(software, is_blocking=False)).costs
    return max(costs.over_s(boundary) for boundary in range(run.num_stages - 1))


LINK_POINTS = (
    (GPT_96B, Setting("fused-softmax", "selective", 2)),
    (GPT_96B, Setting("flash2", "none", 2)),
    (LLAMA_65B, Setting("fused-softmax", "selective", 4)),
    (LLAMA_65B, Setting("flash2", "none", 4)),
)
"""Configurations that need BPipe."""


def link_rows() -> list[Row]:
    """BPipe with partners on one node, on two, and on two though it was made for one; and no more than it takes."""
    return [row for case, setting in LINK_POINTS for row in _links_of(case, setting)]


def _links_of(case: Case, setting: Setting) -> Iterator[Row]:
    apart, software = run_of(case, setting), program_of(case, PROGRAM)
    near, far = (costs_of(run, software) for run in (paired(apart), apart))
    made: dict[str, tuple[Schedule | None, Run, StageCosts]] = {
        "NVLink": (balanced(apart, near), paired(apart), near),
        "InfiniBand": (balanced(apart, far), apart, far),
        "InfiniBand, made for NVLink": (balanced(apart, near), apart, far),
        "InfiniBand, what the memory takes": (within(apart, software, far), apart, far),
    }
    for link, (schedule, run, real) in made.items():
        whole = stepped(run, software, plain(run), real)
        found = None if schedule is None else stepped(run, software, schedule, real)
        yield {
            "case": case.name,
            "attention": setting.attention,
            "recompute": setting.recompute,
            "micro_batch": str(setting.micro_batch),
            "link": link,
            "kept_gb": f"{kept_bytes(run, software)[1] / 1e9:.2f}",
            "swap_ms": f"{real.evict_s[1] * 1e3:.1f}",
            "message_ms": f"{message_s(run, software) * 1e3:.2f}",
            "forward_ms": f"{real.forward_s[1] * 1e3:.1f}",
            "slower": "" if found is None else f"{found.seconds / whole.seconds - 1:.4f}",
            "in_the_way": "" if found is None else f"{found.moving_s / whole.seconds:.4f}",
            "moved": "" if found is None else str(found.num_moved),
            "plain_gb": f"{max(whole.rank_bytes) / 1e9:.1f}",
            "fullest_gb": "" if found is None else f"{max(found.rank_bytes) / 1e9:.1f}",
        }


def within(run: Run, software: Software, costs: StageCosts) -> Schedule | None:
    """1F1B that evicts only as much as it takes to fit; ``None`` where that is not possible in time."""
    room, kept = input_room(run, software, costs), kept_bytes(run, software)
    whole, pairs = plain(run), partners_of(run)
    try:
        return balance(whole, KeptBytes(kept), seconds_of=costs.seconds, budget_bytes=room, partners=pairs)
    except UserError:
        return None
