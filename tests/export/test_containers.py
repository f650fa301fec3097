"""Kubernetes and SkyPilot: what the files contain, and their scripts with torchrun played by a probe."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
from clusters import mixed
from launch_runs import CLUSTER, run_of

from pipeloom.catalog import load_cluster
from pipeloom.export import hand_over
from pipeloom.export.job import Site

SITE = Site(name="tiny", image="registry.example.org/pipeloom:1", volume="lustre:/data")
PROBE = 'echo "$NODE_RANK $MASTER_ADDR ${MASTER_PORT:-} $RUN ${PET_NNODES:-none} $*"\nexit 75\n'


def written_for(target, folder, cluster=CLUSTER, **sections):
    (written,) = hand_over(run_of(**sections), cluster, folder, [target], site=SITE).written
    return written


def documents(file):
    """The JSON documents of a file, each below a line ``---``."""
    head, *texts = file.read_text().split("\n---\n")
    assert all(line.startswith("#") for line in head.splitlines())
    return [json.loads(text) for text in texts]


def started(folder, script, **variables):
    (folder / "torchrun.sh").write_text(PROBE)
    command, environment = ["bash", str(folder / script), "--flag"], {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10, check=False)


def test_a_job_of_kubernetes_has_the_nodes_devices_volumes_and_time_for_a_checkpoint(tmp_path):
    written_for("kubeflow", tmp_path, load_cluster("dgx-h100"), layout={"dp": 4}, checkpoint={"grace_s": 100.5})
    runtime, job = documents(tmp_path / "kubeflow.yaml")
    assert job["spec"]["trainer"] == {"numNodes": 2}
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] == 131
    assert container["image"] == SITE.image
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[folders["/dev/shm"]] == {"emptyDir": {"medium": "Memory"}}
    assert volumes[folders["/data"]] == {"persistentVolumeClaim": {"claimName": "lustre"}}
    assert container["env"][0] == {"name": "RUN", "value": "/data/tiny"}


def test_a_job_of_kubernetes_that_goes_on_later_starts_again_any_number_of_times(tmp_path):
    written_for("kubeflow", tmp_path)
    spec = documents(tmp_path / "kubeflow.yaml")[0]["spec"]["template"]["spec"]
    inner = spec["replicatedJobs"][0]["template"]["spec"]
    (on_exit, on_eviction) = inner["podFailurePolicy"]["rules"]
    assert (on_exit["action"], on_exit["onExitCodes"]["values"]) == ("FailJob", [75])
    assert on_eviction["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert (inner["backoffLimit"], spec["failurePolicy"]["maxRestarts"]) == (0, 100)


def test_a_task_of_skypilot_has_nodes_devices_a_volume_and_restarts(tmp_path):
    written_for("skypilot", tmp_path, load_cluster("dgx-a100"), layout={"dp": 4})
    (task,) = documents(tmp_path / "skypilot.yaml")
    assert (task["name"], task["num_nodes"], task["volumes"]) == ("tiny", 2, {"/data": "lustre"})
    assert task["resources"]["accelerators"] == "A100-80GB:8"
    assert task["resources"]["image_id"] == f"docker:{SITE.image}"
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 100, "recover_on_exit_codes": [75]}
    assert task["envs"] == {"RUN": "/data/tiny"}


def test_a_pod_takes_the_gpus_of_their_vendor(tmp_path):
    written = written_for("kubeflow", tmp_path, load_cluster("mi300x"), layout={"dp": 4})
    text = (tmp_path / "kubeflow.yaml").read_text()
    assert '"amd.com/gpu": "8"' in text
    assert "nvidia" not in text
    assert any("PyTorch must be that for ROCm" in sentence for sentence in written.notes.differs)


@pytest.mark.parametrize("target", ["torchrun", "slurm", "kubeflow", "skypilot", "torchtitan", "megatron"])
def test_nothing_that_starts_a_run_is_written_for_tpus(tmp_path, target):
    done = hand_over(run_of(layout={"dp": 4}), load_cluster("tpu-v5p"), tmp_path, [target], site=SITE)
    assert not done.written
    assert not list(tmp_path.iterdir())
    assert any(reason.startswith("the devices of tpu-v5p are TPUs") for reason in done.refused[0].reasons)


@pytest.mark.parametrize("target", ["kubeflow", "skypilot"])
def test_failures_of_a_long_run_do_not_end_it_and_the_file_has_the_reason(tmp_path, target):
    written_for(target, tmp_path, load_cluster("dgx-a100"))
    head = (tmp_path / f"{target}.yaml").read_text().partition("\n---\n")[0]
    assert "up to 100 times in the whole job, which a run of months" in " ".join(head.replace("#", " ").split())
    # Failures of 49 days with one every 2.6 days: four deviations above their mean.
    assert 100 > 49 / 2.6 + 4 * (49 / 2.6) ** 0.5


def test_runs_on_cpus_ask_for_cores(tmp_path):
    written_for("skypilot", tmp_path, training={"threads": 2})
    assert documents(tmp_path / "skypilot.yaml")[0]["resources"]["cpus"] == "8+"
    written_for("kubeflow", tmp_path, training={"threads": 2})
    assert '"cpu": "8"' in (tmp_path / "kubeflow.yaml").read_text()


def test_a_node_of_kubernetes_starts_torchrun_with_its_number_and_status(tmp_path):
    written_for("kubeflow", tmp_path)
    variables = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "tiny-node-0-0.tiny", "PET_MASTER_PORT": "29400"}
    done = started(tmp_path, "kubeflow.sh", **variables, PET_NNODES="2", RUN="/data/tiny", RESTARTS="")
    assert done.stdout == "1 tiny-node-0-0.tiny 29400 /data/tiny none --flag\n"
    assert done.returncode == 75


@pytest.mark.parametrize("again", [False, True])
def test_a_task_of_skypilot_that_starts_again_without_a_checkpoint_begins_anew(tmp_path, again):
    written_for("skypilot", tmp_path)
    run = tmp_path / "a run"
    run.mkdir()
    (run / "config.toml").touch()
    variables = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "RUN": str(run)}
    if again:
        (tmp_path / "a run.task").write_text("task-7\n")
    done = started(tmp_path, "skypilot.sh", **variables, SKYPILOT_TASK_ID="task-7")
    assert done.stdout == f"0 10.0.0.7  {run} none --flag\n", done.stderr
    assert done.returncode == 75
    assert run.exists() != again


def test_what_one_file_for_all_nodes_cannot_express_is_refused(tmp_path):
    both = mixed(*((replace(CLUSTER, name=name), 2) for name in ("new", "old")))
    (refused,) = hand_over(run_of(layout={"dp": 4}), both, tmp_path, ["kubeflow"], site=SITE).refused
    assert "the first ranks must be on new, then old" in refused.reasons[0]
    (refused,) = hand_over(run_of(training={"device": "cuda"}), CLUSTER, tmp_path, ["skypilot"], site=SITE).refused
    assert "SkyPilot's name of the device" in refused.reasons[0]
    assert not list(tmp_path.iterdir())
