"""The planner's ranking compared with measured steps: every layout of a small model on four local processes.

Profiles the machine and the model's pieces, runs the planner and then every layout of the stated space, and prints
how much slower than the fastest the planner's first choice was (its regret). Run by ``make plan-demo``.

Each run is one of its own, in processes of its own. They go in rounds, all layouts in each, in another order every
time, and the median over all steps counts: what the machine does to one layout it does to all. A step during which
other programs took more than a few percent of the machine is left out, and layouts with too few others run again.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from pipeloom.catalog import load_cluster, load_software
from pipeloom.cli import main as pipeloom
from pipeloom.config import (
    CheckpointConfig,
    ModelConfig,
    OutputConfig,
    RunConfig,
    TrainingConfig,
)
from pipeloom.data.text import Data
from pipeloom.execute.processes.world import World
from pipeloom.planner.candidate import Candidate, complete
from pipeloom.planner.question import Limits, Question
from pipeloom.planner.run_file import run_config
from pipeloom.planner.search import search
from pipeloom.planner.space import Leaf, arrangements
from pipeloom.predict.step import SimulatedStep, lowered
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.session import run_on_all_ranks
from pipeloom.training.trainer import Trainer
from pipeloom.workload.model import shape_of

PROCESSES, BATCH, SEQ = 4, 16, 128
MODEL = ModelConfig(num_layers=8, hidden_size=192, num_heads=6, vocab_size=257).resolve(257)
MICRO_BATCHES, TENSOR = (2, 4), (1, 2)
SPACE = Limits(
    tp=TENSOR,
    loops=(1, 2),
    micro_batch=MICRO_BATCHES,
    families=("breadth-first",),
    shards=("none", "optimizer"),
    recompute=("none",),
    sequence_parallel=(False,),
)
STEPS = 3
"""Of a run; the first is not counted."""
FOREIGN = 0.06
"""Part of the machine's CPU time that other programs may take during a step that counts."""
ENOUGH = 3
"""Steps of a layout that count, at least."""
TARGET = 0.05
"""Regret of the first choice at most."""


class Timed(NamedTuple):
    """A step as it was measured.

    Attributes:
        seconds: that it took.
        foreign: part of the machine's CPU time that other programs took meanwhile.
    """

    seconds: float
    foreign: float


@dataclass
class OpenNode:
    """A layout, as it was predicted and as it ran.

    Attributes:
        step: predicted.
        timed: every step that was measured.
    """

    step: SimulatedStep
    timed: list[Timed] = field(default_factory=list)

    @property
    def predicted_s(self) -> float:
        return self.step.prediction.step_time_s

    @property
    def counted(self) -> list[float]:
        """Seconds of the steps that count; where all were disturbed, of the ones that were least."""
        free = [one.seconds for one in self.timed if one.foreign <= FOREIGN]
        least = sorted(self.timed, key=lambda one: one.foreign)[:ENOUGH]
        return free if len(free) >= ENOUGH else [one.seconds for one in least]

    @property
    def is_enough(self) -> bool:
        return sum(one.foreign <= FOREIGN for one in self.timed) >= ENOUGH

    @property
    def median_s(self) -> float:
        return median(self.counted)


def profile(file: Path, budget_s: float) -> None:
    """Measure the machine, and the model's pieces, into a cluster file."""
    sizes = {"layers": "num_layers", "hidden": "hidden_size", "heads": "num_heads", "kv_heads": "num_kv_heads"}
    sizes |= {"ffn": "ffn_size", "vocab": "vocab_size"}
    lines = ['name = "demo"', 'family = "llama"', "tied = false"]
    model = file.with_name("model.toml")
    model.write_text("\n".join([*lines, *(f"{key} = {getattr(MODEL, name)}" for key, name in sizes.items())]))
    words = ["profile", "--output", str(file), "--processes", str(PROCESSES), "--budget-s", f"{budget_s:g}"]
    words += ["--model", str(model), "--seq", str(SEQ), "--micro-batches", *map(str, MICRO_BATCHES)]
    if pipeloom([*words, "--tp", *map(str, TENSOR)]) != 0:
        raise SystemExit("the machine could not be profiled")


