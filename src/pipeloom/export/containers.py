"""What the targets share that start the script for torchrun in containers: checks, and text of their files.

Their files are YAML whose values are JSON, which YAML contains: the standard library writes it, and quotes every name.
"""

import json
from collections.abc import Sequence
from typing import Any

from pipeloom.config import RunConfig
from pipeloom.export.job import Draft, Job
from pipeloom.export.text import body, comment
from pipeloom.export.torchrun import TARGET as TORCHRUN


def container_problems(job: Job) -> list[str]:
    """Why a run cannot be started in containers of one kind, all on equal nodes."""
    found = list(TORCHRUN.problems(job))
    if job.site.image is None:
        found.append(
            "--image is missing: it must name a container image with pipeloom, such as registry.example.org/pipeloom:1"
        )
    kinds = [kind.name for kind, _ in job.cluster.kinds(job.config.layout.num_ranks)]
    if len(kinds) > 1:
        found.append(
            f"the first ranks must be on {', then '.join(kinds)}, but all nodes of the file are of one kind; use a "
            "cluster of one kind"
        )
    return found


def container_differences(job: Job) -> tuple[str, ...]:
    """Differences of a run in containers, a sentence each."""
    return (*TORCHRUN.make(job).differs, *job.restart_differences())


def about_paths(job: Job) -> str:
    """A sentence about the paths of a run, for a comment."""
    return f"Paths must be in the image or below {job.site.shared_folder}, where the volume is."


def start_script(program: str, notes: Draft, lines: Sequence[str]) -> str:
    """A script that starts ``torchrun.sh`` in a container.

    Args:
        program: for which the file is.
        notes: about the file.
        lines: bash that sets NODE_RANK, MASTER_ADDR, RUN and RESTARTS.
    """
    return "\n".join(
        ["#!/usr/bin/env bash", comment(program, notes), "set -euo pipefail", *lines, body("container.sh")]
    )


def yaml_of(head: str, documents: Sequence[dict[str, Any]]) -> str:
    """YAML documents below a comment."""
    texts = [json.dumps(document, indent=2, ensure_ascii=True) for document in documents]
    return f"{head}\n---\n" + "\n---\n".join(texts) + "\n"


def cores(config: RunConfig, processes: int) -> int:
    """Cores that the processes of a node use on CPUs."""
    return processes * max(1, config.training.threads)
