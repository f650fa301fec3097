"""Precision of weights and gradients in Megatron-LM, core 0.16: what the run was predicted with.

Rules are those of ``training/arguments.py``: with ``--bf16`` gradients add up and are reduced in four bytes, unless
``--grad-reduce-in-bf16`` is given; with ``--fp16`` in two, unless ``--accumulate-allreduce-grads-in-fp32`` is.
"""

from pipeloom.export.job import Job
from pipeloom.export.text import Flag, flag

_WIDE = "--accumulate-allreduce-grads-in-fp32"
_NARROW = {"bf16": "--grad-reduce-in-bf16", "fp16": None}
"""Data type of two bytes -> the flag for gradients of two bytes; ``None``: the default."""


def precision_flags(job: Job) -> list[Flag]:
    """Flags for the data types of weights and gradients; none in single precision, the default."""
    if job.dtype not in _NARROW:
        return []
    of_gradients = _NARROW[job.dtype] if job.placed.software.has_narrow_gradients else _WIDE
    return [flag(f"--{job.dtype}"), *([] if of_gradients is None else [flag(of_gradients)])]


def gradient_differences(job: Job) -> list[str]:
    """What is different from this program, or from the prediction, in the bytes of gradients; a sentence each."""
    software = job.placed.software
    if job.dtype not in _NARROW:
        return []
    predicted = f"machine.software {software.name}"
    if software.has_narrow_gradients:
        found = (
            f"gradients of micro-batches and ranks add up in {job.config.training.known_dtype}, as predicted for "
            f"{predicted}, in pipeloom in float32; {_WIDE} in the script would take 2 bytes more for each parameter"
        )
        return [found]
    added, reduced = software.weight_state_bytes - 2, software.gradient_bytes
    found = (
        f"gradients add up and are reduced in 4 bytes, but the prediction for {predicted} has them in {added:g} and "
        f"{reduced:g}"
    )
    return [found] if min(added, reduced) < 4 else []