def question_of(file: Path) -> Question:
    """The question to the planner."""
    return Question(
        shape=shape_of(MODEL),
        cluster=load_cluster(str(file)),
        software=load_software("pipeloom-gloo"),
        num_devices=PROCESSES,
        global_batch=BATCH,
        seq=SEQ,
        precision="fp32",
        limits=SPACE,
    )


def layouts(question: Question) -> list[Candidate]:
    """Every layout of the space that fits, each once."""
    found: dict[tuple[str, ...], Candidate] = {}
    for arrangement in arrangements(question)[0]:
        for cut in arrangement.cuts:
            for sharding in cut.shardings:
                for choice in cut.choices:
                    chosen = complete(Leaf(cut, sharding, choice))
                    if chosen is not None:
                        found.setdefault(
                            (str(lowered(chosen.run, chosen.software, chosen.knobs)), *label(chosen)[1:]), chosen
                        )
    return list(found.values())


def label(chosen: Candidate | SimulatedStep) -> tuple[str, ...]:
    """What a layout is, for people."""
    run, choice = chosen.run, chosen.knobs.choice
    axes = f"{run.pp} x {run.tp} x {run.dp}"
    placement = f" {run.placement}" if run.placement != "looped" else ""
    return f"{choice.family}{placement}", axes, str(run.loops), str(run.micro_batch), run.shard


def config_of(step: SimulatedStep, folder: Path) -> RunConfig:
    """A layout as something that runs."""
    return replace(
        run_config(step, None, step.cluster.name, step.software.name),
        training=TrainingConfig(steps=STEPS, validation_batches=0, sample_tokens=0, predict=False),
        checkpoint=CheckpointConfig(final="none"),
        output=OutputConfig(folder=folder),
    )


def _busy_s() -> float:
    """CPU seconds of this machine, of all programs, since it started."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text(encoding="utf-8").split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _train(folder: Path, config: RunConfig, world: World, data: Data) -> list[Timed]:
    """Every step but the first, as a run goes through them."""
    trainer = Trainer(config, world, data, RunFolder(folder))
    found: list[Timed] = []
    for step in range(1, STEPS + 1):
        world.wait_for_all()
        busy_s, own_s, begin_s = _busy_s(), time.process_time(), time.perf_counter()
        trainer._step(step)
        seconds = time.perf_counter() - begin_s
        busy_s, own_s = _busy_s() - busy_s, world.sum([time.process_time() - own_s])[0]
        if step > 1:
            found.append(Timed(seconds, (busy_s - own_s) / (seconds * (os.cpu_count() or 1))))
    return found


def run_once(step: SimulatedStep) -> list[Timed]:
    """The steps of one run."""
    with tempfile.TemporaryDirectory() as folder:
        return run_on_all_ranks(config_of(step, Path(folder)), partial(_train, Path(folder)))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks of two lists without equal values."""
    places = [{value: place for place, value in enumerate(sorted(values))} for values in (first, second)]
    squares = sum((places[0][a] - places[1][b]) ** 2 for a, b in zip(first, second, strict=True))
    count = len(first)
    return 1 - 6 * squares / (count * (count * count - 1))


def measure(entries: Sequence[OpenNode], rounds: int, limit_s: float, print_line: Callable[[str], None]) -> None:
    """Run every layout in every round, then those again whose steps were disturbed, until the time is up."""
    dice, begin_s, number = random.Random(0), time.monotonic(), 0
    while True:
        number += 1
        due = [entry for entry in entries if number <= rounds or not entry.is_enough]
        dice.shuffle(due)
        for entry in due:
            if number > rounds and time.monotonic() - begin_s > limit_s:
                break
            entry.timed += run_once(entry.step)
        if not due or (number > rounds and time.monotonic() - begin_s > limit_s):
            return
        print_line(f"round {number}: {len(due)} runs, {time.monotonic() - begin_s:.0f} s so far")


