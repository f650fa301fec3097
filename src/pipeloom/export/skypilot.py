"""Export to SkyPilot: a task for ``sky jobs launch``, which starts the script for torchrun on every node."""

from typing import Any

from pipeloom.export.containers import MAX_RESTARTS, SITE, Program, container_draft, container_problems, cores
from pipeloom.export.job import Draft, Job, Target
from pipeloom.export.torchrun import TARGET as TORCHRUN

SCRIPT, FILE = "skypilot.sh", "skypilot.yaml"

_ACCELERATORS = {
    "a100-sxm-80gb": "A100-80GB",
    "h100-sxm-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "v100-sxm-32gb": "V100-32GB",
}
"""SkyPilot's names of the catalog's devices."""

# SkyPilot has no number of a restart; the task has the same id in each, and its mark is on the volume.
_LINES = (
    'export NODE_RANK="${SKYPILOT_NODE_RANK:?this is for a task of SkyPilot}"',
    'MASTER_ADDR="$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"',
    "export MASTER_ADDR",
    'mark="$RUN.task"',
    'task="${SKYPILOT_TASK_ID:-}"',
    "RESTARTS=0",
    "if ((NODE_RANK == 0)); then",
    '  if [[ -n $task && "$(cat "$mark" 2>/dev/null)" == "$task" ]]; then RESTARTS=1; fi',
    '  echo "$task" >"$mark"',
    "fi",
)


_PROGRAM = Program("SkyPilot 0.14", SCRIPT, _LINES, FILE)


def _problems(job: Job) -> list[str]:
    found = container_problems(job)
    device = job.device.name
    if job.takes_gpus and device not in _ACCELERATORS:
        found.append(
            f"SkyPilot's name of the device {device} of {job.cluster.name} is not known, only of "
            f"{', '.join(_ACCELERATORS)}; use a cluster with one of them"
        )
    return found


def _make(job: Job) -> Draft:
    started = TORCHRUN.make(job)
    envs = "".join(f" --env {need.name}=..." for need in started.needs)
    about = [
        (
            f"The run folder is {job.site.run_folder} on the volume {job.site.volume_name}, which `sky volumes apply` "
            "makes. It must be of a shared file system where there are several nodes. A bucket in its place is not "
            "enough: checkpoints are written by all nodes, and renamed."
        ),
        (
            "A run that ends with status 75, after a signal or by checkpoint.time_limit_s, starts again from its "
            f"newest checkpoint; after a preemption as well, and after a failure up to {MAX_RESTARTS} times "
            "in the whole job, which a run of months with a failure every few days survives; a run that always "
            "fails ends."
        ),
    ]
    start = f"sky jobs launch {FILE}{envs}, in its folder"
    return container_draft(job, _PROGRAM, started, start=start, about=about, documents=[_task(job, started)])


def _task(job: Job, started: Draft) -> dict[str, Any]:
    per_node = job.processes_per_node
    devices = (
        {"accelerators": f"{_ACCELERATORS[job.device.name]}:{per_node}"}
        if job.takes_gpus
        else {"cpus": f"{cores(job.config, per_node)}+"}
    )
    return {
        "name": job.site.name,
        "num_nodes": job.num_nodes,
        "workdir": ".",
        "resources": {
            **devices,
            "image_id": f"docker:{job.site.image}",
            "job_recovery": {"max_restarts_on_errors": MAX_RESTARTS, "recover_on_exit_codes": [75]},
        },
        "volumes": {job.site.shared_folder: job.site.volume_name},
        # null: SkyPilot does not start the task without --env.
        "envs": {"RUN": job.site.run_folder, **{need.name: None for need in started.needs}},
        "run": f"exec bash {SCRIPT}",
    }


TARGET = Target("skypilot", "SkyPilot", (*TORCHRUN.files, SCRIPT, FILE), _problems, _make, site=SITE)
