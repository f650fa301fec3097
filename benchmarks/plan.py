"""How fast the planner answers, from the shell and on one core: layouts, what bounds ruled out, seconds.

Run by ``make plan-speed``. Each line is a process of its own, its start-up included. ``search`` finds the ten best and
proves them; ``answer`` also looks for the best of other kinds and for what would change the answer.
"""

import json
import os
import resource
import subprocess
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from user_environment import user_environment


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        name: for people.
        flags: of ``pipeloom plan``.
    """

    name: str
    flags: str


OLD = "--families 1f1b depth-first --shards none optimizer --strategies none"
CASES = (
    Case("8B on 64 H100", "--model llama-3-8b --cluster dgx-h100 --devices 64 --global-batch 256 --seq 8192"),
    Case(
        "175B on 4,096 A100, 1F1B and interleaved alone",
        f"--model gpt-175b --cluster dgx-a100 --devices 4096 --global-batch 4096 --seq 2048 {OLD}",
    ),
    Case(
        "175B on 4,096 A100, everything",
        "--model gpt-175b --cluster dgx-a100 --devices 4096 --global-batch 4096 --seq 2048",
    ),
    Case(
        "405B on 16,384 H100, everything",
        "--model llama-3-405b --cluster dgx-h100 --devices 16384 --global-batch 2048 --seq 8192",
    ),
    Case(
        "1T on 16,384 A100, everything",
        "--model gpt-1t --cluster dgx-a100 --devices 16384 --global-batch 4096 --seq 2048",
    ),
)


def main() -> None:
    """Plan every question twice and print the table."""
    columns = ("layouts", "simulated", "tried", "too slow", "too large", "search s", "layouts/s", "answer s", "best")
    table = Table("question", *columns)
    core = min(os.sched_getaffinity(0))
    answered(CASES[0], core)  # bytecode and compiled loops are on disk now
    for case in CASES:
        search_s, answer = answered(case, core, "--no-explain")
        answer_s, _ = answered(case, core)
        counts, best = answer["counts"], answer["layouts"][0]
        layout = f"tp {best['tp']} pp {best['pp']} dp {best['dp']} x {best['loops']}, {best['family']}"
        numbers = [f"{counts[name]:,}" for name in ("layouts", "simulated", "tried", "too_slow", "too_large")]
        speed = f"{counts['layouts'] / search_s:,.0f}"
        table.add_row(case.name, *numbers, f"{search_s:.1f}", speed, f"{answer_s:.1f}", layout)
    Console(width=150).print(table)


def answered(case: Case, core: int, *flags: str) -> tuple[float, dict]:
    """Seconds of the processor that the command took, and its answer."""
    words = [sys.executable, "-m", "pipeloom", "plan", *case.flags.split(), "--json", *flags]
    begin_s = _children_s()
    done = subprocess.run(
        words,
        env=user_environment(),
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return _children_s() - begin_s, json.loads(done.stdout)


def _children_s() -> float:
    """Seconds of the processor that commands have taken so far; of the clock they would depend on what else runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
