"""The contents of the page for its layout: numbers as text, curves as points."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from pipeloom.analysis.bubble import BubbleAccount
from pipeloom.analysis.summary import LaneUse, communication, summarize
from pipeloom.report.curves import curves_contents, ink, median_step_time_s, median_tokens_per_s
from pipeloom.report.over_time import over_time_contents
from pipeloom.report.timeline import MILLISECONDS, timeline_contents
from pipeloom.report.unfinished import done_steps, traced_step, unfinished_contents
from pipeloom.report.verdict import Verdict, step_verdict
from pipeloom.runs.run_reading import FIRST_PIPELINE, Run
from pipeloom.schedule.lanes import DATA_PARALLEL_LANE
from pipeloom.terminal.words import count, ms, percent
from pipeloom.trace import Trace
from pipeloom.workload.layout import Layout

_Text = Callable[[float], str]

CAUSES = {
    "startup_s": ("start-up", "before the rank's first compute action"),
    "compute_s": ("compute", "the rank computes, tensor-parallel communication included"),
    "imbalance_s": ("imbalance", "waiting for compute of another rank"),
    "exposed_p2p_s": ("exposed p2p", "waiting for a tensor in transit"),
    "exposed_swaps_s": ("exposed swaps", "waiting for a stage or activations from the host"),
    "exposed_data_parallel_s": ("exposed data-parallel", "waiting for gathered weights or reduced gradients"),
    "host_s": ("host", "waiting for the host to start the action"),
    "drain_s": ("drain", "after the rank's last compute action"),
}
"""Parts of the bubble account in the order of the page: (name, meaning). The style sheet has a color for each key."""


def page_contents(run: Run) -> dict[str, Any]:
    """The contents of the page for JSON; without a trace, those that need one are ``None`` or empty.

    Raises:
        UserError: a trace does not belong to the run's schedule.
    """
    traces, layout, order = run.traces, run.config.layout, run.config.title
    step = traced_step(run)
    nothing: list[Any] = []
    contents = {
        "title": f"{order}: {count(layout.pp, 'rank')} x {count(layout.num_loops, 'loop')}, "
        f"{layout.microbatch_words}{_other_axes(layout)}",
        "folder": run.folder.resolve().name,
        "unfinished": unfinished_contents(run),
        "verdict": asdict(verdict) if (verdict := verdict_of(run)) is not None else None,
        "facts": _facts(run),
        "headline": _headline(run, traces, step),
        "curves": curves_contents(run),
        "sample": None if run.sample is None else asdict(run.sample),
        "config": config_blocks(run.config_text),
        "config_note": "All settings; `pipeloom train config.toml` repeats the run.",
        "answer": nothing,
        "reasons": nothing,
    }
    if run.schedule is None or not traces:
        empty = {"timeline": None, "bubble": None, "communication": None, "pipelines": nothing, "over_time": nothing}
        return contents | empty
    titles = {
        "measured": "measured in one step" if step is None else f"measured in step {step}",
        "predicted": "predicted before the first step, from profiled stages",
    }
    return contents | {
        "timeline": timeline_contents(traces, titles),
        "bubble": bubble_contents(run.accounts, traces, ms, MILLISECONDS.name),
        "communication": communication_contents(traces),
        "pipelines": _pipelines(run),
        "over_time": over_time_contents(run, run.schedule, traces),
    }


def config_blocks(text: str) -> list[str]:
    """A run file in blocks, one for each section that has settings, which begins with a bracket."""
    return [block for block in re.split(r"\n\n(?=\[)", text.strip()) if "\n" in block]


def verdict_of(run: Run) -> Verdict | None:
    """The verdict on a run's step; ``None`` if no step was measured."""
    return step_verdict(run, run.accounts, run.other_accounts)


def _other_axes(layout: Layout) -> str:
    """Sizes of the axes other than the pipeline, for the title."""
    replicas = f", {layout.dp} replicas" if layout.dp > 1 else ""
    replicas += f", experts over {layout.ep} ranks" if layout.ep > 1 else ""
    replicas += f", {layout.cp} context-parallel ranks" if layout.cp > 1 else ""
    return replicas + (f", {layout.tp} tensor-parallel ranks" if layout.tp > 1 else "")


