"""Runs that hang in one rank, at a random place of each of eight kinds: does `pipeloom inspect` name it, and when?

Run by ``make hangs``. The answer is right if it names the rank first, with the action or activity where the hang has a
known one, within ``training.stall_timeout_s`` and five seconds, and if it is still right after the run has ended.
``ARGS="40 1/2"`` runs the first of two halves.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from hanging import LIMIT_S, SPARE_S, answer_to, fresh, hangs

from pipeloom.runs.hang_words import sentences_of

NUMBER = 40


def main() -> int:
    """Print each hang and its answer, and how many were right."""
    number = int(sys.argv[1]) if len(sys.argv) > 1 else NUMBER
    part, parts = map(int, sys.argv[2].split("/")) if len(sys.argv) > 2 else (1, 1)
    chosen = hangs(number)[part - 1 :: parts]
    times: list[float] = []
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="pipeloom-hangs-") as name:
        for index, hang in enumerate(chosen):
            begin_s = time.monotonic()
            right_s, state, printed = answer_to(hang, fresh(Path(name) / str(index)))
            output = sentences_of(state.found[0], state)[0] if state is not None and state.found else "no answer"
            wrong += right_s is None
            times += [] if right_s is None else [right_s]
            verdict = "WRONG" if right_s is None else f"after {right_s:.1f} s"
            print(f"{hang.kind:<24} {hang.layout:<12} rank {hang.rank}  {verdict:<12} {output}", flush=True)
            if right_s is None:
                print(printed, f"({time.monotonic() - begin_s:.0f} s)")
    limit = f"within {LIMIT_S:g} + {SPARE_S:g} s"
    print(f"{len(chosen) - wrong} of {len(chosen)} right {limit}, at the median after {median(times or [0]):.1f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
