"""A run that gets SIGTERM or SIGUSR1 at random moments and is started again: no step is lost, every status is 75.

Run by ``make signals``. Moments are drawn over the whole life of the process, with start-up, validation and saving;
only the first half second is left out, in which Python starts.
"""

import json
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIGNALS, STEPS = 20, 60
SEED = 1
COMMAND = (
    "train --model.num-layers 6 --model.hidden-size 64 --model.num-heads 2 --layout.pp 2 --layout.num-microbatches 4 "
    "--data.seq-len 32 --checkpoint.every 7 --training.validate-every 5 --training.validation-batches 3 "
    "--training.sample-tokens 5"
)


def command(folder: Path, name: str) -> list[str]:
    """The run in a folder; resumes there if it has a checkpoint."""
    run = folder / name
    words = [sys.executable, "-m", "pipeloom", *shlex.split(COMMAND), "--training.steps", str(STEPS)]
    words += ["--output.folder", str(run)]
    has_one = any(run.glob("checkpoints/step-*/checkpoint.json"))
    return [*words, "--checkpoint.resume", str(run)] if has_one else words


def curve(run: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each line of the metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def main() -> int:
    """Run once without signals, then with them; print each signal, and compare the losses."""
    draw = random.Random(SEED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.monotonic()
        subprocess.run(command(folder, "whole"), check=True, capture_output=True)
        life_s = time.monotonic() - begin
        print(f"{STEPS} steps without a signal: {life_s:.1f} s")
        sent, wrong = 0, 0
        while sent < SIGNALS:
            number = draw.choice([signal.SIGTERM, signal.SIGUSR1])
            moment_s = draw.uniform(0.5, 0.5 * life_s)
            words = command(folder, "run")
            process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                process.communicate(timeout=moment_s)
            except subprocess.TimeoutExpired:
                process.send_signal(number)
            printed = process.communicate()[1].splitlines()
            if process.returncode == 0:
                print("the run ended before the signal; begun again")
                (folder / "run").rename(folder / f"ended-{sent}-{time.monotonic_ns()}")
                continue
            sent += 1
            is_right = process.returncode == 75
            wrong += not is_right
            print(f"{number.name} after {moment_s:4.1f} s: status {process.returncode}; {' '.join(printed[-2:])[:120]}")
        subprocess.run(command(folder, "run"), check=True, capture_output=True)
        is_same = curve(folder / "run") == curve(folder / "whole")
        equal = "equal" if is_same else "NOT equal"
        print(f"{SIGNALS - wrong} of {SIGNALS} ended with status 75; losses of all steps are {equal}")
        return int(wrong > 0 or not is_same)


if __name__ == "__main__":
    sys.exit(main())
