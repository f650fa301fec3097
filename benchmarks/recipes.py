"""Published trainings beside plans for them: writes docs/recipes.md.

Run by ``make recipes``. For each training of ``recipes.toml``: the published step beside the predicted one of the same
layout, and where that layout is among all that the same program can run there.
"""

import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeloom.catalog import load_cluster, load_model
from pipeloom.cli.plan_layouts import settings_words
from pipeloom.cost.flops import hardware_flops, shape_model_flops
from pipeloom.cost.what_if import changed
from pipeloom.planner.choice import in_order
from pipeloom.planner.comparison import CAUSES, main_cause
from pipeloom.planner.error_bar import error_bar
from pipeloom.planner.plan import make_question, plan
from pipeloom.planner.question import Question
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.model import ModelShape

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "recipes.md"
LAYOUTS = 20
"""Kinds of layouts among which the published axes are looked for."""


@dataclass(frozen=True)
class Row:
    """A training and its plan.

    Attributes:
        recipe: as in the file.
        published_s: seconds of a step.
        published_mfu: by the formula of this project.
        same: the predicted step of the published layout; ``None`` if it does not fit.
        best: the fastest predicted step; ``None`` if nothing fits.
        first: row 1 of the plan.
        rank: place of the published axes among all, from 1; ``None`` beyond ``LAYOUTS``.
        tie: the error of a comparison, a fraction.
        seconds: of the search.
    """

    recipe: Mapping[str, Any]
    published_s: float
    published_mfu: float
    same: SimulatedStep | None
    best: SimulatedStep | None
    first: SimulatedStep | None
    rank: int | None
    tie: float
    seconds: float

    @property
    def error(self) -> float | None:
        """Predicted / published step time of the same layout - 1."""
        return None if self.same is None else self.same.prediction.step_time_s / self.published_s - 1

    @property
    def behind(self) -> float | None:
        """By how much the published layout is slower than the fastest one, by prediction."""
        if self.same is None or self.best is None:
            return None
        return self.same.prediction.step_time_s / self.best.prediction.step_time_s - 1


def shape_of(recipe: Mapping[str, Any]) -> ModelShape:
    """The sizes of the model: GPT's, but for what the recipe states."""
    if "model" in recipe:
        return load_model(recipe["model"], recipe["seq"])
    sizes = recipe["shape"]
    own = {"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"], "family": "gpt2"}
    return ModelShape(**(own | sizes), name=recipe["name"])


def question_of(recipe: Mapping[str, Any], **limits: Any) -> Question:
    """The question that the training answered."""
    axes, machine = recipe["layout"], dict(recipe["run"])
    cluster = load_cluster(machine.pop("cluster"))
    if "inter_bandwidth" in recipe:
        cluster = changed(cluster, {"inter_bandwidth": recipe["inter_bandwidth"]})
    return make_question(
        shape_of(recipe),
        cluster,
        num_devices=axes["tp"] * axes["pp"] * axes["dp"],
        global_batch=recipe["batch"],
        seq=recipe.get("seq", 2048),
        **machine,
        **limits,
    )


def row_of(recipe: Mapping[str, Any]) -> Row:
    """Plan a training twice: with the published layout, and freely."""
    begin = time.perf_counter()
    free = question_of(recipe)
    # The training ran, whatever the headroom.
    same = plan(question_of(recipe, headroom=0.0, **{name: (one,) for name, one in recipe["layout"].items()}), 1)
    answer = plan(free, LAYOUTS, explains=False)
    seen = list(dict.fromkeys(_axes(step) for step in answer.steps))
    axes = tuple(recipe["layout"][name] for name in ("tp", "pp", "dp"))
    flops = shape_model_flops(free.shape, free.seq)
    step_tokens = free.global_batch * free.seq
    published_s = recipe.get("seconds") or _published_s(recipe, free)
    peak = free.cluster.peak_flops_per_s(free.num_devices, free.precision)
    bar = error_bar(free.cluster, free.software)
    return Row(
        recipe=recipe,
        published_s=published_s,
        published_mfu=flops * step_tokens / published_s / peak,
        same=same.best,
        best=answer.best,
        first=in_order(answer.steps, bar)[0] if answer.steps else None,
        rank=seen.index(axes) + 1 if axes in seen else None,
        tie=bar.tie,
        seconds=time.perf_counter() - begin,
    )


def _axes(step: SimulatedStep) -> tuple[int, int, int]:
    return step.run.tp, step.run.pp, step.run.dp


