"""Export to Slurm: a script for sbatch, which starts the script for torchrun once on each node."""

import math
from dataclasses import replace

from pipeloom.export.job import Draft, Job, Target
from pipeloom.export.text import body, comment
from pipeloom.export.torchrun import TARGET as TORCHRUN

SCRIPT = "pipeloom.sbatch"

_MAX_RESTARTS = 3
"""Starts in a row without a new checkpoint before the last one; a job that always fails must end eventually."""
_WRITES_S = 300
"""Seconds for the checkpoint of a program that ends by itself before the time limit."""
_SECONDS_BEFORE_LIMIT = 120
"""How long before the time limit the batch script gets a signal, for a checkpoint and the requeue."""
_TO_QUEUE_S = 60
"""Part of that for the requeue; Slurm may also send the signal up to 60 seconds late."""


def _make(job: Job) -> Draft:
    started = TORCHRUN.make(job)
    notes = Draft(
        {},
        f"sbatch {SCRIPT}, in its folder; with SCRIPT=NAME it starts another script of the folder",
        differs=(*started.differs, *_differences(job)),
        needs=started.needs,
    )
    before_limit_s = max(_SECONDS_BEFORE_LIMIT, math.ceil(job.config.checkpoint.grace_s) + _TO_QUEUE_S)
    options = [
        f"--job-name={job.site.name}",
        f"--nodes={job.num_nodes}",
        # torchrun starts the processes of its node itself.
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.processes_per_node}"] if job.takes_gpus else []),
        "--exclusive",
        "--mem=0",  # all of a node's memory: --exclusive gives its cores and devices alone
        f"--time={job.site.time_limit}",
        "--output=slurm-%j.out",
        # A requeued job has the same number and output file, which must not be truncated.
        "--open-mode=append",
        "--requeue",
        # B: to the batch script, which sends SIGTERM to the step; without B, Slurm would send this signal to the steps.
        f"--signal=B:USR1@{before_limit_s}",
    ]
    about = [
        (
            "Shortly before the time limit, the run completes its step and writes a checkpoint; torchtitan.sh does not "
            "and repeats the steps since its last one. It is then requeued, as after a failure, and resumes from its "
            f"newest checkpoint. After {_MAX_RESTARTS + 1} starts in a row without a new one it is not queued again. "
            "Add options that your site requires, such as --partition and --account."
        )
    ]
    script = "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {option}" for option in options),
            comment("sbatch of Slurm 21.08 or newer", notes, about),
            f"max_restarts={_MAX_RESTARTS}",
            f"early_s={before_limit_s + _WRITES_S}",
            body("slurm.sh"),
        ]
    )
    return replace(notes, files={**started.files, SCRIPT: script})


def _differences(job: Job) -> tuple[str, ...]:
    found = job.restart_differences()
    kinds = [kind.name for kind, _ in job.cluster.kinds(job.config.layout.num_ranks)]
    if len(kinds) > 1:
        order = ", then ".join(kinds)
        found.append(
            f"the first ranks must be on {order}, but Slurm chooses the order of nodes: set SLURM_HOSTFILE to a file "
            "in that order with --distribution=arbitrary, or a constraint for each part"
        )
    return tuple(found)


TARGET = Target("slurm", "Slurm", (*TORCHRUN.files, SCRIPT), TORCHRUN.problems, _make, site=("name", "time_limit"))
