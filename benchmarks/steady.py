"""A run of 2,000 steps with checkpoints and states in memory: do memory, descriptors and step times stay the same?

Run by ``make steady``. Memory is what each process has in anonymous pages, and shared memory. Proportional set sizes
would grow without a leak: where another program that maps the same libraries ends, and where a rank writes to a page
that it shared with the process it was forked from. The first fifth is left out, in which allocators and caches grow.
"""

import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from faults import LAYOUT
from forked import Forked
from small_run import write_text

STEPS = 2000
MODEL = "--model.num-layers 4 --model.hidden-size 32 --model.num-heads 2 --data.seq-len 16 --training.no-predict"


def children(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += children(int(one))
    return found


def use_of(pids: list[int]) -> tuple[float, int]:
    """Megabytes and descriptors of processes."""
    kibibytes, descriptors = 0, 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            kibibytes += sum(int(line.split()[1]) for line in lines if line.startswith(("Anonymous:", "Pss_Shmem:")))
            descriptors += sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return kibibytes / 1e3, descriptors


def measure(folder: Path, steps: int) -> tuple[list[tuple[int, float, int]], list[float]]:
    """(step, megabytes, descriptors) over a run, and the seconds of its steps."""
    words = f"train {MODEL} {LAYOUT} --training.steps {steps} --training.validate-every 50 --checkpoint.every 25 "
    words += "--checkpoint.keep 2 --training.validation-batches 1 --training.sample-tokens 0 --restart.times 1"
    data = ["--data.path", str(write_text(folder)), "--data.cache", str(folder / "cache")]
    command = Forked(folder, [*words.split(), *data, "--output.folder", str(folder / "run")])
    metrics, samples, done = folder / "run" / "metrics.jsonl", list[tuple[int, float, int]](), 0
    while command.is_running and done < steps:
        time.sleep(0.05)
        with suppress(FileNotFoundError, IndexError, ValueError):
            now = json.loads(metrics.read_text().splitlines()[-1])["step"]
            if now // 10 > done // 10 and now < steps:
                samples.append((now, *use_of(children(command._process.pid))))
            done = now
    assert command.end(60) == 0, command.stderr
    return samples, [json.loads(line)["step_time_s"] for line in metrics.read_text().splitlines()]


def main() -> int:
    """Print the medians of each fifth of the run."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    with tempfile.TemporaryDirectory(prefix="pipeloom-steady-") as name:
        samples, times_s = measure(Path(name), steps)
    fifths = [[one for one in samples if number <= (one[0] - 1) * 5 // steps < number + 1] for number in range(5)]
    print(f"{'steps':>12} {'MB':>8} {'descriptors':>12} {'ms a step':>10}")
    rows = []
    for number, part in enumerate(fifths):
        first, end = steps * number // 5, steps * (number + 1) // 5
        row = (median(one[1] for one in part), median(one[2] for one in part), median(times_s[first:end]) * 1e3)
        rows.append(row)
        print(f"{first + 1:>6}-{end:<5} {row[0]:8.1f} {row[1]:12.0f} {row[2]:10.1f}")
    grown = rows[-1][0] / rows[1][0] - 1
    more = rows[-1][1] - rows[1][1]
    print(f"from the second to the last fifth: memory {grown:+.1%}, descriptors {more:+.0f}")
    return int(grown > 0.02 or more > 4)


if __name__ == "__main__":
    sys.exit(main())