def _published_s(recipe: Mapping[str, Any], question: Question) -> float:
    """Seconds of a step from published FLOP/s of a device."""
    shape, seq = question.shape, question.seq
    with_again = hardware_flops(shape, seq, recipe["layout"].get("recompute", "none"))
    flops = with_again if recipe["counts"] == "hardware" else shape_model_flops(shape, seq)
    return flops * question.global_batch * seq / (recipe["tflops"] * 1e12 * question.num_devices)


def main() -> None:
    """Plan all trainings, print a line for each, write the page."""
    recipes = tomllib.loads((HERE / "recipes.toml").read_text(encoding="utf-8"))["recipe"]
    rows = []
    for recipe in recipes:
        rows.append(row_of(recipe))
        print(" | ".join(_cells(rows[-1])), f"({rows[-1].seconds:.0f} s)", flush=True)
    PAGE.write_text("\n".join(_page(rows)) + "\n", encoding="utf-8")
    print(f"written: {PAGE}")


HEADS = (
    "training",
    "devices",
    "tp / pp / dp",
    "published step",
    "MFU",
    "predicted",
    "error",
    "rank",
    "slower than the fastest",
    "row 1 of the plan",
)


def _cells(row: Row) -> list[str]:
    axes, first = row.recipe["layout"], row.first
    behind = row.behind
    return [
        row.recipe["name"],
        f"{axes['tp'] * axes['pp'] * axes['dp']:,}",
        f"{axes['tp']} / {axes['pp']} / {axes['dp']}",
        f"{row.published_s:.2f} s",
        f"{row.published_mfu:.1%}",
        "does not fit" if row.same is None else f"{row.same.prediction.step_time_s:.2f} s",
        "-" if row.error is None else f"{row.error:+.1%}",
        f"> {LAYOUTS}" if row.rank is None else str(row.rank),
        "-" if behind is None else f"{behind:+.1%}{' ~' if behind < row.tie else ''}",
        "nothing fits" if first is None else f"{' / '.join(map(str, _axes(first)))}, {first.mfu:.1%}",
    ]


def _page(rows: list[Row]) -> Iterator[str]:
    errors = [abs(row.error) for row in rows if row.error is not None]
    ties = sum(row.behind is not None and row.behind < row.tie for row in rows)
    yield _HEAD.format(rows=len(rows), errors=len(errors), error=f"{fmean(errors):.1%}", ties=ties)
    yield f"| {' | '.join(HEADS)} |"
    yield f"|{'---|' * len(HEADS)}"
    for row in rows:
        yield f"| {' | '.join(_cells(row))} |"
    yield _KEY
    for row in rows:
        if row.same is not None and row.best is not None and row.behind is not None and row.behind >= row.tie:
            cause = main_cause(row.same, row.best)
            mainly = "" if cause is None else f"; mainly less {CAUSES[cause]}"
            yield f"- {row.recipe['name']}: {settings_words(row.best, row.same)}{mainly}."
    yield _WHY
    for row in rows:
        note = f"; {row.recipe['note']}" if "note" in row.recipe else ""
        yield f"- {row.recipe['name']}: {row.recipe['source']}{note}. Program: `{row.recipe['run']['software']}`."


_HEAD = """# Published trainings, planned

{rows} published trainings of dense models beside what `pipeloom plan` finds for the same model, batch, machine and
program. `make recipes` writes this page; the inputs are in `benchmarks/recipes.toml`.

The predicted step of the published layout is off by {error} on average ({errors} trainings). In {ties} of {rows} the
published layout and the fastest one differ by less than the error of a comparison (~).
"""
_KEY = f"""
Published step: as stated, or from the stated TFLOP/s. MFU: model FLOPs of that step by the formula of this project, so
that rows can be compared; sources use others. Predicted: the step of the published layout without headroom, with the
planner's choice of what the source does not state. Rank: place of the published tp, pp and dp among the axes of the
{LAYOUTS} best kinds of layouts. Slower than the fastest: by prediction; below 0 where only the headroom of the plan
excludes the published layout. Row 1: tp, pp, dp and MFU of the fastest layout, or of a simpler one within 0.5 %.

## Where the plan differs

For each training whose layout is slower than the fastest one by more than the error of a comparison: in what the
fastest one differs, and the largest part of its advantage.
"""
_WHY = """
The trainings of 2021 and 2022 recompute all layers without sequence parallelism. Selective recomputation and sequence
parallelism were published in 2022 (arXiv 2205.05198), as about 30 % faster. The plan uses them, since the programs of
the catalog have them.

## Sources

The rows of BLOOM, torchtitan, NeMo and llm-foundry repeat files that their authors published. The others were written
down from the papers, and were not compared with a second source except for the seconds of MT-NLG.
"""


if __name__ == "__main__":
    main()
