"""Seconds from the command to the end of the first step, with and without the prediction. Run by ``make bench-start``.

    python benchmarks/start.py [--rounds 5]

Beside them the time to load PyTorch, and all that a training run loads before its processes start.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeloom.runs.run_folder import METRICS
from user_environment import user_environment

LAYOUT = ("--layout.pp", "2", "--layout.loops", "1")
_LIMIT_S = 120.0
_GLANCE_S = 0.005


def loading_s(name: str) -> float:
    """Seconds of a process that imports a module."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {name}"], env=user_environment(), check=True)
    return time.perf_counter() - begin_s


def first_step_s(*words: str) -> float:
    """Seconds until a run has written the metrics of its first step; the run is then ended.

    Raises:
        RuntimeError: it ended before, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
        run, printed = Path(folder) / "run", Path(folder) / "printed.txt"
        command = [sys.executable, "-m", "pipeloom", "train", "--output.folder", str(run), *LAYOUT, *words]
        begin_s = time.perf_counter()
        with printed.open("wb") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=user_environment(), start_new_session=True
            )
        try:
            while not (run / METRICS).exists() or b"\n" not in (run / METRICS).read_bytes():
                if process.poll() is not None or time.perf_counter() - begin_s > _LIMIT_S:
                    raise RuntimeError(f"no first step:\n{printed.read_text()[-2000:]}")
                time.sleep(_GLANCE_S)
            return time.perf_counter() - begin_s
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


MEASURED = {
    "load torch": lambda: loading_s("torch"),
    "load pipeloom.training.run, torch included": lambda: loading_s("pipeloom.training.run"),
    "first step, without the prediction": lambda: first_step_s("--training.no-predict"),
    "first step, with the prediction": first_step_s,
}


def main() -> None:
    """Measure in turn, print medians and ranges."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    rounds = options.parse_args().rounds
    before = os.getloadavg()[0]
    found: dict[str, list[float]] = {name: [] for name in MEASURED}
    for _ in range(rounds):
        for name, measure in MEASURED.items():
            found[name].append(measure())
    table = Table("seconds", "median", "min .. max", title=f"{' '.join(LAYOUT)}, {rounds} rounds")
    for name, seconds in found.items():
        table.add_row(name, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} .. {max(seconds):.2f}")
    console = Console()
    console.print(table)
    console.print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
