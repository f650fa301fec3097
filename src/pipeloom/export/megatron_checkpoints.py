"""Checkpoints of Megatron-LM, core 0.16, and the ways in which it ends before the last step.

Rules are those of ``training/training.py`` (``checkpoint_and_decide_exit``) and ``training/checkpointing.py``.
"""

import math

from pipeloom.config import CheckpointConfig
from pipeloom.export.job import Job
from pipeloom.export.text import Flag, flag
from pipeloom.terminal.words import count


def about_the_end(job: Job) -> str:
    """A sentence about the ways to end before the last step."""
    after = (
        "The script ends with status 75 where an incomplete run wrote a checkpoint. Started again, it resumes from it."
    )
    if not job.config.checkpoint.grace_s:
        return f"SIGTERM ends the run at once, without a checkpoint (checkpoint.grace_s 0). {after}"
    return (
        "SIGTERM and Ctrl-C end the run after its step, with a checkpoint, if both take less than the 30 s after which "
        "torchrun kills its processes; STOP_AFTER_MIN=N ends it with one after about N minutes, however long that "
        f"takes. {after}"
    )


def minutes_of(job: Job) -> int:
    """``checkpoint.time_limit_s`` in minutes, which are whole ones; 0 for no limit."""
    limit_s = job.config.checkpoint.time_limit_s
    return 0 if limit_s is None else max(1, math.floor(limit_s / 60))


def kept(job: Job) -> tuple[list[Flag], list[str]]:
    """Which checkpoints stay: flags, and what is left out.

    Megatron-LM keeps all, or the newest with those at multiples of an interval, itself a multiple of the one at which
    it saves.
    """
    own, interval = job.config.checkpoint, job.interval
    if interval is None:
        return [], []  # a single one
    never = interval * 1_000_000  # beyond the last step
    if own.keep is None:
        # Those by the clock would fill the disk: pipeloom keeps the two newest of them.
        what = "checkpoint.keep: Megatron-LM keeps the newest checkpoint alone, not the two newest"
        return ([flag("--save-retain-interval", never)], [what]) if own.every is None else ([], [])
    several = f"checkpoint.keep {own.keep}: Megatron-LM keeps all checkpoints or the newest alone, here all"
    if own.keep > 1:
        return [], [several]
    if own.keep_every is not None and own.keep_every % interval:
        what = f"checkpoint.keep_every {own.keep_every}: here all checkpoints are kept, as it is no multiple of"
        return [], [f"{what} the {count(interval, 'step')} between them"]
    return [flag("--save-retain-interval", own.keep_every or never)], []


def in_background(job: Job, *, is_fsdp: bool) -> tuple[list[Flag], list[str]]:
    """Whether training continues while a checkpoint is written: flags, and what is left out.

    The process that writes in the background has no handler of signals, and torchrun sends them to it, too: after its
    end Megatron-LM waits for it without a limit, and the checkpoint of a signal is lost.

    Args:
        job: the run.
        is_fsdp: whether Megatron-LM's FSDP shards it, whose checkpoints have a format of their own.
    """
    own = job.config.checkpoint
    if not own.background:
        return [], []
    waits = "checkpoint.background: training waits while a checkpoint is written"
    if is_fsdp:
        return [], [f"{waits}, as always with Megatron-LM's FSDP"]
    if own.grace_s:
        why = "Megatron-LM's background process would end with SIGTERM, before the checkpoint that is written then"
        return [], [f"{waits}: {why}; with checkpoint.grace_s 0, without that checkpoint, the script sets --async-save"]
    return [flag("--async-save"), flag("--use-persistent-ckpt-worker")], []


def checkpoint_differences(job: Job) -> list[str]:
    """What of the settings of checkpoints Megatron-LM does in another way, a sentence each."""
    found, limit_s = job.clock_differences("Megatron-LM"), job.config.checkpoint.time_limit_s
    if limit_s is not None:
        found.append(
            f"checkpoint.time_limit_s {limit_s:g}: Megatron-LM writes the checkpoint behind the first step that ends "
            f"after {count(minutes_of(job), 'minute')}"
        )
    if (grace_s := job.config.checkpoint.grace_s) not in (0, CheckpointConfig().grace_s):
        found.append(
            f"checkpoint.grace_s {grace_s:g}: torchrun kills the processes 30 s after a signal, whatever they do"
        )
    return found
