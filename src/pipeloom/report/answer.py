"""The page of an answer about a step that was simulated, not trained: prose and tables around its timeline."""

from collections.abc import Sequence
from typing import Any

from pipeloom.predict.step import SimulatedStep
from pipeloom.report.contents import bubble_contents, communication_contents, config_blocks
from pipeloom.report.over_time import memory_chart
from pipeloom.report.page import page_text
from pipeloom.report.timeline import MILLISECONDS, timeline_contents
from pipeloom.terminal.sections import Section, sections_contents
from pipeloom.terminal.words import count, format_bytes, ms, seconds

MOST_ACTIONS = 100_000
"""Most actions of a step that the page draws; so many are 5 MB of text."""
_TRACE = "predicted"


def answer_page(
    title: str,
    question: str,
    *,
    answer: Sequence[Section],
    step: SimulatedStep | None,
    reasons: Sequence[Section],
    run_file: str = "",
) -> str:
    """HTML text of the page.

    Args:
        title: of the page.
        question: in a line below it.
        answer: above the timeline.
        step: that is drawn; ``None`` if there is none.
        reasons: below the timeline.
        run_file: of the step, as TOML; empty for none.
    """
    nothing: list[Any] = []
    contents = {
        "title": title,
        "folder": question,
        "unfinished": None,
        "verdict": None,
        "headline": nothing,
        "facts": nothing if step is None else _facts(step),
        "curves": nothing,
        "pipelines": nothing,
        "sample": None,
        "timeline": None,
        "bubble": None,
        "communication": None,
        "over_time": nothing,
        "answer": sections_contents(answer),
        "reasons": sections_contents(reasons),
        "config": config_blocks(run_file) if run_file else nothing,
        "config_note": "The run file of the layout that is drawn.",
    }
    if step is not None and step.schedule.num_actions <= MOST_ACTIONS:
        contents |= _step_contents(step)
    elif step is not None:
        many = f"The step has {count(step.schedule.num_actions, 'action')}, more than a page can show; "
        contents["answer"] += sections_contents([Section("The step", parts=[f"{many}`pipeloom simulate` draws it."])])
    return page_text(contents)


def _step_contents(step: SimulatedStep) -> dict[str, Any]:
    traces = {_TRACE: step.trace}
    accounts = {_TRACE: [account.pipeline for account in step.accounts]}
    return {
        "timeline": timeline_contents(traces, {_TRACE: "predicted; without what follows the pipeline"}),
        "bubble": bubble_contents(accounts, traces, ms, MILLISECONDS.name),
        "communication": communication_contents(traces),
        "over_time": [memory_chart({_TRACE: step.memory_over_time}, traces)],
    }


def _facts(step: SimulatedStep) -> list[tuple[str, str]]:
    prediction, dollars = step.prediction, step.dollars_per_billion_tokens
    facts = {
        "step time": seconds(prediction.step_time_s),
        "tokens/s": f"{step.tokens_per_s:,.0f}",
        "MFU": f"{step.mfu:.1%}",
        "bubble": f"{step.bubble_fraction:.1%}" if step.schedule.num_ranks > 1 else "",
        "memory of the fullest device": format_bytes(prediction.memory.total_bytes),
        "dollars for 1e9 tokens": "" if dollars is None else f"{dollars:,.0f}",
    }
    return [(label, value) for label, value in facts.items() if value]
