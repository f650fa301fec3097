"""Everything that the page shows: numbers as text, curves as points, ready to be laid out."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeloom.layout import Layout
from pipeloom.page.over_time import over_time_contents, short
from pipeloom.page.timeline import timeline_contents
from pipeloom.report.bubble import BubbleAccount, account_bubble
from pipeloom.report.summary import LaneUse, PipelineUse, communication, pipeline_use, summarize
from pipeloom.run_folder import Run
from pipeloom.trace import Trace
from pipeloom.words import count

_Text = Callable[[float], str]

CAUSES = {
    "startup_s": ("start-up", "#a9c1dc", "before the rank's first compute action"),
    "compute_s": ("compute", "#4f7cac", "the rank computes"),
    "imbalance_s": ("imbalance", "#e3b04b", "another rank has not computed what is needed"),
    "exposed_p2p_s": ("exposed p2p", "#d1603d", "it is computed and under way"),
    "exposed_data_parallel_s": ("exposed data-parallel", "#8e5572", "weights being gathered, gradients being reduced"),
    "host_s": ("host", "#7d8491", "nothing is missing, the rank has not started"),
    "drain_s": ("drain", "#cfdbe8", "after the rank's last compute action"),
}
"""Parts of the bubble account in the order of the page: name, color, meaning."""


def page_contents(run: Run) -> dict[str, Any]:
    """What the page shows, as a tree for JSON.

    Raises:
        UserError: a trace is not one of the run's schedule.
    """
    traces = {"measured": run.trace}
    if run.predicted is not None:
        traces["predicted"] = run.predicted
    layout, family = run.config.layout, run.config.schedule.family
    step = run.summary["traced_step"]
    return {
        "title": f"{family}: {count(layout.pp, 'rank')} x {count(layout.loops, 'loop')}, "
        f"{count(layout.num_microbatches, 'micro-batch')}{_other_axes(layout)}",
        "folder": run.folder.resolve().name,
        "facts": _facts(run),
        "headline": _headline(run, traces, step),
        "timeline": timeline_contents(traces, run.schedule.num_stages, step),
        "bubble": _bubble(run, traces),
        "communication": _communication(traces),
        "pipelines": _pipelines(run),
        "over_time": over_time_contents(run, traces),
        "curves": [_loss(run), _step_times(run)],
        "sample": run.sample,
        "config": re.split(r"\n\n(?=\[)", run.config_text.strip()),
    }


def _other_axes(layout: Layout) -> str:
    """What there is beside the pipeline."""
    replicas = f", {layout.dp} replicas" if layout.dp > 1 else ""
    return replicas + (f", {layout.tp} tensor-parallel ranks" if layout.tp > 1 else "")


def _facts(run: Run) -> list[list[str]]:
    """(label, value) of what is no comparison."""
    summary = run.summary
    facts = [
        ["parameters", f"{summary['num_parameters']:,}"],
        ["steps", f"{summary['steps']:,}"],
        ["tokens seen", f"{summary['tokens']:,}"],
        ["tokens/s", f"{summary['tokens_per_s']:,.0f}"],
        ["training loss", f"{summary['train_loss']:.4f}"],
    ]
    if any(summary.get("live_bytes", ())):
        held = ", ".join(f"{nbytes / 1e6:,.1f}" for nbytes in summary["live_bytes"])
        facts.append(["held for backwards at most, by pipeline rank", f"{held} MB"])
    if summary.get("exchange_s") is not None:
        facts.append(["tensor-parallel exchanges of a rank", f"{summary['exchange_s'] * 1e3:,.0f} ms"])
    if summary["validation_loss"] is not None:
        facts.append(["validation loss", f"{summary['validation_loss']:.4f}"])
    return [*facts, ["unigram loss", f"{summary['unigram_loss']:.4f}"]]


def _headline(run: Run, traces: Mapping[str, Trace], step: int) -> list[dict[str, str | None]]:
    """Each number measured, predicted, and predicted / measured."""
    summaries = {name: summarize(trace) for name, trace in traces.items()}
    makespans = {name: summary.makespan_s for name, summary in summaries.items()}
    fractions = {name: summary.bubble_fraction for name, summary in summaries.items()}
    steps = {"measured": run.summary["step_time_s"], "predicted": run.summary["predicted_step_time_s"]}
    return [
        _compared("step time", "median over the steps, optimizer included", steps, _ms),
        _compared("pipeline", f"first to last action of step {step}", makespans, _ms),
        _compared("bubble fraction", f"idle share of the ranks in step {step}", fractions, _percent),
    ]


def _compared(name: str, note: str, values: Mapping[str, float | None], text: _Text) -> dict[str, str | None]:
    measured, predicted = values["measured"], values.get("predicted")
    return {
        "name": name,
        "note": note,
        "measured": None if measured is None else text(measured),
        "predicted": None if predicted is None else text(predicted),
        "ratio": f"{predicted / measured:.2f}" if predicted is not None and measured else None,
    }


def _bubble(run: Run, traces: Mapping[str, Trace]) -> dict[str, Any]:
    accounts = {name: account_bubble(run.schedule, trace) for name, trace in traces.items()}
    groups = [
        (f"rank {rank}", {name: parts[rank] for name, parts in accounts.items()})
        for rank in range(run.schedule.num_ranks)
    ]
    total = {name: sum(parts, BubbleAccount()) for name, parts in accounts.items()}
    longest = max(trace.end_s - trace.start_s for trace in traces.values())
    shown = [cause for cause in CAUSES if any(getattr(account, cause) for account in total.values())]
    rows = [[label, *_cells(parts, shown, _tenths)] for label, parts in groups]
    rows.append(["all ranks", *_cells(total, shown, _tenths)])
    shares = {name: _shares(account) for name, account in total.items()}
    rows.append(["share", *_cells(shares, shown, _percent)])
    return {
        "causes": [dict(zip(("name", "color", "meaning"), CAUSES[cause], strict=True)) for cause in shown],
        "traces": list(traces),
        "groups": [{"label": label, "bars": _bars(parts, shown, longest, _ms)} for label, parts in groups],
        "total": {"label": "all ranks", "bars": _bars(shares, shown, 1.0, _percent)},
        "rows": rows,
    }


def _cells(accounts: Mapping[str, BubbleAccount], shown: Sequence[str], text: _Text) -> list[str]:
    """For each cause a cell for each trace."""
    return [text(getattr(account, cause)) for cause in shown for account in accounts.values()]


def _shares(account: BubbleAccount) -> BubbleAccount:
    whole = account.compute_s + account.idle_s
    return BubbleAccount(**{cause: getattr(account, cause) / whole if whole else 0.0 for cause in CAUSES})


def _bars(accounts: Mapping[str, BubbleAccount], shown: Sequence[str], whole: float, text: _Text) -> list[Any]:
    """For each trace a bar of (share of the width, text) for each cause."""
    bars = []
    for account in accounts.values():
        values = [getattr(account, cause) for cause in shown]
        bars.append([[short(value / whole if whole else 0.0), text(value)] for value in values])
    return bars


def _communication(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """A row for each lane: rank, lane, messages; then busy, hidden, exposed of each trace."""
    uses = {name: {(use.rank, use.lane): use for use in communication(trace)} for name, trace in traces.items()}
    lanes = list(dict.fromkeys(lane for by_lane in uses.values() for lane in by_lane))
    rows = []
    for rank, lane in lanes:
        found = [by_lane.get((rank, lane)) for by_lane in uses.values()]
        num_actions = next(use.num_actions for use in found if use is not None)
        rows.append(
            [f"rank {rank}", str(lane), str(num_actions), *(cell for use in found for cell in _use_cells([use]))]
        )
    totals = [cell for by_lane in uses.values() for cell in _use_cells(list(by_lane.values()))]
    num_messages = sum(int(row[2]) for row in rows)
    return {"traces": list(traces), "rows": rows, "total": ["all ranks", "", str(num_messages), *totals]}


def _pipelines(run: Run) -> list[list[str]]:
    """A row for each pipeline of the layout, if there are several: name, step, compute, and its communication."""
    if not run.other_traces:
        return []
    traces = {"replica 0, tensor rank 0": run.trace, **run.other_traces}
    return [[name, *_pipeline_cells(pipeline_use(trace))] for name, trace in sorted(traces.items())]


def _pipeline_cells(use: PipelineUse) -> list[str]:
    cells = [_tenths(use.makespan_s), _tenths(use.compute_s)]
    for busy, hidden in (use.p2p, use.data_parallel):
        cells += [_tenths(busy), _tenths(hidden), _tenths(busy - hidden)]
    return cells


def _use_cells(uses: Sequence[LaneUse | None]) -> list[str]:
    known = [use for use in uses if use is not None]
    busy, hidden = sum(use.busy_s for use in known), sum(use.hidden_s for use in known)
    return [_tenths(busy), _tenths(hidden), _tenths(busy - hidden), _percent(hidden / busy) if busy else "-"]


def _loss(run: Run) -> dict[str, Any]:
    summary = run.summary
    unigram, validation = summary["unigram_loss"], summary["validation_loss"]
    marks = []
    if validation is not None:
        at = [run.metrics[-1]["step"], _finite(validation)]
        marks.append({"name": f"validation {validation:.4f}", "at": at})
    return {
        "title": "Loss",
        "unit": "nats per token",
        "points": _curve(run, "loss", 1.0),
        "levels": [{"name": f"unigram model {unigram:.4f}", "value": _finite(unigram), "style": "reference"}],
        "marks": marks,
        "from_zero": False,
    }


def _step_times(run: Run) -> dict[str, Any]:
    seconds = {"median": run.summary["step_time_s"], "predicted": run.summary["predicted_step_time_s"]}
    styles = {"median": "measured", "predicted": "predicted"}
    levels = [
        {"name": f"{name} {_ms(value)}", "value": _finite(value * 1e3), "style": styles[name]}
        for name, value in seconds.items()
        if value is not None
    ]
    return {
        "title": "Step time",
        "unit": "ms",
        "points": _curve(run, "step_time_s", 1e3),
        "levels": levels,
        "marks": [],
        "from_zero": True,
    }


def _curve(run: Run, name: str, scale: float) -> list[list[float | None]]:
    return [[line["step"], _finite(line[name] * scale)] for line in run.metrics]


def _finite(value: float) -> float | None:
    """A number that JSON can hold; a loss may have become infinite."""
    return short(value) if math.isfinite(value) else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _tenths(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
