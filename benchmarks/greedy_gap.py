"""How far the greedy generator stays from the best schedules there are, which an exact solver finds for small cases.

PYTHONPATH=tests/support python benchmarks/greedy_gap.py     # needs ortools; some minutes
"""

from itertools import product

from exact import Exact

from pipeloom.families.greedy import Task, best_schedule
from pipeloom.schedule import Placement

SECONDS = ((1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 3, 2))
"""Forward, gradient of the input, gradients of the weights."""
SIZES = {
    "one stage": (Placement.looped, (2, 3, 4), (2, 3, 4, 6)),
    "two, looped": (lambda pp: Placement.looped(pp, 2), (2, 3), (2, 3, 4)),
    "two, v": (lambda pp: Placement.v(pp, 2), (2, 3), (2, 3, 4)),
}
"""Placement, ranks, micro-batches."""


def gap(placement: Placement, count: int, seconds: tuple[int, int, int], inputs: int) -> float:
    """Found / best - 1 in the seconds of a step."""
    stages, ranks = placement.num_stages, placement.num_ranks
    forward_s, input_s, weight_s = ((float(each),) * stages for each in seconds)
    task = Task(
        placement=placement,
        num_microbatches=count,
        forward_s=forward_s,
        input_s=input_s,
        weight_s=weight_s,
        budgets=(float(inputs),) * ranks,
    )
    found_s = best_schedule(task).step_s
    exact = Exact(placement, count, [[each] * stages for each in seconds], [inputs] * ranks, most_s=round(found_s))
    best_s, is_proven, _ = exact.solve(exact.makespan)
    assert is_proven
    return found_s / best_s - 1


def main() -> None:
    """Print a row for each kind of placement and budget."""
    print("| stages of a rank | memory | cases | best found in | mean gap | largest |")
    print("|---|---|---|---|---|---|")
    for name, (make, ranks, counts) in SIZES.items():
        for part, what in ((0.5, "half of 1F1B's, or one input more"), (1, "1F1B's"), (2, "twice 1F1B's")):
            gaps = []
            for pp, count, seconds in product(ranks, counts, SECONDS):
                placement = make(pp)
                loops = placement.num_stages // pp
                inputs = max(loops + (1 if loops > 1 else 0), round(part * placement.num_stages + 0.01))
                gaps.append(gap(placement, count, seconds, inputs))
            best = sum(each < 1e-9 for each in gaps)
            mean, largest = f"{sum(gaps) / len(gaps):.2%}", f"{max(gaps):.1%}"
            print(f"| {name} | {what} | {len(gaps)} | {best} | {mean} | {largest} |", flush=True)


if __name__ == "__main__":
    main()
