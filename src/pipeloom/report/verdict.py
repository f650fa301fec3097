"""The verdict on a run's step in words: measured and predicted seconds, and what makes the difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from pipeloom.analysis.bubble import WAITING, BubbleAccount
from pipeloom.predict.describe import profile_command
from pipeloom.report.curves import median_step_time_s
from pipeloom.report.unfinished import traced_step
from pipeloom.runs.run_folder import CONFIG
from pipeloom.runs.run_reading import FIRST_PIPELINE, Run
from pipeloom.runs.traced_step import MOST_CANDIDATES
from pipeloom.terminal.words import count, quoted, seconds

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


_Accounts = Mapping[str, Sequence[BubbleAccount]]


def step_verdict(run: Run, accounts: _Accounts, others: _Accounts | None = None) -> Verdict | None:
    """The verdict on a run; ``None`` if no step of it was measured.

    A difference counts only if it exceeds the spread of the measured steps: the larger distance of the median from the
    first and the last decile of the steps after the first one.

    Args:
        run: its metrics and summary.
        accounts: of the ranks of the first pipeline in the ``measured`` and in the ``predicted`` step, as far as there
            are any.
        others: name of another pipeline -> accounts of its ranks in the measured step.
    """
    others = others or {}
    typical_s = median_step_time_s(run)
    if typical_s is None:
        return None
    return replace(_compared(run, accounts, others, typical_s), shares=_shares(run, accounts, others))


def _compared(run: Run, accounts: _Accounts, others: _Accounts, typical_s: float) -> Verdict:
    """The verdict without the shares, of a run whose median step took ``typical_s``."""
    begun = run.begun or 0
    # The first step of a process allocates and connects.
    times = {line["step"]: line["step_time_s"] for line in run.metrics if line["step"] > begun + 1}
    measured = f"measured {seconds(typical_s)} a step (median)"
    if len(times) < _FEWEST:
        few = f"to separate causes from noise, {_FEWEST} steps after the first are needed, found {len(times)}"
        return Verdict(f"{measured}{_beside(run, typical_s)}", (), few)
    low_s, high_s = (float(one) for one in np.quantile(list(times.values()), (0.1, 0.9)))
    noise_s = max(high_s - typical_s, typical_s - low_s)
    most = f"80% of the steps between {seconds(low_s)} and {seconds(high_s)}"
    headline = f"{measured}, {most}{_beside(run, typical_s, noise_s)}"
    step, again = traced_step(run), f"`pipeloom train {quoted(run.folder / CONFIG)}"
    if "measured" not in accounts or "predicted" not in accounts or step not in times:
        return Verdict(headline, (), "without a measured and a predicted trace there are no causes to compare")
    if not low_s <= times[step] <= high_s:
        why = f"the traced step {step} took {seconds(times[step])}, outside that range, so its parts explain no other"
        another = _another_step(step - begun, run.config.training.known_steps - begun)
        return Verdict(headline, (), f"{why}; {again} --output.trace-step {another}` traces another")
    causes = tuple(_causes(run, accounts, others, times[step], noise_s))
    return Verdict(headline, causes, _note(run, causes, typical_s, noise_s))


def _another_step(traced: int, steps: int) -> int:
    """An ``output.trace_step`` that traces other steps than ``traced``, all counted from the start of the run."""
    # Of several steps, one is traced: earlier ones are all of others. The first step of a run is slow.
    return traced + 1 if traced < steps else max(2, traced - MOST_CANDIDATES)


def _note(run: Run, causes: Sequence[tuple[str, str]], typical_s: float, noise_s: float) -> str:
    """What the causes have in common, or why there are none."""
    step = traced_step(run)
    if not causes:
        return f"no part of step {step} differs from its prediction by more than the spread, {seconds(noise_s)}"
    summary, notes = run.summary or {}, list[str]()
    if run.other_traces and not run.other_accounts:
        notes.append("these are the parts of replica 0, whose number of micro-batches others do not have")
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


def _shares(run: Run, accounts: _Accounts, others: _Accounts) -> str:
    """Where the traced step went, the largest part first, as means over all ranks; empty without its accounts."""
    step, first = traced_step(run), accounts.get("measured", ())
    step_s = next((line["step_time_s"] for line in run.metrics if line["step"] == step), None)
    if not first or step_s is None:
        return ""
    every = [*first, *(one for its in others.values() for one in its)]
    found = {part: fmean(sum(getattr(one, key) for key in keys) for one in every) for part, keys in _PARTS.items()}
    found[_OUTSIDE] = step_s - fmean(one.compute_s + one.idle_s for one in every)
    ordered = sorted(found.items(), key=lambda item: -item[1])
    parts = [f"{part} {took_s / step_s:.0%}" for part, took_s in ordered if took_s / step_s >= 0.005]
    of = " of replica 0" if run.other_traces and not others else ""
    return f"where step {step}{of} went: {'; '.join(parts)}"


def _causes(run: Run, accounts: _Accounts, others: _Accounts, step_s: float, noise_s: float) -> list[tuple[str, str]]:
    """Parts that differ by more than ``noise_s``, the largest first; their differences add up to that of the step."""
    # One replica is predicted, which stands for all of them.
    predicted, pipelines = accounts["predicted"], {"": accounts["measured"], **others}
    both = ([one for its in pipelines.values() for one in its], predicted)
    found = {
        part: tuple(fmean(sum(getattr(one, key) for key in keys) for one in its) for its in both)
        for part, keys in _PARTS.items()
    }
    whole = [fmean(one.compute_s + one.idle_s for one in its) for its in both]
    predicted_s = (run.summary or {}).get("predicted_step_time_s")
    if predicted_s is not None:
        found[_OUTSIDE] = (step_s - whole[0], predicted_s - whole[1])
    found |= _stragglers(pipelines, predicted, noise_s)
    ordered = sorted(found.items(), key=lambda item: -abs(item[1][0] - item[1][1]))
    return [
        (part, f"{seconds(one)}, predicted {seconds(other)}: {_advice(run, part, is_slower=one > other)}")
        for part, (one, other) in ordered
        if abs(one - other) > noise_s
    ]


def _stragglers(
    pipelines: _Accounts, predicted: Sequence[BubbleAccount], noise_s: float
) -> dict[str, tuple[float, float]]:
    """Name of a rank that is slower by more than the others are -> its seconds of compute, measured and predicted."""
    names = [(name, rank) for name, its in pipelines.items() for rank in range(len(its))]
    pairs = [(pipelines[name][rank].compute_s, predicted[rank].compute_s) for name, rank in names]
    more = [here - expected for here, expected in pairs]
    return {
        f"compute of rank {rank}{_of_pipeline(name, pipelines)}, a straggler": pairs[number]
        for number, (name, rank) in enumerate(names)
        if len(more) > 1 and more[number] - median(more[:number] + more[number + 1 :]) > noise_s
    }


def _of_pipeline(name: str, pipelines: _Accounts) -> str:
    return "" if len(pipelines) == 1 else f" of {name or FIRST_PIPELINE}"


def _advice(run: Run, part: str, *, is_slower: bool) -> str:
    """What to run next."""
    config, layout = quoted(run.folder / CONFIG), run.config.layout
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
