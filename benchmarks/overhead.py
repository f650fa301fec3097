"""Overhead of the runtimes: pipeloom and PyTorch on loopback. Run by ``make bench-overhead``.

With next to no compute a step is all runtime: the same orders on the same ranks, time for each action. With real
compute it hardly counts. With emulated compute a step should take what its order allows.

    python benchmarks/overhead.py [--repetitions 15] [--only TEXT] [--folder outputs/side_by_side]
"""

import argparse
from pathlib import Path

from network import outcome_of
from side_by_side.case import PYTORCH_SCHEDULES, Case, Contender, Plan, pytorch_contender
from side_by_side.contest import hold_the_cores, warm_up
from side_by_side.picture import draw
from side_by_side.results import (
    NETWORK_COLUMNS,
    OVERHEAD_COLUMNS,
    Outcome,
    Target,
    machine,
    median_s,
    network_cells,
    overhead_cells,
    rows,
    show,
    wide_console,
    write,
)

SAME_ORDERS = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "depth-first", "LoopedBFS": "LoopedBFS"}
"""PyTorch's schedule -> what runs its order here; the last is read from PyTorch."""
NO_COMPUTE = [
    Case(
        name=f"next to no compute, {pp} ranks",
        pp=pp,
        num_microbatches=16,
        forward_s=0.0,
        backward_s=0.0,
        message_bytes=4096,
        receive_buffers=16,
    )
    for pp in (2, 4)
]
REAL = Case(name="real compute, 2 ranks", pp=2, num_microbatches=16, width=256, layers=2, message_bytes=128 * 1024)
"""As many ranks as most machines have cores; a stage takes some milliseconds."""
EMULATED = Case(
    name="emulated compute, 8 ranks",
    pp=8,
    num_microbatches=16,
    forward_s=0.010,
    backward_s=0.020,
    message_bytes=4096,
)


def overhead_plan(case: Case, repetitions: int) -> Plan:
    """Both runtimes with each order."""
    pairs = [(pytorch_contender(theirs, case.loops), ours) for theirs, ours in SAME_ORDERS.items()]
    contenders = [one for their, ours in pairs for one in (Contender("pipeloom", ours, their.loops), their)]
    return Plan(case, tuple(contenders), repetitions, turn=3, warmup=2)


def overhead_targets(outcome: Outcome) -> tuple[Target, ...]:
    """Each order by itself."""
    pairs = zip(outcome.measured[::2], outcome.measured[1::2], strict=True)
    return tuple(
        Target(f"time for each action of {theirs.contender.order}", median_s(ours) / median_s(theirs), 0.4)
        for ours, theirs in pairs
    )


def real_plan(repetitions: int) -> Plan:
    """Breadth-first of ours, and all of PyTorch's."""
    theirs = [pytorch_contender(name, REAL.loops) for name in PYTORCH_SCHEDULES]
    return Plan(REAL, (Contender("pipeloom", "breadth-first", REAL.loops), *theirs), repetitions)


def emulated_plan(repetitions: int) -> Plan:
    """Breadth-first of both."""
    ours = Contender("pipeloom", "breadth-first", EMULATED.loops)
    return Plan(EMULATED, (ours, pytorch_contender("LoopedBFS", EMULATED.loops)), repetitions)


def emulated_targets(outcome: Outcome) -> tuple[Target, ...]:
    """Against the order alone."""
    return (Target("pipeloom / what its order allows", median_s(outcome.ours) / outcome.ours.theory_s, 1.05),)


def main() -> None:
    """Run every case, print and write what came of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--repetitions", type=int, default=15, help="turns of each contender; three timed steps without compute"
    )
    options.add_argument("--only", default="", help="part of the names of the cases to run")
    options.add_argument("--folder", type=Path, default=Path("outputs/side_by_side"))
    chosen, console = options.parse_args(), wide_console()
    about = machine(hold_the_cores())
    console.print(f"{about}\n")
    warm_up()
    outcomes: list[Outcome] = []
    for case in [one for one in NO_COMPUTE if chosen.only in one.name]:
        outcomes.append(outcome_of(overhead_plan(case, chosen.repetitions), overhead_targets))
        show(outcomes[-1], console, overhead_cells, OVERHEAD_COLUMNS)
    if chosen.only in REAL.name:
        outcomes.append(outcome_of(real_plan(min(5, chosen.repetitions)), lambda _: ()))
        show(outcomes[-1], console, network_cells, NETWORK_COLUMNS)
    if chosen.only in EMULATED.name:
        outcomes.append(outcome_of(emulated_plan(min(5, chosen.repetitions)), emulated_targets))
        show(outcomes[-1], console, network_cells, NETWORK_COLUMNS)
    write(outcomes, about, chosen.folder, "overhead")
    draw([row for outcome in outcomes for row in rows(outcome)], chosen.folder / "overhead.svg")
    console.print(f"Written to {chosen.folder}: overhead.csv, overhead.json, overhead.svg")


if __name__ == "__main__":
    main()
