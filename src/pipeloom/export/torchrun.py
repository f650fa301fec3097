"""Export to torchrun: one script that is started on every node."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeloom.config import RestartConfig, RunConfig
from pipeloom.config.file import format_run
from pipeloom.config.hyperparameters import HYPERPARAMETERS
from pipeloom.export.job import Draft, Job, Target, training_problems
from pipeloom.export.text import MARK, body, comment, needs_array
from pipeloom.terminal.words import count
from pipeloom.workload.layout import Layout

_KILLS_AFTER_S = 30
"""How long torchrun waits for its processes after it has forwarded a signal."""
SCRIPT, RUN_FILE = "torchrun.sh", "torchrun.toml"


def _problems(job: Job) -> list[str]:
    return [*training_problems(job.config), *job.node_problems()]


def _make(job: Job) -> Draft:
    needs = job.needs({name: f"--{name}" for name in HYPERPARAMETERS})
    notes = Draft(files={}, start=start_of(job, SCRIPT), differs=_differences(job), needs=needs)
    about = [*about_ranks(job), *([f"Settings below may instead be in {RUN_FILE}."] if needs else [])]
    head = comment("torchrun of PyTorch 2.11 or newer", notes, [*about, _about_signals(job)], job.config)
    threads = [f"threads={job.config.training.threads}"]
    script = script_of(job, notes, head, threads, body("torchrun.sh"), settings=RUN_FILE)
    run_file = f"# {MARK} for `pipeloom train`; {SCRIPT} beside it starts it.\n{format_run(_elsewhere(job.config))}"
    return replace(notes, files={RUN_FILE: run_file, SCRIPT: script})


def _elsewhere(config: RunConfig) -> RunConfig:
    """The run without its folder, which the script sets, and without restarts, which are the launcher's."""
    return replace(config, output=replace(config.output, folder=None), restart=RestartConfig())


def start_of(job: Job, script: str, needs: str = "") -> str:
    """The start command of a script.

    Args:
        job: the run.
        script: its name.
        needs: variables that it always needs, each ``NAME=... `` with a trailing space.
    """
    if job.num_nodes == 1:
        return f"{needs}bash {script}"
    return f"on every node, with its own NODE_RANK: {needs}NODE_RANK=0 MASTER_ADDR=<host of node 0> bash {script}"


def script_of(job: Job, notes: Draft, head: str, lines: Sequence[str], end: str, *, settings: str = "") -> str:
    """A script that is started on every node.

    Args:
        job: the run.
        notes: with the variables that the user must set.
        head: its comment.
        lines: define variables for ``end``.
        end: follows the common part, which checks the required variables.
        settings: name of a run file that may have these settings instead.
    """
    sizes = [f"nodes={job.num_nodes}", f"processes={job.processes_per_node}", f"settings={settings}"]
    return "\n".join(["#!/usr/bin/env bash", head, *sizes, needs_array(notes), *lines, body("start.sh") + end])


def about_ranks(job: Job) -> list[str]:
    """Sentences about the ranks of each node, for a comment."""
    layout, per_node = job.config.layout, job.processes_per_node
    where = f"{count(job.num_nodes, 'node')} of {job.cluster.name}, {count(per_node, 'process')} on each"
    local = f"NODE_RANK x {per_node} + local rank" if job.num_nodes > 1 else "local rank"
    place = "place" if layout.pipeline_order else "pipeline"
    found = [
        f"Runs on {where}.",
        f"Ranks: {local} = {_rank_formula(layout, place)}.",
    ]
    if layout.pipeline_order:
        found.append(f"Pipeline ranks by place: {', '.join(map(str, layout.pipeline_order))}.")
    elif 1 < job.num_nodes <= 8:
        ends = [(node * per_node, (node + 1) * per_node - 1) for node in range(job.num_nodes)]
        spans = [(layout.coordinates(first).pipeline, layout.coordinates(last).pipeline) for first, last in ends]
        named = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
        found.append(f"Pipeline ranks by node: {', '.join(named)}.")
    kinds, node = job.cluster.kinds(layout.num_ranks), 0
    for kind, devices in kinds if len(kinds) > 1 else ():
        last = node + -(-devices // per_node) - 1
        which = str(node) if node == last else f"{node} to {last}"
        found.append(f"NODE_RANK {which} on {kind.name}.")
        node = last + 1
    domains = {kind.devices_per_node for kind, _ in kinds if kind.host_size < kind.devices_per_node}
    if job.num_nodes > 1 and domains:
        found.append(
            f"Nodes are hosts here: those of {max(domains)} successive ranks must be in one domain of the fast "
            "network, which the predicted step uses."
        )
    if job.num_nodes > 1:
        found.append("All nodes need the same folder at the same path.")
    return found


def _rank_formula(layout: Layout, place: str) -> str:
    """How a rank follows from its coordinates, the pipeline axis outermost."""
    data = f"({place} x {layout.dp} + data)"
    return f"{data if layout.cp == 1 else f'({data} x {layout.cp} + context)'} x {layout.tp} + tensor"


def _about_signals(job: Job) -> str:
    """A sentence about signals to torchrun, for a comment."""
    grace_s = job.config.checkpoint.grace_s
    if grace_s <= 0:
        return "Ctrl-C and SIGTERM end the run at once, without a checkpoint (checkpoint.grace_s 0)."
    return (
        f"Ctrl-C or SIGTERM ends the run after its step, with a checkpoint, within {grace_s:g} s (checkpoint.grace_s)."
    )


def _differences(job: Job) -> tuple[str, ...]:
    config = job.config
    found: list[str] = []
    if config.checkpoint.grace_s >= _KILLS_AFTER_S:
        found.append(
            f"checkpoint.grace_s is {config.checkpoint.grace_s:g}, but torchrun kills processes {_KILLS_AFTER_S} s "
            "after the signal; add --shutdown-timeout if your version has it"
        )
    if config.restart != RestartConfig():
        found.append("restart.* is left out: torchrun ends all processes, and the next start takes the last checkpoint")
    training = config.training
    if job.has_amd_gpus:
        found.append(f"devices of {job.cluster.name} are AMD's: PyTorch must be that for ROCm, which calls them cuda")
    # Not changed, since a run for GPUs may be tried on CPUs first.
    if job.has_gpus and training.device == "cpu":
        found.append(
            f"training.device is cpu, although the devices of {job.cluster.name} are {job.cluster.device.name}; "
            "add --training.device cuda"
        )
    if config.machine.software != "pipeloom" and config.layout.partition is None:
        found.append(
            "layers are divided into stages by pipeloom's rule, not by that of machine.software "
            f"{config.machine.software}"
        )
    if len(job.cluster.kinds(config.layout.num_ranks)) > 1 and config.layout.partition is None:
        found.append(
            f"layers are divided as if all devices were equally fast; set a layout.partition for {job.cluster.name}"
        )
    texts = [("data.path" if config.data.sources is None else "a source", part.path) for _, part in config.data.parts]
    files = [*texts, ("data.tokenizer", config.data.tokenizer), ("schedule.file", config.schedule.file)]
    files += [("checkpoint.init", config.checkpoint.init), ("checkpoint.resume", config.checkpoint.resume)]
    for name, path in files:
        if isinstance(path, Path):
            found.append(f"{name} is {path.absolute()}, on every node")
    return tuple(found)


TARGET = Target("torchrun", "torchrun", (RUN_FILE, SCRIPT), _problems, _make)
