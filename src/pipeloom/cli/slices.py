"""``pipeloom slices``: the fastest token slices of a run's sequences."""

import json
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.cli.reference import Command, all_but
from pipeloom.cli.run_config import PREDICTIONS, dtype_words, parse_config
from pipeloom.config import RunConfig
from pipeloom.planner.slice_lengths import SlicedStep, SlicePlan, plan_slices
from pipeloom.predict.describe import describe, described_problems
from pipeloom.terminal.words import count, format_bytes, unit_bytes
from pipeloom.workload.dtypes import dtype_of
from pipeloom.workload.limits import Common, Count


@dataclass(frozen=True, kw_only=True)
class Options(RunConfig):
    """Options of ``pipeloom slices``.

    Dynamic programming over lengths proposes slices, and simulation compares them with even slices and with whole
    sequences. layout.token_slices of a run file is not used.
    """

    unit: Common[Count | None] = None
    """Lengths are multiples of this many tokens. None: the smallest unit with at most 128 slices."""
    json: Common[bool] = False
    """Print JSON for programs: lengths, and the figures of each number of even slices."""


COMMAND = Command(
    name="slices",
    options=Options,
    examples={
        "pipeloom slices run.toml --unit 128": "lengths that are multiples of 128",
        "pipeloom slices --model.preset llama-3-8b --machine.cluster dgx-h100 --data.seq-len 8192": "",
    },
    settings=(*(name for name in PREDICTIONS if name != "layout"), *all_but("layout", "token_slices")),
    brief=("model", "data.seq_len", "layout", "machine"),
)


def run(words: list[str]) -> int:
    """Parse the configuration, choose, print."""
    options = parse_config(COMMAND, words, described_problems)
    plan = plan_config(options, options.unit)
    is_default = options.training.dtype is None
    print(json.dumps(to_json(plan) | {"has_default_dtype": is_default}) if options.json else _text(plan, is_default))
    return 0


def plan_config(config: RunConfig, unit: int | None = None) -> SlicePlan:
    """The slices of a configuration without problems.

    Raises:
        UserError: the unit does not fit, or cluster or program are unknown or wrong.
    """
    whole = replace(config, layout=replace(config.layout, token_slices=None))
    return plan_slices(describe(whole), whole.knobs(), unit)


def to_json(plan: SlicePlan) -> dict[str, Any]:
    """What ``--json`` prints, in SI units.

    Keys: ``lengths`` (tokens of each slice), ``dtype``, ``has_default_dtype``, ``formula_s`` (seconds of the
    pipeline by TeraPipe's formula),
    ``step_time_s``, ``pipeline_s``, ``bubble_fraction``, ``memory_bytes`` (of the fullest rank), and ``even``: for each
    number of even slices ``number`` and the same figures.
    """
    even = [{"number": len(one.lengths), **_figures(one)} for one in plan.even]
    return {"lengths": list(plan.lengths), "dtype": dtype_of(plan.step.run.precision), **_figures(plan), "even": even}


def _figures(one: SlicedStep) -> dict[str, float]:
    step, prediction = one.step, one.step.prediction
    return {
        "formula_s": one.formula_s,
        "step_time_s": prediction.step_time_s,
        "pipeline_s": prediction.pipeline_s,
        "bubble_fraction": step.bubble_fraction,
        "memory_bytes": prediction.memory.total_bytes,
    }


def _text(plan: SlicePlan, is_default: bool) -> str:
    run, choice = plan.step.run, plan.step.knobs.choice
    batch = f"{count(choice.num_microbatches, 'micro-batch')} of {run.micro_batch} x {run.seq} tokens"
    dtype = dtype_words(run.precision, is_default=is_default)
    rows = [(f"{len(one.lengths)} even", _figures(one)) for one in plan.even]
    rows.append((f"{len(plan.lengths)} chosen", _figures(plan)))
    unit = unit_bytes(max(figures["memory_bytes"] for _, figures in rows))
    where = f"{dtype}; {plan.step.cluster.name}, {plan.step.software.name}"
    device = plan.step.cluster.device.memory_bytes
    # A layout that fits no device still shows what slices do to its time.
    fits = "" if min(figures["memory_bytes"] for _, figures in rows) <= device else ", which none of these fits"
    chosen = f"--layout.token-slices {' '.join(map(str, plan.lengths))}"
    lines = [
        f"{choice.family}: {count(run.pp, 'pipeline rank')}, {batch}; {where}",
        "",
        f"{'slices':<10}{'formula':>12}{'pipeline':>12}{'step':>12}{'bubble':>9}{'memory':>12}",
        *(_line(name, figures, unit) for name, figures in rows),
        f"a device has {format_bytes(device)}{fits}",
        "",
        chosen if len(plan.lengths) > 1 else "whole sequences are fastest",
    ]
    return "\n".join(lines)


def _line(name: str, figures: dict[str, float], unit: tuple[float, str]) -> str:
    times = "".join(f"{figures[key] * 1e3:>9,.1f} ms" for key in ("formula_s", "pipeline_s", "step_time_s"))
    return f"{name:<10}{times}{figures['bubble_fraction']:>9.1%}{figures['memory_bytes'] / unit[0]:>9,.1f} {unit[1]}"
