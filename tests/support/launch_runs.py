"""Runs to hand over, and what comes of it."""

import subprocess
from dataclasses import replace
from pathlib import Path

from pipeloom.catalog import load_cluster
from pipeloom.config import RunConfig
from pipeloom.config.file import parse_run
from pipeloom.export import hand_over

SRUN = """#!/bin/bash
echo "srun $*" >>"$PLAYED/calls"
echo $$ >"$PLAYED/step"
# As the real one, which passes no SIGTERM on but ends its step at once.
trap 'touch "$PLAYED/killed"; exit 137' TERM
trap 'exit 143' USR2
while [[ $1 == --* ]]; do shift; done
for node in 1 0; do SLURM_NODEID=$node "$@" & wait $! || exit $?; done
"""
"""Slurm's program, which starts the command for each of two nodes."""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >>"$PLAYED/calls"
if [[ $1 == show ]]; then printf 'node-07\\nnode-11\\n'; fi
"""
"""Slurm's program, which only notes how it was called."""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"$PLAYED/calls"
kill -USR2 "$(cat "$PLAYED/step")"
"""
"""Slurm's program, which signals the tasks of the step and not its ``srun``."""
CLUSTER = replace(load_cluster("laptop"), name="small", devices_per_node=4)


def run_of(**sections: dict) -> RunConfig:
    """A run of four pipeline ranks in two loops over ten layers; ``sections`` go over its settings."""
    tree = {
        "model": {"num_layers": 10, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 512},
        "layout": {"pp": 4, "loops": 2, "num_microbatches": 8, "partition": [2, 1, 1, 2, 2, 1, 1, 2]},
        "schedule": {"family": "depth-first"},
    }
    if "pp" in sections.get("layout", {}) or "loops" in sections.get("layout", {}):
        del tree["layout"]["partition"]
    config, problems = parse_run(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )
    assert not problems, problems
    return config


def reasons_of(target: str, folder: Path, **sections: dict) -> tuple[str, ...]:
    """Why a target refuses; it has to."""
    (refused,) = hand_over(run_of(**sections), CLUSTER, folder, [target]).refused
    return refused.reasons


def written_for(target: str, folder: Path, **sections: dict):
    """What was written for a target that takes the run."""
    (written,) = hand_over(run_of(**sections), CLUSTER, folder, [target]).written
    for file in written.files:
        if file.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(file)], check=True, timeout=10)
        assert file.suffix == ".csv" or "Written by pipeloom" in file.read_text()
    return written


def command_of(script: Path, **variables: str) -> list[str]:
    """What a script would start: its launcher prints its words instead."""
    probe = script.with_name("probe")
    probe.write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    probe.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(probe), "NODE_RANK": "0", "MASTER_ADDR": "head", **variables}
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=10, check=False
    )
    # The probe trains no step: 75 is the status of a run that goes on later.
    assert done.returncode in (0, 75), done.stderr
    return done.stdout.split("\0")[:-1]


def values_of(command: list[str], flag: str) -> list[str] | None:
    """The words behind a flag; ``None`` if it is not there."""
    if flag not in command:
        return None
    behind = command[command.index(flag) + 1 :]
    end = next((number for number, word in enumerate(behind) if word.startswith("-")), len(behind))
    return behind[:end]