def _facts(run: Run) -> list[tuple[str, str]]:
    """(label, value) of numbers that are not compared with a prediction; of an unfinished run, from its metrics."""
    summary, metrics, speed = run.summary, run.metrics, median_tokens_per_s(run)
    if summary is None:
        known = bool(metrics) and all("tokens_per_s" in line for line in metrics)
        # Before the summary, the number of tokens follows from speeds and times.
        updates = run.config.layout.most_updates
        tokens = sum(line["tokens_per_s"] * line["step_time_s"] * updates for line in metrics) if known else None
        facts = {
            "training loss": _text(metrics[-1]["loss"] if metrics else None, ".4f"),
            "steps": f"{done_steps(run):,} of {run.config.training.known_steps:,}",
            "tokens seen": _text(tokens, ",.0f"),
            "tokens/s": _text(speed, ",.0f"),
        }
    else:
        live, exchange_s = summary.get("live_bytes", ()), summary.get("exchange_s")
        held = ", ".join(f"{nbytes / 1e6:,.1f}" for nbytes in live)
        facts = {
            "training loss": _loss(summary["train_loss"], is_measured=bool(metrics)),
            "validation loss": _loss(
                summary["validation_loss"], is_measured=run.config.training.validation_batches > 0
            ),
            "unigram loss": _loss(summary["unigram_loss"], is_measured=True),
            "steps": _text(summary["steps"], ","),
            "tokens seen": _text(summary["tokens"], ","),
            "tokens/s": _text(speed, ",.0f"),
            "parameters": _text(summary["num_parameters"], ","),
            "held for backwards at most, by pipeline rank": f"{held} MB" if any(live) else "",
            "tensor-parallel exchanges of a rank": "" if exchange_s is None else f"{exchange_s * 1e3:,.0f} ms",
        }
    return [(label, value) for label, value in facts.items() if value]


def _loss(value: float | None, *, is_measured: bool) -> str:
    """A loss of a summary, which has ``null`` both for one that was not measured and for one that is not finite."""
    return "not finite" if value is None and is_measured else _text(value, ".4f")


def _text(value: float | None, form: str) -> str:
    """A number as text; empty for ``None``."""
    return "" if value is None else f"{value:{form}}"


def _headline(run: Run, traces: Mapping[str, Trace], step: int | None) -> list[dict[str, str | None]]:
    """Numbers that are measured, predicted, or both, with predicted / measured."""
    summaries = {name: summarize(trace) for name, trace in traces.items()}
    makespans = {name: summary.makespan_s for name, summary in summaries.items()}
    fractions = {name: summary.bubble_fraction for name, summary in summaries.items()}
    steps = {"measured": median_step_time_s(run), "predicted": (run.summary or {}).get("predicted_step_time_s")}
    loads = [one["expert_rank_load"] for one in run.metrics if "expert_rank_load" in one]
    where = "the traced step" if step is None else f"step {step}"
    cards = [
        _compared("step time", "median over the steps, optimizer included", steps, _with_unit),
        _compared("pipeline time", f"first to last action of {where}", makespans, _with_unit),
        _compared("bubble fraction", f"idle share of the ranks in {where}", fractions, percent),
    ]
    if loads:
        both = {"measured": median(loads), "predicted": run.config.machine.known_expert_load}
        note = "tokens of experts, fullest rank / mean; simulate takes machine.expert_load"
        cards.append(_compared("load of experts", note, both, "{:.2f}".format))
    return [card for card in cards if card["measured"] is not None or card["predicted"] is not None]


def _compared(name: str, note: str, values: Mapping[str, float | None], text: _Text) -> dict[str, str | None]:
    both = {kind: values.get(kind) for kind in ("measured", "predicted")}
    measured, predicted = both.values()
    return {
        "name": name,
        "note": note,
        **{kind: None if value is None else text(value) for kind, value in both.items()},
        "ratio": f"{predicted / measured:.2f}" if predicted is not None and measured else None,
        "ratio_of": f"predicted / measured {name}",
    }


def _with_unit(value_s: float) -> str:
    return f"{ms(value_s)} ms"


