"""``pipeloom launch``: files that start a run on a cluster, or in another program."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pipeloom.catalog import load_cluster
from pipeloom.cli.idle import with_idle_check
from pipeloom.cli.reference import Command, Idle, Output
from pipeloom.cli.run_config import TRAINING, parse_config
from pipeloom.config import RunConfig, unset, usual_values
from pipeloom.cost.hardware import Cluster
from pipeloom.export import TARGETS, HandedOver, hand_over, usual_targets
from pipeloom.export.job import Site, training_problems
from pipeloom.predict.describe import described_problems, with_model_sizes
from pipeloom.predict.places import node_problems, num_hosts, tpus_of
from pipeloom.predict.recipes import recipe_notes
from pipeloom.terminal.words import quoted
from pipeloom.workload.limits import Common


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom launch``.

    machine.cluster determines the nodes. If a program lacks a setting of the run, the reason is printed.
    """

    out: Annotated[Path, Output("folder")]
    """Folder for the files, created if missing."""
    to: Common[tuple[Literal["torchrun", "slurm", "kubeflow", "skypilot", "torch", "torchtitan", "megatron"], ...]] = ()
    """Programs to write files for; one that cannot run this run is an error. None: all that can; kubeflow and skypilot
    only with an image."""
    time_limit: Common[str] = "24:00:00"
    """Time limit of the Slurm job, in the format of sbatch --time."""
    name: str = "pipeloom"
    """Name of the job, and for kubeflow and skypilot of the run's folder on the volume."""
    image: Common[str | None] = None
    """Container image with pipeloom and PyTorch, for kubeflow and skypilot."""
    volume: str = "pipeloom:/shared"
    """Volume that all nodes share and the folder where they find it, for kubeflow and skypilot."""


def _unread(name: str) -> Idle[Options]:
    """That a name of the site is in no file of the chosen programs."""

    def reason(options: Options) -> str:
        chosen = options.to or usual_targets(Site(image=options.image))
        is_read = any(name in TARGETS[one].site for one in chosen)
        return "" if is_read else f"on {', '.join(options.to)}" if options.to else "without --image"

    return reason


COMMAND = Command(
    name="launch",
    options=Options,
    examples={
        "pipeloom launch run.toml --out start": "for every program that can run it",
        "pipeloom launch run.toml --out start --to slurm": "for Slurm only",
        "pipeloom launch run.toml --out start --to kubeflow --image own/pipeloom:1": "for Kubernetes",
    },
    idle={one.name: (_unread(one.name),) for one in fields(Site)},
    settings=(*TRAINING, *(f"machine.{name}" for name in ("cluster", "software", "attention", "fused_norm"))),
    brief=("layout", "training.steps", "output", "machine"),
)


def run(words: list[str]) -> int:
    """Parse the configuration, write the files, print their paths and what was refused."""
    options = parse_config(COMMAND, words, with_idle_check(COMMAND, words, described_problems))
    site = Site(options.name, options.time_limit, options.image, options.volume)
    done = hand_over(options, load_cluster(options.machine.cluster), options.out, options.to, site=site)
    print_handed_over(done)
    # A refusal is an error where the target was named, or where nothing that was written starts the run.
    starts = any(written.target.starts for written in done.written)
    return 2 if done.refused and (options.to or not starts) else 0


def print_run(config: RunConfig, cluster: Cluster, file: Path) -> None:
    """Print what a run file still lacks, and what starts the run.

    Args:
        config: the run.
        cluster: whose nodes it is for.
        file: where it was written.
    """
    print(f"\nrun file: {file}")
    missing, usual = unset(config), usual_values(config)
    for name, what in missing.items():
        _print_item("to set", f"{name}: {what}")
    if usual is not None:
        _print_item("defaults", usual)
    for sentence in recipe_notes(config):
        _print_item("recipe", sentence)
    if missing:
        _print_item("", "What is to set has a line `# SET` in the file; flags of `pipeloom train` do as well.")
    num_ranks = config.layout.num_ranks
    refused, unlaunched = training_problems(with_model_sizes(config)[0]), node_problems(cluster, num_ranks)
    for program, reasons in (("train", refused), ("launch", unlaunched)):
        for reason in reasons:
            _print_item("refused", f"by pipeloom {program}: {reason}")
    if refused or tpus_of(cluster, num_ranks):
        return
    train, launch = f"pipeloom train {quoted(file)}", f"pipeloom launch {quoted(file)} --out FOLDER"
    if (hosts := num_hosts(cluster, num_ranks)) == 1:
        _print_item("start", train, whole=train)
    elif unlaunched:
        _print_item("start", f"{train} starts all {num_ranks} processes on one host", whole=train)
    else:
        _print_item(
            "start",
            f"{launch} writes the scripts that start its {num_ranks} processes on "
            f"{hosts} nodes of {cluster.name}, by torchrun or Slurm; pipeloom train starts all of them on one host",
            whole=launch,
        )


def print_handed_over(done: HandedOver) -> None:
    """Print what was written and how to start it, and what was refused and why."""
    for written in done.written:
        target, notes = written.target, written.notes
        print(f"\n{target.name}: {target.program}")
        _print_item("files", ", ".join(map(str, written.files)))
        if notes.needs:
            _print_item("to set", ", ".join(need.name for need in notes.needs))
        _print_item("start", f"in {written.files[0].parent}: {notes.start}")
        for head, sentences in (("differs", notes.differs), ("left out", notes.left_out)):
            for sentence in sentences:
                _print_item(head, sentence)
    needs = {need.name: need.what for written in done.written for need in written.notes.needs}
    if needs:
        print("\nto set, as variables of the environment; without them nothing starts")
        for name, what in needs.items():
            _print_item(name, what, 28)
    parts = {"defaults": [done.usual], "recipe": done.recipe, "does not fit": [done.misfit]}
    for head, sentences in parts.items():
        _print_part(head, [sentence for sentence in sentences if sentence is not None])
    for refused in done.refused:
        print(f"\n{refused.target.name}: {refused.target.program} cannot express this run")
        for reason in refused.reasons:
            _print_item("reason", reason)


def _print_part(head: str, sentences: Sequence[str]) -> None:
    if sentences:
        print(f"\n{head}")
    for sentence in sentences:
        _print_item("", sentence)


def _print_item(head: str, text: str, size: int = 10, *, whole: str = "") -> None:
    """Print a text behind a head, in lines of the terminal's width that do not break ``whole``, such as a command."""
    width = max(40, min(shutil.get_terminal_size().columns, 120))
    joined = text.replace(whole, whole.replace(" ", "\0")) if whole else text
    lines = textwrap.fill(joined, width, initial_indent=f"  {head:<{size}}", subsequent_indent=" " * (size + 2),
                          break_long_words=False, break_on_hyphens=False)  # fmt: skip
    print(lines.replace("\0", " "))
