"""What each step measures beside its loss: utilization, bubble, exposed communication, memory."""

import resource
from collections.abc import Sequence
from typing import Any

import torch

from pipeloom.analysis.summary import exposed_s
from pipeloom.config import RunConfig
from pipeloom.cost.flops import shape_model_flops
from pipeloom.execute.executor import StepResult
from pipeloom.execute.parts.expert_loads import ExpertLoads
from pipeloom.execute.processes.world import World
from pipeloom.measure.describe import datasheet_peaks
from pipeloom.workload.dtypes import precision_of
from pipeloom.workload.model import shape_of

_KIB = 1024


class StepMeter:
    """Measures steps. Each rank adds ``own`` to the all-reduce at the end of a step; ``metrics`` takes the sums.

    Args:
        config: of the run, resolved.
        world: all ranks.
    """

    def __init__(self, config: RunConfig, world: World) -> None:
        layout = config.layout
        self._num_ranks, self._num_pipelines, self._pp = layout.num_ranks, layout.num_ranks // layout.pp, layout.pp
        self._pipeline_rank = layout.coordinates(world.rank).pipeline
        self._device = world.device
        self._flops: float | None = None  # of a model without formulas
        if config.model.adapted is None:
            shape = shape_of(config.model)
            self._flops = shape_model_flops(shape, config.data.seq_len, config.frozen_pieces, config.pairs)
        experts = None if config.model.adapted is not None else config.model.expert_layout
        layers = range(config.model.num_layers)
        self._shares_experts = layout.shares_experts
        self._drops = experts is not None and experts.capacity is not None
        self._num_routed = 0 if experts is None else sum(map(experts.are_in, layers))
        is_cuda = world.device.type == "cuda"
        peaks = datasheet_peaks(torch.cuda.get_device_name(world.device))[0] if is_cuda else {}
        self._peak = peaks.get(precision_of(config.training.known_dtype) or "")

    def own(self, result: StepResult, waited_s: float, loads: ExpertLoads | None = None) -> list[float]:
        """This rank's terms: seconds of compute, of the step, of exposed communication, of waits; loads; bytes."""
        trace = result.trace
        own = self._pipeline_rank
        bytes_ = [0.0] * self._pp
        bytes_[own] = float(_peak_bytes(self._device))
        of_loads = (0.0,) * 3 if loads is None else (loads.most, loads.most_of_ranks, loads.dropped)
        busy_s, step_s = float(trace.compute(own).duration_s.sum()), trace.end_s - trace.start_s
        return [busy_s, step_s, exposed_s(trace, own), waited_s, *of_loads, *bytes_]

    def metrics(self, sums: Sequence[float], tokens_per_s: float) -> dict[str, Any]:
        """The metrics of a step.

        Args:
            sums: of ``own`` over all ranks.
            tokens_per_s: of the step.

        Returns:
            Name -> value. ``bubble_fraction``: share of the step, without the optimizer, in which ranks do not compute.
            ``exposed_communication_s``: mean over the ranks of seconds with communication and without compute.
            ``data_wait_s``: mean over the ranks of seconds that the step waited for its batch.
            ``memory_bytes``: for each pipeline rank the peak since the start, mean over its replicas: allocated on the
            CUDA device, or resident memory of the process. ``model_flops_per_s``: of a device, without recomputation;
            missing for models without formulas. ``expert_load``: of models with experts, the load of the expert with
            most tokens / the mean load, mean over the layers; 1 if all are equal. ``expert_rank_load``: the same of the
            ranks that share experts, all of a rank's experts together. ``expert_dropped``: with a capacity
            the share of pairs of a token and an expert that were dropped, mean over the layers. ``mfu``: the share of
            ``model_flops_per_s`` in the datasheet's peak, on devices with one.
        """
        busy_s, step_s, exposed, waited_s, most, most_of_ranks, dropped, *bytes_ = sums
        found: dict[str, Any] = {
            "bubble_fraction": 1 - busy_s / step_s if step_s else 0.0,
            "exposed_communication_s": exposed / self._num_ranks,
            "data_wait_s": waited_s / self._num_ranks,
            "memory_bytes": [round(one / self._num_pipelines) for one in bytes_],
        }
        if self._num_routed:
            of_loads = {"expert_load": most, "expert_rank_load": most_of_ranks, "expert_dropped": dropped}
            left_out = {"expert_rank_load": not self._shares_experts, "expert_dropped": not self._drops}
            number = self._num_pipelines * self._num_routed
            found |= {name: one / number for name, one in of_loads.items() if not left_out.get(name)}
        if self._flops is None:
            return found
        rate = tokens_per_s * self._flops / self._num_ranks
        found["model_flops_per_s"] = rate
        return found if self._peak is None else {**found, "mfu": rate / self._peak}


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB  # Linux counts in KiB
