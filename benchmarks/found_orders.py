"""How far searched orders stay from a lower bound of all orders, on the networks of ``benchmarks/network.py``.

    python benchmarks/found_orders.py [--tries 300] [--only TEXT]

Nothing is run: every order is simulated, with the nominal network, and may keep the activations of all micro-batches.
"""

import argparse
from collections.abc import Iterator
from functools import partial

from network import PIPELINES, REPLICATED
from pipeloom.families import Choice
from pipeloom.orders.search import search_order
from pipeloom.orders.work import Work
from pipeloom.schedule import Schedule
from side_by_side.case import Case, Contender
from side_by_side.theory import lowered, priced


def works(case: Case) -> Iterator[tuple[str, Work]]:
    """The work of a case with one stage on each rank, and with several, on a loop and on a V."""
    for loops, placement in ((1, "looped"), (2, "looped"), (2, "v"), (4, "looped"), (4, "v")):
        ours = Contender("pipeloom", "breadth-first", loops)
        sizes = {"pp": case.pp, "loops": loops, "num_microbatches": case.num_microbatches}
        start = Choice(family=ours.order, placement=placement, **sizes).make()
        complete = partial(_complete, case, ours)
        costs, sharing = priced(case, ours, start.placement)
        room = (float(case.num_microbatches * loops),) * case.pp
        yield f"{loops}, {placement}", Work(start=start, complete=complete, costs=costs, sharing=sharing, room=room)


def _complete(case: Case, contender: Contender, order: Schedule) -> Schedule:
    return lowered(case, contender, order, case.receive_buffers)


def main() -> None:
    """Print a row for each case and placement."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tries", type=int, default=300, help="changes of an order")
    options.add_argument("--only", default="", help="part of the names of the cases")
    chosen = options.parse_args()
    print("| case | stages of a rank | fastest family, ms | found, ms | no order below, ms | found / bound |")
    print("|---|---|---|---|---|---|")
    for case in [one for one in PIPELINES + REPLICATED if chosen.only in one.name]:
        for name, work in works(case):
            found = search_order(work, chosen.tries)
            times = " | ".join(f"{each * 1e3:.0f}" for each in (found.family_s, found.step_s, found.least_s))
            print(f"| {case.name} | {name} | {times} | {found.step_s / found.least_s:.3f} |", flush=True)


if __name__ == "__main__":
    main()
