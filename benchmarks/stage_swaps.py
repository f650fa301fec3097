"""A model of several times its budget beside itself without one: losses, step times, predictions, what of swaps hid.

    python benchmarks/stage_swaps.py --rounds 3

Runs ``pipeloom train`` on this machine, with and without ``schedule.device_budget``, in turns. Medians over the steps
of a run, then over the rounds; the ratio is of neighboring runs, since a machine's speed changes from minute to minute.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

MODEL = ["--model.num-layers", "14", "--model.hidden-size", "256", "--model.num-heads", "4"]
LAYOUT = ["--layout.pp", "1", "--layout.loops", "16", "--layout.microbatch-size", "2"]
BRIEF = ["--training.validation-batches", "1", "--training.sample-tokens", "0"]
STATE_BYTES = 16
"""Of a parameter in single precision: weight, gradient, two moments."""


def train(folder: Path, words: list[str]) -> dict[str, Any]:
    """One run: its summary, with the losses of its steps."""
    output = ["--output.folder", str(folder), "--output.trace-step", "6", "--checkpoint.final", "none"]
    command = [sys.executable, "-m", "pipeloom", "train", *MODEL, *LAYOUT, *BRIEF, *output, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "losses": [line["loss"] for line in lines]}


def _predicted(summary: dict[str, Any]) -> float:
    """The step as it was predicted, in parts of the one that was measured."""
    return summary["predicted_step_time_s"] / summary["step_time_s"]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--budget", default="44MB")
    parser.add_argument("--num-microbatches", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    print("micro-batches    ratio of step times  predicted / measured: plain  swapped  hidden  peak MB  same losses")
    for count in options.num_microbatches:
        words = ["--layout.num-microbatches", str(count), "--training.steps", str(options.steps)]
        ratios: list[float] = []
        hidden: list[float] = []
        predicted: list[tuple[float, float]] = []
        is_same, swapped = True, dict[str, Any]()
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as name:
                plain = train(Path(name) / "plain", words)
                swapped = train(Path(name) / "swapped", [*words, "--schedule.device-budget", options.budget])
            ratios.append(swapped["step_time_s"] / plain["step_time_s"])
            hidden.append(swapped["swap_hidden_s"] / swapped["swap_s"])
            predicted.append((_predicted(plain), _predicted(swapped)))
            is_same = is_same and swapped["losses"] == plain["losses"]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        peak = swapped["peak_stage_bytes"] / 1e6
        of_plain, of_swapped = map(median, zip(*predicted, strict=True))
        of_both = f"{of_plain:27.2f}  {of_swapped:7.2f}"
        print(f"{count:13}  {spread:>21}  {of_both}  {median(hidden):6.0%}  {peak:7.1f}  {is_same}", flush=True)
    print(f"weights and state of the model: {swapped['num_parameters'] * STATE_BYTES / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
