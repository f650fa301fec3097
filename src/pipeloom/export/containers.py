"""What the targets share that start the script for torchrun in containers: checks, and text of their files.

Their files are YAML whose values are JSON, which YAML contains: the standard library writes it, and quotes every name.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pipeloom.config import RunConfig
from pipeloom.export.job import Draft, Job
from pipeloom.export.text import body, comment
from pipeloom.export.torchrun import TARGET as TORCHRUN

SITE = ("name", "image", "volume")
"""Fields of ``Site`` that files for containers have."""
MAX_RESTARTS = 100
"""Failures after which a controller does not start the run again.

Kubeflow Trainer and SkyPilot count over the whole job, and progress does not set them back. A run of 49 days with a
failure every 2.6 days has 19, by chance up to 35: with this limit runs of months continue. A job that always fails must
end eventually, and a start takes minutes.
"""


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


class Program(NamedTuple):
    """A program that starts containers.

    Attributes:
        name: with its version.
        script: file that a container runs, which starts ``torchrun.sh``.
        lines: bash of it that sets NODE_RANK, MASTER_ADDR, RUN and RESTARTS.
        file: YAML file for the program.
    """

    name: str
    script: str
    lines: Sequence[str]
    file: str


def container_draft(
    job: Job, program: Program, started: Draft, *, start: str, about: Sequence[str], documents: Sequence[dict[str, Any]]
) -> Draft:
    """The files of a run in containers.

    Args:
        job: the run.
        program: for which the files are.
        started: the files for torchrun.
        start: command that starts the run.
        about: sentences for the comment of the YAML file.
        documents: of the YAML file.
    """
    notes = Draft({}, start, differs=(*started.differs, *job.restart_differences()), needs=started.needs)
    paths = f"Paths must be in the image or below {job.site.shared_folder}, where the volume is."
    head = comment(program.name, notes, [paths, *about], job.config)
    script = ["#!/usr/bin/env bash", comment(program.name, notes), "set -euo pipefail", *program.lines]
    texts = [json.dumps(document, indent=2, ensure_ascii=True) for document in documents]
    files = {
        **started.files,
        program.script: "\n".join([*script, body("container.sh")]),
        program.file: f"{head}\n---\n" + "\n---\n".join(texts) + "\n",
    }
    return replace(notes, files=files)


def cores(config: RunConfig, processes: int) -> int:
    """Cores that the processes of a node use on CPUs."""
    return processes * max(1, config.training.threads)
