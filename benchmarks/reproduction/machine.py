"""What all of the paper's experiments share: models, cluster, programs, and how a step is described."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.catalog import load_cluster, load_model, load_software
from pipeloom.cost.placed import OfPlaced, Placed
from pipeloom.cost.software import Software
from pipeloom.families import Choice
from pipeloom.predict.step import SimulatedStep, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.workload.run import Run

Row = Mapping[str, str]
CLUSTER = load_cluster("dgx-1-v100")
MODELS = {name: load_model(name) for name in ("gpt-52b", "gpt-6.6b")}
NUM_DEVICES = 64
MEGATRON = load_software("megatron-2021")
OWN = replace(load_software("pipeloom"), efficiency=MEGATRON.efficiency, lends_tied=False, weight_state_bytes=4.0)
"""With the kernels and bandwidths of the other, and as much to do for a tied embedding after the pipeline, so that the
two differ in what they do and not in how fast, and by their orders. Gradients have two bytes: Fast-LLM, which the
paper's program became, has buffers of two or of four for them, and with four the largest batches would not fit."""
MESSAGES = {"cut": True, "whole": False}
"""How a message between stages goes: cut over the tensor-parallel ranks (scatter/gather), or whole from each."""


@dataclass(frozen=True)
class Candidate(OfPlaced):
    """A run on the cluster in a schedule.

    Attributes:
        order: the schedule.
    """

    knobs: Knobs

    def simulate(self) -> SimulatedStep:
        """Its step."""
        return simulate_step(self.placed, self.knobs)


def with_messages(software: Software, messages: str) -> Software:
    """The program with messages that are ``cut`` or ``whole``."""
    return replace(software, scatter_gather=MESSAGES[messages])


def with_efficiency(software: Software, **changes: float) -> Software:
    """The program with some of its efficiencies changed."""
    values: dict[str, Any] = dict(changes)
    return replace(software, efficiency=replace(software.efficiency, **values))


def base_run(model: str) -> Run:
    """What does not change: sequences of 1,024 tokens, fp16, every layer recomputed, as the paper's models."""
    return Run(shape=MODELS[model], seq=1024, recompute="full", attention="fused-softmax", precision="fp16")


def candidate(run: Run, software: Software, family: str) -> Candidate:
    """A run in a family's schedule; sharded weights and gradients with room for two stages each."""
    choice = Choice(family=family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)
    return Candidate(Placed(run, CLUSTER, software), Knobs(choice=choice, residency=2, prefetch=1, gradient_buffers=2))


def tflop_per_s(step: SimulatedStep) -> float:
    """TFLOP/s of each device, what is recomputed counted: arXiv 2104.04473's 96 B T L H^2 (...), section 5.1."""
    return step.hfu * CLUSTER.device.peak_flops_per_s[step.run.precision] / 1e12


def described(step: SimulatedStep) -> dict[str, str]:
    """A step's layout and result as the columns of a data file."""
    run = step.run
    return {
        "program": step.software.name,
        "family": step.knobs.choice.family,
        "tp": str(run.tp),
        "pp": str(run.pp),
        "dp": str(run.dp),
        "loops": str(run.loops),
        "microbatch_size": str(run.micro_batch),
        "num_microbatches": str(run.num_microbatches),
        "shard": run.shard,
        "tflop_per_s": f"{tflop_per_s(step):.4f}",
        "step_time_ms": f"{step.prediction.step_time_s * 1e3:.1f}",
        "memory_gb": f"{step.prediction.memory.total_bytes / 1e9:.1f}",
    }