def print_ranking(console: Console, question: Question) -> SimulatedStep:
    """The planner's answer; its first choice."""
    found = search(question)
    assert found.best is not None, "nothing fits"
    table = Table("", "schedule", "pp x tp x dp", "loops", "micro-batch", "shard", "predicted ms", box=None)
    for place, step in enumerate(found.steps, 1):
        table.add_row(str(place), *label(step), f"{step.prediction.step_time_s * 1e3:.0f}")
    console.print(f"\nThe planner's best of {found.counts.layouts} layouts, in {found.counts.seconds:.1f} s")
    console.print(table)
    return found.best


def print_answer(console: Console, entries: Sequence[OpenNode], first: SimulatedStep) -> bool:
    """Print predictions with measurements, and whether the first choice met its target."""
    ranked = sorted(entries, key=lambda entry: entry.predicted_s)
    fastest = min(entries, key=lambda entry: entry.median_s)
    table = Table(
        "", "schedule", "pp x tp x dp", "loops", "micro-batch", "shard",
        "predicted ms", "measured ms", "from .. to", "steps", "ratio", box=None,
    )  # fmt: skip
    for place, entry in enumerate(ranked, 1):
        least, most = (f"{value * 1e3:.0f}" for value in (min(entry.counted), max(entry.counted)))
        measured = f"{entry.median_s * 1e3:.0f}" + (" <" if entry is fastest else "")
        steps = f"{len(entry.counted)}" + ("" if entry.is_enough else "*")
        cells = [f"{entry.predicted_s * 1e3:.0f}", measured, f"{least} .. {most}", steps]
        table.add_row(str(place), *label(entry.step), *cells, f"{entry.predicted_s / entry.median_s:.2f}")
    console.print(f"\nAll {len(entries)} layouts, really run (< is the fastest)")
    console.print(table)
    if not all(entry.is_enough for entry in entries):
        console.print(f"* the least disturbed ones: in most, other programs took over {FOREIGN:.0%} of the machine")
    (chosen,) = (entry for entry in entries if (entry.step.run, entry.step.knobs) == (first.run, first.knobs))
    regret = chosen.median_s / fastest.median_s - 1
    order = rank_correlation([e.predicted_s for e in entries], [e.median_s for e in entries])
    verdict = "met" if regret <= TARGET else "missed"
    console.print(f"regret of the first choice: {regret:.1%}, to be at most {TARGET:.0%}: {verdict}")
    console.print(f"rank correlation of predicted and measured: {order:.3f}")
    return regret <= TARGET


def main() -> None:
    """Profile, plan, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="times that every layout is run")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds after which nothing runs again")
    parser.add_argument("--keep", type=Path, help="where to keep the cluster file")
    parser.add_argument("--budget-s", type=float, default=60.0, help="seconds of pipeloom profile")
    parser.add_argument("--cluster", type=Path, help="a cluster file of an earlier run, not to profile again")
    parser.add_argument("--plan-only", action="store_true", help="print what is predicted, and run nothing")
    options = parser.parse_args()
    console = Console(width=150, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        file = options.cluster or Path(folder) / "here.toml"
        if options.cluster is None:
            profile(file, options.budget_s)
            if options.keep is not None:
                options.keep.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
        question = question_of(file)
    first = print_ranking(console, question)
    entries = [OpenNode(chosen.simulate()) for chosen in layouts(question)]
    if options.plan_only:
        for entry in sorted(entries, key=lambda entry: entry.predicted_s):
            console.print(*label(entry.step), f"{entry.predicted_s * 1e3:.0f}")
        return
    measure(entries, options.rounds, options.limit_s, console.print)
    if not print_answer(console, entries, first):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
