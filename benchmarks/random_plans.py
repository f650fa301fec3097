"""Random questions to the planner: crashes, time limits, memory, written runs, and answers on better clusters.

Run by ``make random-plans``. Every question has a model and a cluster of the catalog, 1 to 1,000,000 devices, and a
time limit. Of the answers that are proved, some are compared with those on a cluster with more memory or bandwidth.
Fails if anything is wrong; a proved answer may become slower by ``MOST_SLOWER`` on a better cluster, since some layouts
are only tried. With twice the devices it may become slower, too, if the advice names the fewer ones.
"""

import argparse
import sys
from collections import Counter
from traceback import format_exc

from random_questions import ask, random_case, slowdowns_with_more, slower_with_more_devices

MOST_LATE_S, MOST_SLOWER = 1.0, 0.03


def main() -> int:
    """Print what is wrong, and a line of counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first question")
    parser.add_argument("--compared", type=int, default=20, help="most proved answers to compare")
    given = parser.parse_args()
    kinds, wrong, late_s, slower = Counter[str](), 0, 0.0, list[float]()
    left = given.compared
    for seed in range(given.first, given.first + given.questions):
        case = random_case(seed)
        try:
            outcome = ask(case)
            is_compared = left > 0 and outcome.answer is not None and outcome.kind == "proved"
            more = slowdowns_with_more(case, outcome.answer) if is_compared else {}
            fewer = slower_with_more_devices(case, outcome.answer) if is_compared else None
        except Exception:
            print(f"{seed} {case}: {format_exc()}", flush=True)
            wrong += 1
            continue
        kinds[outcome.kind] += 1
        left -= is_compared
        slower += more.values()
        late = outcome.seconds - case.budget_s
        late_s = max(late_s, late)
        problems = outcome.problems + ([f"{late:.1f} s after the time limit"] if late > MOST_LATE_S else [])
        problems += [] if fewer is None else [fewer]
        problems += [f"{name}: slower by {by:.1%}" for name, by in more.items() if by > MOST_SLOWER]
        wrong += len(problems)
        for problem in problems:
            print(f"{seed} {case}: {problem}", flush=True)
    counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    print(f"{given.questions} questions: {counts}; {wrong} wrong; at most {late_s:.2f} s after the time limit")
    if slower:
        worse = [by for by in slower if by > 0]
        most = f", at most by {max(worse):.2%}" if worse else ""
        print(f"{len(slower)} answers on better clusters: {len(worse)} slower{most}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
