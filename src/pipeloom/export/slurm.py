"""Slurm: a script for sbatch that starts the script for torchrun once on each node."""

import math
from dataclasses import replace

from pipeloom.export.job import Draft, Job, Target
from pipeloom.export.text import body, comment
from pipeloom.export.torchrun import TARGET as TORCHRUN

SCRIPT = "pipeloom.sbatch"

_SECONDS_BEFORE_LIMIT = 120
"""How long before the time limit the batch script gets its signal: time to end in order, and to be queued again."""
_TO_QUEUE_S = 60
"""What of that is kept to queue the job again; Slurm itself may be that late with the signal."""
# A job that fails each time must come to an end by itself.
_MAX_RESTARTS = 3


def _make(job: Job) -> Draft:
    started = TORCHRUN.make(job)
    notes = Draft(
        {},
        f"sbatch {SCRIPT}, in its folder; SCRIPT=megatron.sh or another one beside it starts that one",
        differs=(*started.differs, *_differences(job)),
        needs=started.needs,
    )
    before_limit_s = max(_SECONDS_BEFORE_LIMIT, math.ceil(job.config.checkpoint.grace_s) + _TO_QUEUE_S)
    takes_gpus = job.has_gpus or job.config.training.device == "cuda"
    options = [
        "--job-name=pipeloom",
        f"--nodes={job.num_nodes}",
        # torchrun starts the processes of its node itself.
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.processes_per_node}"] if takes_gpus else []),
        "--exclusive",
        f"--time={job.time_limit}",
        "--output=slurm-%j.out",
        # The same job number and file after a requeue; truncated, it would lose what was printed before.
        "--open-mode=append",
        "--requeue",
        # B: to the batch script, which sends SIGTERM to the step; without it Slurm signals the steps alone.
        f"--signal=B:USR1@{before_limit_s}",
    ]
    about = [
        (
            "Near the time limit the run ends its step and writes a checkpoint. A run that ended so, or failed, is "
            "queued again and goes on from its latest checkpoint. "
            "Add what your site requires: --partition, --account."
        )
    ]
    script = "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {option}" for option in options),
            comment("sbatch of Slurm 21.08 or newer", notes, about),
            f"max_restarts={_MAX_RESTARTS}",
            body("slurm.sh"),
        ]
    )
    return replace(notes, files={**started.files, SCRIPT: script})


def _differences(job: Job) -> tuple[str, ...]:
    found: list[str] = []
    if job.config.checkpoint.every is None and not job.config.checkpoint.every_s:
        found.append(
            "checkpoint.every is not set and checkpoint.every_s is 0: a run that fails has no checkpoint and "
            "begins anew"
        )
    kinds = [kind.name for kind, _ in job.cluster.kinds(job.config.layout.num_ranks)]
    if len(kinds) > 1:
        order = ", then ".join(kinds)
        found.append(
            f"Slurm numbers nodes as it likes, and the first ranks belong on {order}: give it a SLURM_HOSTFILE in that "
            "order with --distribution=arbitrary, or a constraint for each part"
        )
    return tuple(found)


TARGET = Target("slurm", "Slurm", (*TORCHRUN.files, SCRIPT), TORCHRUN.problems, _make)
