"""Export to Kubernetes: a TrainingRuntime and a TrainJob of Kubeflow Trainer, which start the script for torchrun.

The runtime is the job's own. A TrainJob that changes a runtime of the cluster would depend on its version
(podTemplateOverrides up to 2.1, runtimePatches since 2.2), and on what its administrators wrote.
"""

import math
from typing import Any

from pipeloom.export.containers import MAX_RESTARTS, SITE, Program, container_draft, container_problems, cores
from pipeloom.export.job import Draft, Job, Target
from pipeloom.export.torchrun import TARGET as TORCHRUN

SCRIPT, FILE = "kubeflow.sh", "kubeflow.yaml"

_AFTER_GRACE_S = 30
"""Seconds after ``checkpoint.grace_s`` in which processes end, before Kubernetes kills them."""
_API = "trainer.kubeflow.org/v1alpha1"
_CONTAINER = "node"
"""The name by which the Trainer finds the container, and its job."""
_START = "/start"
"""Where the container finds the scripts."""

# The Trainer sets PET_* of a node, which torchrun would read; torchrun.sh gives these to it as flags.
_LINES = (
    'export NODE_RANK="${PET_NODE_RANK:?this is for a TrainJob}" MASTER_ADDR="$PET_MASTER_ADDR"',
    'export MASTER_PORT="$PET_MASTER_PORT"',
    "unset ${!PET_@}",
    'RESTARTS="${RESTARTS:-0}"',
)


_PROGRAM = Program("Kubeflow Trainer 2.3", SCRIPT, _LINES, FILE)


def _make(job: Job) -> Draft:
    started, name = TORCHRUN.make(job), job.site.name
    files = " ".join(f"--from-file={file}" for file in (*TORCHRUN.files, SCRIPT))
    about = [
        (
            f"The run folder is {job.site.run_folder} on the PersistentVolumeClaim {job.site.volume_name}, which "
            "must allow ReadWriteMany where there are several nodes."
        ),
        (
            "A pod that Kubernetes ends gets SIGTERM: the run writes a checkpoint, and starts again from it. After a "
            f"failure it starts again up to {MAX_RESTARTS} times in the whole job, which a run of months with a "
            "failure every few days survives; a run that always fails ends."
        ),
        "Add what your cluster requires: a queue, tolerations, the resource of a fast network.",
        *(["The variables to set are in env, empty."] if started.needs else []),
    ]
    return container_draft(
        job,
        _PROGRAM,
        started,
        start=f"kubectl create configmap {name} {files} && kubectl create -f {FILE}",
        about=about,
        documents=[_runtime(job), _train_job(job, started)],
    )


def _train_job(job: Job, started: Draft) -> dict[str, Any]:
    # The Trainer sets the node's number and the first host only where the job has a trainer.
    trainer: dict[str, Any] = {"numNodes": job.num_nodes}
    if started.needs:
        trainer["env"] = [{"name": need.name, "value": ""} for need in started.needs]
    return {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": {"name": job.site.name},
        "spec": {"runtimeRef": {"kind": "TrainingRuntime", "name": job.site.name}, "trainer": trainer},
    }


def _runtime(job: Job) -> dict[str, Any]:
    pods = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {
            # Restarts are of all nodes together, by the policy of the JobSet.
            "backoffLimit": 0,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [75]},
                    },
                    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"spec": _pod(job)},
        },
    }
    again = {
        "name": "goesOnLater",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.site.name},
        "spec": {
            "mlPolicy": {"numNodes": job.num_nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [again]},
                    "replicatedJobs": [{"name": _CONTAINER, "template": pods}],
                }
            },
        },
    }


def _pod(job: Job) -> dict[str, Any]:
    per_node = job.processes_per_node
    resources = (
        {"limits": {f"{job.device.vendor}.com/gpu": str(per_node)}}
        if job.takes_gpus
        else {"requests": {"cpu": str(cores(job.config, per_node))}}
    )
    label = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
    return {
        # A policy for exit codes requires it.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.config.checkpoint.grace_s) + _AFTER_GRACE_S,
        "containers": [
            {
                "name": _CONTAINER,
                "image": job.site.image,
                "command": ["bash", f"{_START}/{SCRIPT}"],
                "env": [
                    {"name": "RUN", "value": job.site.run_folder},
                    {"name": "RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": label}}},
                ],
                "resources": resources,
                "volumeMounts": [
                    {"name": "start", "mountPath": _START, "readOnly": True},
                    {"name": "shared", "mountPath": job.site.shared_folder},
                    {"name": "memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "start", "configMap": {"name": job.site.name}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": job.site.volume_name}},
            # The 64 MB of a container are too few for NCCL and gloo between the processes of a node.
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


TARGET = Target("kubeflow", "Kubeflow Trainer", (*TORCHRUN.files, SCRIPT, FILE), container_problems, _make, site=SITE)
