"""Settings of a run that the files for another program lack: each is written, named, or means nothing there.

A setting that this module and a target do not contain is named as left out where a run changes it, so that a new one
is never dropped in silence.
"""

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeloom.config import RunConfig
from pipeloom.config.run import value_of
from pipeloom.export.job import Job

_TEXT = "text and tokenizer are those of the program, which variables of its script set"
_REPORT = "a report of pipeloom about its own training"
_OWN_PROCESSES = "of processes of pipeloom"
_PREDICTION = "of predictions alone"
MEANINGLESS = {
    "data.path": _TEXT,
    "data.field": _TEXT,
    "data.sources": _TEXT,
    "data.tokenizer": _TEXT,
    "data.bpe_vocab_size": _TEXT,
    "data.cache": _TEXT,
    "training.device": _OWN_PROCESSES,
    "training.threads": _OWN_PROCESSES,
    "training.run_ahead": _OWN_PROCESSES,
    "training.predict": _REPORT,
    "training.sample_tokens": _REPORT,
    "output.trace_step": _REPORT,
    "output.folder": "the variable RUN sets it",
    "machine.cluster": "the nodes, of which every file is",
    "machine.software": "of predictions, and of the stages, of which every file is",
    "machine.fused_norm": _PREDICTION,
    "machine.expert_load": _PREDICTION,
    "machine.inter_bandwidth": _PREDICTION,
    "machine.intra_bandwidth": _PREDICTION,
    "machine.memory": _PREDICTION,
    "machine.peak": _PREDICTION,
    "machine.memory_bandwidth": _PREDICTION,
}
"""Setting -> why it means nothing for a job of another program."""

COMMON = frozenset(
    {
        # Sizes and axes are written, or the run is refused.
        "model",
        "layout",
        "data.seq_len",
        "data.attention",
        "optimizer.name",
        "optimizer.lr",
        "optimizer.lr_warmup_steps",
        "optimizer.lr_min_fraction",
        "optimizer.lr_decay_style",
        "optimizer.lr_wsd_decay_steps",
        "optimizer.betas",
        "optimizer.eps",
        "optimizer.weight_decay",
        "optimizer.clip_grad_norm",
        "optimizer.clip",
        "optimizer.update",
        "adapter.rank",
        "schedule.family",
        "schedule.group_size",
        "schedule.placement",
        "schedule.keep",
        "schedule.balance",
        "schedule.offload",
        "schedule.device_budget",
        "schedule.file",
        "training.steps",
        "training.dtype",
        "training.matmul_dtype",
        "training.z_loss",
        "training.freeze_layers",
        "training.seed",
        "training.compile",
        "checkpoint.every",
        "checkpoint.every_s",
        "checkpoint.init",
        "checkpoint.resume",
        "checkpoint.grace_s",
        "checkpoint.background",
        "checkpoint.final",
        "checkpoint.keep",
        "machine.attention",
    }
)
"""Settings, or whole sections, that every target writes, refuses or names itself."""


_SAME = {"data.pack": "stream"}
"""Setting -> a value that means what these programs do."""


def setting_names() -> list[str]:
    """The names of all settings of a run, such as ``layout.pp``."""
    default = RunConfig()
    return [
        f"{section.name}.{item.name}"
        for section in fields(RunConfig)
        for item in fields(getattr(default, section.name))
    ]


def unwritten(job: Job, own: Collection[str]) -> list[str]:
    """The settings that the run changes and that the files lack, a sentence each.

    Args:
        job: the run.
        own: settings, or whole sections, that the target writes, refuses or names itself, beside ``COMMON``.
    """
    default, known = RunConfig(), {*COMMON, *MEANINGLESS, *own}
    found = [
        (name, value)
        for name in setting_names()
        if name not in known
        and name.split(".")[0] not in known
        and (value := value_of(job.config, name)) not in (value_of(default, name), _SAME.get(name))
    ]
    return [f"{name} {_words(value)}: the files have no counterpart" for name, value in found]


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value.absolute() if isinstance(value, Path) else value)


def checkpoints_unwritten(job: Job, program: str) -> list[str]:
    """What both programs do otherwise with checkpoints, a sentence each."""
    own, found = job.config.checkpoint, list[str]()
    if own.final == "none":
        found.append(f"checkpoint.final none: {program} writes a checkpoint after the last step")
    if own.final == "safetensors":
        found.append(f"checkpoint.final safetensors: the last checkpoint is in the format of {program} alone")
    return found
