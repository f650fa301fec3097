"""Export to PyTorch's pipelining runtime: the schedule as CSV, and a module that loads it."""

from dataclasses import replace

from pipeloom.export.job import Draft, Job, Target
from pipeloom.export.text import body, comment
from pipeloom.export.torch_csv import format_torch_csv

CSV, MODULE = "torch_schedule.csv", "torch_schedule.py"
PROGRAM = "torch.distributed.pipelining of PyTorch 2.13"

RESIDENT_STAGES = 3
"""Number of a rank's stages that PyTorch's runtime keeps gathered (torch 2.13, ``_add_unshard_reshard``)."""


def tied_problems(job: Job, program: str) -> list[str]:
    """Why embedding and head cannot be tied; empty if they are not, or are on one rank."""
    owner = job.schedule.placement.rank_by_stage
    if not job.model.tied or owner[0] == owner[-1]:
        return []
    return [f"model.tied: {program} does not support a matrix that the first and the last stage share"]


def _problems(job: Job) -> list[str]:
    problems = [*job.whole_problems(), *tied_problems(job, "PyTorch's runtime")]
    problems += job.order_problems("PyTorch's runtime")
    if job.config.layout.pp == 1:
        problems.append("layout.pp 1: without a pipeline there is no schedule to export")
    return problems


def _make(job: Job) -> Draft:
    layout = job.config.layout
    notes = Draft(
        {},
        f"`from torch_schedule import make_schedule`, in a program that builds stages and starts {layout.num_ranks} "
        "processes",
        (
            *left_out_of_runtime(job),
            (
                "everything except the order: the program that builds the stages determines layout.tp, layout.dp, "
                "layout.shard, recomputation, data types and data"
            ),
        ),
        differences_of_runtime(job),
    )
    constants = [
        comment(PROGRAM, notes),
        f'"""The order of {job.config.family} on {layout.pp} pipeline ranks, for PyTorch\'s runtime."""\n',
        "from pathlib import Path\n",
        f"NUM_MICROBATCHES = {layout.num_microbatches}",
        f'"""Of each data-parallel replica; each of {layout.microbatch_size} sequences."""',
        f"RANK_BY_STAGE = {list(job.schedule.placement.rank_by_stage)}",
        f"LAYERS_BY_STAGE = {list(job.layers_by_stage)}",
        f'"""Stage 0 has the embedding as well, stage {job.head_stage} the final norm and the head."""',
    ]
    module = "\n".join([*constants, body("torch_schedule.txt")])
    return replace(notes, files={CSV: format_torch_csv(job.schedule), MODULE: module})


def left_out_of_runtime(job: Job) -> tuple[str, ...]:
    """Settings of the schedule that PyTorch's runtime determines itself."""
    schedule = job.config.schedule
    found: list[str] = []
    if job.config.layout.shard == "full":
        found.append(f"schedule.residency {schedule.known_residency} and schedule.prefetch {schedule.known_prefetch}")
    if schedule.gradient_buffers is not None:
        found.append(f"schedule.gradient_buffers {schedule.gradient_buffers}: every stage keeps its gradient whole")
    return (*found, f"schedule.receive_buffers {schedule.receive_buffers}: the runtime places its receives itself")


def differences_of_runtime(job: Job) -> tuple[str, ...]:
    """How gathers of sharded weights differ in PyTorch's runtime."""
    layout = job.config.layout
    if layout.shard == "none" or layout.data_ranks == 1:
        return ()
    if layout.num_loops > RESIDENT_STAGES:
        return (f"the runtime keeps {RESIDENT_STAGES} stages of a rank gathered, and gathers the others again",)
    if layout.shard == "full":
        return (
            f"the runtime keeps {RESIDENT_STAGES} stages gathered, so that all weights of a rank are gathered at once",
        )
    return ()


TARGET = Target("torch", PROGRAM, (CSV, MODULE), _problems, _make, starts=False)
