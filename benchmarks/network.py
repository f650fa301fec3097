"""pipeloom and PyTorch's pipelining over a slow network, with emulated compute. Run by ``make bench-network``.

Every case runs all contenders in the same processes, one step of each in turn. The last case compares messages in 8
bits (``layout.boundary int8``) with messages as they are. In all others one contender is what ``pipeloom plan``
chooses, or searches, for the network that ``pipeloom profile`` measures between the hosts before. Ranks are on hosts of
their own: network namespaces with a relay between them, which take root; elsewhere the benchmark prints that and ends.

    python benchmarks/network.py [--repetitions 5] [--only TEXT] [--folder outputs/side_by_side]
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from side_by_side.case import LOOPED, PYTORCH_SCHEDULES, Case, Contender, Link, Plan, pytorch_contender
from side_by_side.contest import hold_the_cores, run, warm_up
from side_by_side.hosts import relay_kind, why_not
from side_by_side.picture import draw
from side_by_side.planned import as_planned, profiled
from side_by_side.results import (
    NETWORK_COLUMNS,
    Outcome,
    Target,
    load_noted,
    machine,
    median_s,
    network_cells,
    rows,
    show,
    wide_console,
    write,
)
from side_by_side.theory import bound_s

EMULATED = {"forward_s": 0.010, "backward_s": 0.020}
PIPELINES = [
    Case(name="4 hosts, long latency", pp=4, message_bytes=256 * 1024, link=Link(200, 5), **EMULATED),
    Case(name="4 hosts, low rate", pp=4, message_bytes=256 * 1024, link=Link(100, 1), **EMULATED),
]
SHARDED = {"dp": 2, "loops": 4, **EMULATED}
"""A gather of a stage takes an eighth of a rank's compute, and there are four stages, each reduced as well."""
REPLICATED = [
    Case(
        name="4 hosts, 2 x 2, fully sharded",
        pp=2,
        message_bytes=64 * 1024,
        weight_bytes=3_000_000,
        link=Link(100, 1),
        **SHARDED,
    ),
    Case(
        name="8 hosts, 4 x 2, fully sharded",
        pp=4,
        message_bytes=32 * 1024,
        weight_bytes=1_500_000,
        link=Link(50, 1),
        **SHARDED,
    ),
]
CODED = [Case(name="4 hosts, 8 bits", pp=4, message_bytes=256 * 1024, link=Link(50, 1), **EMULATED)]
"""Messages take longer than the compute beside them, so that their bytes decide the step."""


def coded_plan(case: Case, repetitions: int) -> Plan:
    """Breadth-first of ours with messages as they are and in 8 bits, and the same order of PyTorch's."""
    exact, theirs = Contender("pipeloom", "breadth-first", case.loops), pytorch_contender("LoopedBFS", case.loops)
    return Plan(case, (exact, replace(exact, boundary="int8"), theirs), repetitions)


def coded_targets(outcome: Outcome) -> tuple[Target, ...]:
    """What is to hold for messages in 8 bits."""
    exact, coded, _ = outcome.measured
    return (
        Target("8 bits / as they are", median_s(coded) / median_s(exact), 0.60),
        Target("8 bits / simulated", median_s(coded) / coded.theory_s, 1.10),
    )


def plan_of(case: Case, planned: Contender, repetitions: int) -> Plan:
    """Breadth-first of ours, the planner's order, and all of PyTorch's schedules; looped ones also with two loops."""
    theirs = [pytorch_contender(name, case.loops) for name in PYTORCH_SCHEDULES]
    if case.loops > 2:
        theirs += [pytorch_contender(name, 2) for name in LOOPED]
    return Plan(case, (Contender("pipeloom", "breadth-first", case.loops), planned, *theirs), repetitions)


def planned_targets(outcome: Outcome) -> tuple[Target, ...]:
    """What is to hold for the order of the planner."""
    planned, best = next(one for one in outcome.measured if one.contender.given is not None), outcome.best_of_pytorch()
    step_s = median_s(planned)
    return (
        Target(f"as planned / {best.contender} x{best.contender.loops}, PyTorch's best", step_s / median_s(best), 0.70),
        Target("as planned / simulated", step_s / planned.theory_s, 1.03),
    )


def targets_of(outcome: Outcome) -> tuple[Target, ...]:
    """What is to hold for a case."""
    return (*_own_targets(outcome), *planned_targets(outcome))


def _own_targets(outcome: Outcome) -> tuple[Target, ...]:
    """What is to hold for breadth-first."""
    ours = median_s(outcome.ours)
    to_theory = ours / outcome.ours.theory_s
    if outcome.plan.case.dp > 1:
        best = outcome.best_of_pytorch()
        return (
            Target(f"pipeloom / {best.contender} x{best.contender.loops}, PyTorch's best", ours / median_s(best), 0.70),
            Target("pipeloom / simulated", to_theory, 1.15),
        )
    (same,) = [one for one in outcome.measured if one.contender.order == "LoopedBFS"]
    other = outcome.best_of_pytorch(leave_out=("LoopedBFS",))
    return (
        Target("pipeloom / simulated", to_theory, 1.08),
        Target("pipeloom / PyTorch LoopedBFS", ours / median_s(same), 0.58),
        Target(f"pipeloom / {other.contender}, PyTorch's best other", ours / median_s(other), 0.80),
    )


def outcome_of(plan: Plan, targets: Callable[[Outcome], tuple[Target, ...]]) -> Outcome:
    """Run a plan."""
    with load_noted() as load:
        measured = tuple(run(plan))
    return Outcome(plan, measured, load, targets(Outcome(plan, measured, load)))


def main() -> None:
    """Run every case, print and write what came of it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=5, help="timed steps of each contender")
    options.add_argument("--only", default="", help="part of the names of the cases to run")
    options.add_argument("--folder", type=Path, default=Path("outputs/side_by_side"))
    chosen, console = options.parse_args(), wide_console()
    reason = why_not()
    if reason is not None:
        console.print(f"Skipped: the shaped network cannot be set up here, because {reason}.")
        return
    about = machine(hold_the_cores()) | {"relay": relay_kind()}
    console.print(f"{about}\n")
    warm_up()
    outcomes: list[Outcome] = []
    for case in [one for one in PIPELINES + REPLICATED if chosen.only in one.name]:
        cluster = profiled(case)
        planned = as_planned(case, cluster)
        link = f"{planned.link} (nominal {case.link})"
        outcomes.append(outcome_of(plan_of(case, planned, chosen.repetitions), targets_of))
        show(outcomes[-1], console, network_cells, NETWORK_COLUMNS)
        step_s, least_s = outcomes[-1].measured[1].theory_s, bound_s(case, planned)
        console.print(
            f"  pipeloom profile measured {link}. {planned.order}, {planned.loops} loops, is simulated to take "
            f"{step_s * 1e3:.0f} ms there; no order of these stages takes less than {least_s * 1e3:.0f} ms.\n"
        )
        write(outcomes, about, chosen.folder, "network")
    for case in [one for one in CODED if chosen.only in one.name]:
        outcomes.append(outcome_of(coded_plan(case, chosen.repetitions), coded_targets))
        show(outcomes[-1], console, network_cells, NETWORK_COLUMNS)
        write(outcomes, about, chosen.folder, "network")
    draw([row for outcome in outcomes for row in rows(outcome)], chosen.folder / "network.svg")
    console.print(f"Written to {chosen.folder}: network.csv, network.json, network.svg")


if __name__ == "__main__":
    main()
