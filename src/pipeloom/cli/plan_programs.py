"""``pipeloom plan --for any``: the best layout of each program that can start it."""

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from pipeloom.cli.plan_text import figure_cells, layout_cells, table_of_cells, training_words
from pipeloom.errors import ConfigError
from pipeloom.planner.error_bar import ErrorBar
from pipeloom.planner.plan import Plan, plan
from pipeloom.terminal.console import headed, print_table, wide_console
from pipeloom.terminal.words import unit_bytes, unit_s
from pipeloom.workload.launchers import LAUNCHERS, LauncherName

if TYPE_CHECKING:
    from pipeloom.cli.plan import Options, Request

Answers = Mapping[LauncherName, Plan | ConfigError]


def run_each(options: "Options", requests: "Mapping[LauncherName, Request | ConfigError]") -> int:
    """Plan for each program, print the best layout of each; returns 1 if nothing fits any, 130 after Ctrl-C.

    A time limit is that of the whole answer: each program has an equal share of what is left.
    """
    from pipeloom.cli.plan_progress import PlanProgress

    begin, left = time.monotonic(), sum(not isinstance(one, ConfigError) for one in requests.values())
    answers: dict[LauncherName, Plan | ConfigError] = {}
    tokens: float | None = None
    for name, request in requests.items():
        if isinstance(request, ConfigError):
            answers[name] = request
            continue
        tokens = request.tokens
        budget = options.budget_s and max(0.1, options.budget_s - (time.monotonic() - begin)) / left
        left -= 1
        with PlanProgress(is_shown=not options.json) as progress:
            # A table of one row for each program has no reasons.
            answer = plan(request.question, options.best, budget_s=budget, explains=False, progress=progress.show)
        answers[name] = answer
        if answer.stopped == "interrupt":
            break
    _print(answers, tokens, is_json=options.json)
    plans = [one for one in answers.values() if isinstance(one, Plan)]
    if any(one.stopped == "interrupt" for one in plans):
        return 130
    return 0 if any(one.best is not None for one in plans) else 1


def _print(answers: Answers, tokens: float | None, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps({"for": {name: _to_json(one, tokens) for name, one in answers.items()}}))
        return
    console = wide_console(120)
    console.print(headed("The best layout for each program that can start it"))
    found = {name: one for name, one in answers.items() if isinstance(one, Plan) and one.best is not None}
    if found:
        print_table(wide_console(), _table(found))
    console.print(
        "error: mean error of comparable step times; ?: none was measured on these devices, of the worst other."
    )
    for name, one in answers.items():
        title = LAUNCHERS[name].title
        if isinstance(one, ConfigError):
            console.print(f"- {title} cannot run it: {'; '.join(one.problems)}")
            continue
        if one.best is None:
            console.print(f"- {title}: nothing fits.")
            continue
        console.print(f"- {title}: {one.error_bar.sentences[0]}")
        if tokens is not None:
            console.print(f"  {training_words(one.rows[0], tokens, 'this layout')}")
    console.print("\nNext: `--for` with one of the names prints its alternatives, and --export writes its start files.")


def _table(found: Mapping[LauncherName, Plan]) -> Table:
    plans = list(found.values())
    unit = unit_s(min(one.rows[0].prediction.step_time_s for one in plans))
    memory = unit_bytes(plans[0].question.cluster.device.memory_bytes)
    rows: dict[str, dict[str, str]] = {}
    for name, one in found.items():
        step_time, *others = figure_cells(one.rows[0], unit, memory).items()
        rows[name] = {**layout_cells(one.rows[0]), **dict([step_time, ("error", _error(one.error_bar)), *others])}
    return table_of_cells("for", rows)


def _error(bar: ErrorBar) -> str:
    return f"{bar.tie:.0%}?" if bar.errors is None else f"{bar.errors.mean_abs_error:.0%}"


def _to_json(answer: Plan | ConfigError, tokens: float | None) -> dict[str, Any]:
    from pipeloom.cli.plan import to_json

    return {"refused": list(answer.problems)} if isinstance(answer, ConfigError) else to_json(answer, tokens)
