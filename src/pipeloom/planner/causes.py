"""Where a step's time goes, by cause: what one layout costs more than another."""

from statistics import fmean

from pipeloom.cost.stages import layers_by_recompute
from pipeloom.predict.step import SimulatedStep
from pipeloom.schedule import Kind

CAUSES = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "bubble_s": "bubble",
    "exposed_p2p_s": "exposed p2p",
    "exposed_data_parallel_s": "exposed data-parallel",
    "optimizer_s": "optimizer",
    "host_s": "host",
}
"""The keys of ``causes``, in words; tensor-parallel exchanges count as compute."""


def causes(step: SimulatedStep) -> dict[str, float]:
    """Seconds of a step by cause, mean of the pipeline ranks; they add up to the step time.

    The bubble is start-up, imbalance and drain. Recomputation is the forwards that run a second time.
    """
    mean = {name: fmean(account.to_dict()[name] for account in step.accounts) for name in step.accounts[0].to_dict()}
    again_s = _recompute_s(step)
    return {
        "compute_s": mean["compute_s"] - again_s,
        "recompute_s": again_s,
        "bubble_s": mean["startup_s"] + mean["imbalance_s"] + mean["drain_s"],
        "exposed_p2p_s": mean["exposed_p2p_s"],
        "exposed_data_parallel_s": mean["exposed_data_parallel_s"],
        "optimizer_s": mean["optimizer_s"],
        "host_s": mean["host_s"],
    }


def _recompute_s(step: SimulatedStep) -> float:
    """Seconds of recomputed layers and micro-batches of a step, mean of the pipeline ranks."""
    run, again_s = step.run, 0.0
    each_s = step.placed.recompute_s
    # Recomputed layers are inside backwards, where no span shows them; recomputed micro-batches are spans of their own.
    for stage, rank in zip(layers_by_recompute(run, step.software), step.placed.placement.rank_by_stage, strict=True):
        for alike, count in stage:
            if alike.recompute == "full":
                again_s += count * each_s[rank]
    spans = step.trace.spans
    whole_s = float((spans.end_s - spans.start_s)[spans.row.is_kind(Kind.RECOMPUTE)].sum())
    return (again_s * run.num_microbatches + whole_s) / run.pp


def differences(step: SimulatedStep, other: SimulatedStep) -> dict[str, float]:
    """For each cause the seconds that ``other`` takes more than ``step``; below 0 where it takes less."""
    ours, theirs = causes(step), causes(other)
    return {name: theirs[name] - ours[name] for name in ours}