def bubble_contents(
    accounts: Mapping[str, Sequence[BubbleAccount]], traces: Mapping[str, Trace], text: _Text, unit: str
) -> dict[str, Any]:
    """Bars and table rows of bubble accounts, for each rank and trace, without causes that are 0 for all ranks.

    Args:
        accounts: name of a trace -> account of each rank.
        traces: by the same names.
        text: formats a number of seconds.
        unit: of these texts.
    """
    num_ranks = len(next(iter(accounts.values())))
    groups = [(f"rank {rank}", {name: parts[rank] for name, parts in accounts.items()}) for rank in range(num_ranks)]
    total = {name: sum(parts, BubbleAccount()) for name, parts in accounts.items()}
    # One scale for all traces, so that measured and predicted bars can be compared.
    longest = max(trace.end_s - trace.start_s for trace in traces.values())
    # By the sums over all ranks of each trace, so that all rows have the same columns.
    shown = [cause for cause in CAUSES if any(getattr(account, cause) for account in total.values())]
    rows = [[label, *_cells(parts, shown, text)] for label, parts in groups]
    rows.append(["all ranks", *_cells(total, shown, text)])
    shares = {name: _scaled(account, account.compute_s + account.idle_s) for name, account in total.items()}
    rows.append(["share of all ranks", *_cells(shares, shown, percent)])

    def with_unit(value_s: float) -> str:
        return f"{text(value_s)} {unit}"

    means = {name: _scaled(account, len(groups)) for name, account in total.items()}
    return {
        "causes": [
            {"key": cause.removesuffix("_s").replace("_", "-"), "name": CAUSES[cause][0], "meaning": CAUSES[cause][1]}
            for cause in shown
        ],
        "traces": list(traces),
        "groups": [{"label": label, "bars": _bars(parts, shown, longest, with_unit)} for label, parts in groups],
        "total": {"label": "mean of ranks", "bars": _bars(means, shown, longest, with_unit)},
        "rows": rows,
    }


def _cells(accounts: Mapping[str, BubbleAccount], shown: Sequence[str], text: _Text) -> list[str]:
    """Cells of a row: for each cause, one for each trace."""
    return [text(getattr(account, cause)) for cause in shown for account in accounts.values()]


def _scaled(account: BubbleAccount, whole: float) -> BubbleAccount:
    """Every part / ``whole``."""
    return BubbleAccount(**{cause: getattr(account, cause) / whole if whole else 0.0 for cause in CAUSES})


def _bars(accounts: Mapping[str, BubbleAccount], shown: Sequence[str], whole: float, text: _Text) -> list[Any]:
    """A bar for each trace: (share of the width, text) for each cause."""
    bars = []
    for account in accounts.values():
        values = [getattr(account, cause) for cause in shown]
        bars.append([[ink(value / whole if whole else 0.0), text(value)] for value in values])
    return bars


def communication_contents(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """A row for each lane: rank, lane, number of actions; then busy, hidden, exposed, hidden share of each trace.

    A message counts once, at its receiver. A measured send also lasts while its receiver is not ready, and a simulated
    one takes no time, so that they cannot be compared.
    """
    uses = {
        name: {(use.rank, use.lane): use for use in communication(trace) if use.lane.name != "send"}
        for name, trace in traces.items()
    }
    rows = []
    for rank, lane in dict.fromkeys(lane for by_lane in uses.values() for lane in by_lane):
        # Some lanes are in one of the traces only.
        found = [[by_lane[rank, lane]] if (rank, lane) in by_lane else [] for by_lane in uses.values()]
        num_actions = next(use.num_actions for one in found for use in one)
        rows.append([f"rank {rank}", str(lane), str(num_actions), *(cell for one in found for cell in _use_cells(one))])
    totals = [cell for by_lane in uses.values() for cell in _use_cells(list(by_lane.values()))]
    total = sum(int(row[2]) for row in rows)
    return {"traces": list(traces), "rows": rows, "total": ["all ranks", "", str(total), *totals]}


def _use_cells(uses: Sequence[LaneUse]) -> list[str]:
    """Cells: busy, hidden, exposed, hidden share."""
    busy, hidden = sum(use.busy_s for use in uses), sum(use.hidden_s for use in uses)
    # Sums of the same seconds in another order may differ by a rounding error.
    return [ms(busy), ms(hidden), ms(max(0.0, busy - hidden)), percent(hidden / busy) if busy else "-"]


def _pipelines(run: Run) -> list[list[str]]:
    """A row for each pipeline of the layout, if there are several: name, step, compute, communication."""
    if run.trace is None or not run.other_traces:
        return []
    traces = {FIRST_PIPELINE: run.trace, **run.other_traces}
    rows = []
    for name, trace in sorted(traces.items()):
        uses = communication(trace)
        edges = _use_cells([use for use in uses if use.lane.peer is not None and use.lane.name != "send"])
        collectives = _use_cells([use for use in uses if use.lane == DATA_PARALLEL_LANE])
        computed_s = float(trace.compute().duration_s.sum())
        rows.append([name, ms(trace.end_s - trace.start_s), ms(computed_s), *edges[:3], *collectives[:3]])
    return rows
