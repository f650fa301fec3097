"""The verdict on a run's step in words: measured and predicted seconds, and what makes the difference."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from pipeloom.analysis.bubble import WAITING, BubbleAccount
from pipeloom.predict.describe import profile_command
from pipeloom.report.curves import median_step_time_s
from pipeloom.report.unfinished import steps_before, traced_step
from pipeloom.runs.run_folder import CONFIG
from pipeloom.runs.run_reading import Run
from pipeloom.terminal.words import count, seconds

_FEWEST = 5
"""Steps after the first one without which the spread of the steps is not estimated."""
_PARTS = {
    "compute": ("compute_s",),
    WAITING: ("startup_s", "imbalance_s", "drain_s"),
    "exposed communication": ("exposed_p2p_s", "exposed_swaps_s", "exposed_data_parallel_s"),
    "host": ("host_s",),
}
"""Name -> parts of the bubble account."""
_OUTSIDE = "batch, loss and weight update"
"""Name of what is outside the pipeline."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a step.

    Attributes:
        headline: measured and predicted step, their ratio, and the spread of the steps.
        causes: (name, its seconds and the next command) of each part that differs by more than the spread.
        note: why there are no causes, or what they have in common; may be empty.
        shares: the shares of the parts of the traced step, as measured; empty if it has no trace.
    """

    headline: str
    causes: tuple[tuple[str, str], ...]
    note: str
    shares: str = ""

    @property
    def lines(self) -> list[str]:
        """All of it, for a terminal."""
        causes = (f"{name}: {text}" for name, text in self.causes)
        return [self.headline, *causes, *filter(None, [self.note, self.shares])]


def step_verdict(run: Run, accounts: Mapping[str, Sequence[BubbleAccount]]) -> Verdict | None:
    """The verdict on a run; ``None`` if no step of it was measured.

    A difference counts only if it exceeds the spread of the measured steps: the larger distance of the median from the
    first and the last decile of the steps after the first one.

    Args:
        run: its metrics and summary.
        accounts: of the ranks in the ``measured`` and in the ``predicted`` step, as far as there are any.
    """
    typical_s = median_step_time_s(run)
    if typical_s is None:
        return None
    return replace(_compared(run, accounts, typical_s), shares=_shares(run, accounts.get("measured", ())))


def _compared(run: Run, accounts: Mapping[str, Sequence[BubbleAccount]], typical_s: float) -> Verdict:
    """The verdict without the shares, of a run whose median step took ``typical_s``."""
    begun = steps_before(run) or 0
    # The first step of a process allocates and connects.
    times = {line["step"]: line["step_time_s"] for line in run.metrics if line["step"] > begun + 1}
    measured = f"measured {seconds(typical_s)} a step (median)"
    if len(times) < _FEWEST:
        few = f"to separate causes from noise, {_FEWEST} steps after the first are needed, found {len(times)}"
        return Verdict(f"{measured}{_beside(run, typical_s)}", (), few)
    low_s, high_s = (float(one) for one in np.quantile(list(times.values()), (0.1, 0.9)))
    noise_s = max(high_s - typical_s, typical_s - low_s)
    headline = f"{measured}, 8 of 10 steps {seconds(low_s)} to {seconds(high_s)}{_beside(run, typical_s, noise_s)}"
    step, again = traced_step(run), f"`pipeloom train {shlex.quote(str(run.folder / CONFIG))}"
    if "measured" not in accounts or "predicted" not in accounts or step not in times:
        return Verdict(headline, (), "without a measured and a predicted trace there are no causes to compare")
    if not low_s <= times[step] <= high_s:
        why = f"the traced step {step} took {seconds(times[step])}, outside that range, so its parts explain no other"
        return Verdict(headline, (), f"{why}; {again} --output.trace-step {step + 1}` traces another")
    causes = tuple(_causes(run, accounts, times[step], noise_s))
    return Verdict(headline, causes, _note(run, causes, typical_s, noise_s))


def _note(run: Run, causes: Sequence[tuple[str, str]], typical_s: float, noise_s: float) -> str:
    """What the causes have in common, or why there are none."""
    step = traced_step(run)
    if not causes:
        return f"no part of step {step} differs from its prediction by more than the spread, {seconds(noise_s)}"
    summary, notes = run.summary or {}, list[str]()
    predicted_s, cores = summary.get("predicted_step_time_s"), summary.get("shared_cores")
    if predicted_s is not None and abs(typical_s - predicted_s) <= noise_s:
        notes.append("in the whole step these differences cancel")
    if cores is not None:
        shared = f"{count(run.config.layout.num_ranks, 'process')} share {count(cores, 'core')}"
        notes.append(f"{shared}, so each part contains times in which a process waits for a core")
    return "; ".join(notes)


def _beside(run: Run, typical_s: float, noise_s: float | None = None) -> str:
    predicted_s = (run.summary or {}).get("predicted_step_time_s")
    if predicted_s is None:
        return "; no predicted step" + (" time, which a run writes at its end" if run.summary is None else "")
    text = f"; predicted {seconds(predicted_s)}, {predicted_s / typical_s:.2f} times the measured step"
    if noise_s is None:
        return text
    if abs(typical_s - predicted_s) <= noise_s:
        return f"{text}: within the spread of the steps"
    return f"{text}: {'slower' if typical_s > predicted_s else 'faster'} than predicted"


def _shares(run: Run, accounts: Sequence[BubbleAccount]) -> str:
    """Where the traced step went, the largest part first, as means over the ranks; empty without its accounts."""
    step = traced_step(run)
    step_s = next((line["step_time_s"] for line in run.metrics if line["step"] == step), None)
    if not accounts or step_s is None:
        return ""
    found = {part: fmean(sum(getattr(one, key) for key in keys) for one in accounts) for part, keys in _PARTS.items()}
    found[_OUTSIDE] = step_s - fmean(one.compute_s + one.idle_s for one in accounts)
    ordered = sorted(found.items(), key=lambda item: -item[1])
    parts = [f"{part} {took_s / step_s:.0%}" for part, took_s in ordered if took_s / step_s >= 0.005]
    return f"where step {step} went: {'; '.join(parts)}"


def _causes(
    run: Run, accounts: Mapping[str, Sequence[BubbleAccount]], step_s: float, noise_s: float
) -> list[tuple[str, str]]:
    """Parts that differ by more than ``noise_s``, the largest first; their differences add up to that of the step."""
    names = ("measured", "predicted")
    found = {
        part: tuple(fmean(sum(getattr(one, key) for key in keys) for one in accounts[name]) for name in names)
        for part, keys in _PARTS.items()
    }
    whole = [fmean(one.compute_s + one.idle_s for one in accounts[name]) for name in names]
    predicted_s = (run.summary or {}).get("predicted_step_time_s")
    if predicted_s is not None:
        found[_OUTSIDE] = (step_s - whole[0], predicted_s - whole[1])
    computed = [one.compute_s for one in accounts["measured"]]
    more = [here - one.compute_s for here, one in zip(computed, accounts["predicted"], strict=True)]
    for rank, own in enumerate(more):
        # Slower by more than the other ranks are.
        if len(more) > 1 and own - median(more[:rank] + more[rank + 1 :]) > noise_s:
            found[f"compute of rank {rank}, a straggler"] = (computed[rank], accounts["predicted"][rank].compute_s)
    ordered = sorted(found.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    return [
        (part, f"{seconds(one)}, predicted {seconds(other)}: {_advice(run, part, is_slower=one > other)}")
        for part, (one, other) in ordered
        if abs(one - other) > noise_s
    ]


def _advice(run: Run, part: str, *, is_slower: bool) -> str:
    """What to run next."""
    config, layout = shlex.quote(str(run.folder / CONFIG)), run.config.layout
    if not is_slower:
        return (
            "less than predicted from the profile before the first step, as if other work had slowed that; "
            f"`pipeloom train {config}` profiles again"
        )
    if part == WAITING:
        more = f"--layout.num-microbatches {2 * layout.num_microbatches}"
        return f"`pipeloom simulate {config} {more}` predicts it with more micro-batches"
    if part == "exposed communication":
        return (
            f"a slower or a shared link; `{profile_command(run.config)}` measures it, and "
            f"`pipeloom simulate {config} --machine.cluster ./cluster.toml` predicts with it"
        )
    if part.startswith("compute") or part == "host":
        return (
            f"other work on the device or its cores; end it, and `pipeloom train {config}` profiles and measures again"
        )
    return f"reading text or a slow host; `pipeloom train {config}` measures again"
