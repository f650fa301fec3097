"""Text output of ``pipeloom tradeoff``."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from pipeloom.cli.goals import choice_lines, cost_cells
from pipeloom.cli.layout_tables import legend, short_cells, table_of_cells
from pipeloom.cli.plan_layouts import settings_words
from pipeloom.cli.plan_text import program_words
from pipeloom.cli.run_config import dtype_words
from pipeloom.planner.comparison import without_pipeline
from pipeloom.planner.error_bar import error_bar
from pipeloom.planner.goals import Goal
from pipeloom.planner.tradeoff import DATA_PARALLEL, Curves, Point
from pipeloom.terminal.console import hanging, table
from pipeloom.terminal.sections import Section, print_sections
from pipeloom.terminal.words import in_dollars

_INDENT = 10


def print_curves(curves: Curves, goal: Goal | None, sources: Mapping[str, str]) -> None:
    """Print the question, the best of each cluster, the days and dollars of each method, and what a goal chooses.

    Args:
        curves: the answer.
        goal: of the training.
        sources: name of a line of the question -> where its default is from.
    """
    lines = {name: f"{text}{sources.get(name, '')}" for name, text in _question_lines(curves)}
    print(hanging("\n".join(f"{name:<{_INDENT}}{text}" for name, text in lines.items()), _INDENT))
    print()
    print_sections(_sections(curves, goal))


def _question_lines(curves: Curves) -> Iterator[tuple[str, str]]:
    inputs, training = curves.inputs, curves.inputs.training
    question, price = inputs.question, inputs.question.cluster.price_per_device_hour
    programs = dict.fromkeys(software.name for software in inputs.methods.values())
    by_method = ", ".join(f"{method} by {software.name}" for method, software in inputs.methods.items())
    dtype = dtype_words(question.precision, is_default=question.has_default_dtype)
    yield "model", f"{question.shape.name}, sequences of {question.seq:,} tokens, {dtype}"
    cost = "without a price (--price)" if price is None else f"at {in_dollars(price)} per device-hour"
    yield "cluster", f"{question.cluster.name} {cost}"
    yield "program", by_method if len(programs) > 1 else program_words(inputs.question)
    yield "tokens", f"{training.tokens:.4g} with small batches, times 1 + B / B_crit"
    yield "B_crit", f"{training.critical_batch:,.0f} sequences"
    scaled = f"searched on {question.num_devices:,} devices, scaled by the data axis and simulated again"
    yield "layouts", "searched on every cluster" if inputs.searches_every_size else scaled


def _sections(curves: Curves, goal: Goal | None) -> Iterator[Section]:
    question = curves.inputs.question
    rows = _best_table(curves)
    key = (
        f"{legend(rows, question)} {_at_reference(curves)}: MFU of the method on {question.num_devices:,} devices with "
        "that batch per device."
    )
    head = "The best method of each cluster size (* on the Pareto front)"
    yield Section(head, parts=[rows, key], is_wide=True)
    unit = "device-hours" if question.cluster.price_per_device_hour is None else "dollars"
    head = f"Days and {unit} of each method at its own best batch"
    yield Section(head, parts=[_method_table(curves), [*_notes(curves)]], is_wide=True)
    if goal is not None:
        cluster, methods = question.cluster, curves.inputs.methods
        lines = choice_lines(
            goal, curves.points, _name, lambda one: error_bar(cluster, methods[one.method]).of(one.step.run)
        )
        yield Section("Goal", parts=[lines])


def _name(point: Point) -> str:
    """A point in a goal's sentence."""
    step, run = point.step, point.step.run
    parts = [f"{point.num_devices:,} devices of {step.cluster.name}", settings_words(step)]
    if point.method == DATA_PARALLEL:  # there is no schedule among the settings
        parts.insert(1, without_pipeline(run))
    return ", ".join([*parts, f"batch {run.global_batch:,}"])


def _at_reference(curves: Curves) -> str:
    """Title of the column of the MFU on the reference."""
    return f"MFU at {curves.inputs.question.num_devices}"


def _best_table(curves: Curves) -> Table:
    front = {id(point) for point in curves.front}
    rows: dict[str, dict[str, str]] = {}
    for count in curves.inputs.device_counts:
        point = curves.best(count)
        if point is not None:
            cells, reference = short_cells(point.step), point.reference_mfu
            rows[f"{count:,}{'*' if id(point) in front else ''}"] = {
                "method": cells.pop("schedule"),
                **cells,
                "batch": f"{point.step.run.global_batch:,}",
                "MFU": f"{point.step.mfu:.1%}",
                _at_reference(curves): "-" if reference is None else f"{reference:.1%}",
                **cost_cells(point),
            }
    return table_of_cells("devices", rows, texts=["method"])


def _method_table(curves: Curves) -> Table:
    methods = list(curves.inputs.methods)
    rows = table("devices", methods)
    for count in curves.inputs.device_counts:
        found = (curves.best(count, method) for method in methods)
        costs = (["-"] if point is None else cost_cells(point).values() for point in found)
        cells = (" ".join(cell for cell in each if len(each) == 1 or cell != "-") for each in costs)
        rows.add_row(f"{count:,}", *cells)
    return rows


def _notes(curves: Curves) -> Iterator[str]:
    """Where more batches may be better, and what fits nowhere."""
    inputs = curves.inputs
    batches = inputs.batches_per_device
    ends = {max(batches): "largest", min(batches): "smallest"} if len(batches) > 1 else {}
    for batch, end in ends.items():
        counts = [
            f"{count:,}"
            for count in inputs.device_counts
            if (point := curves.best(count)) is not None and point.batch_per_device == batch
        ]
        if counts:
            yield (
                f"on {', '.join(counts)} devices the best batch is the {end} that was tried, {float(batch):g} per "
                "device; set others with --batch-per-device"
            )
    if curves.unproved:
        tried = len(inputs.methods) * len(batches)
        yield (
            f"the time limit ended {len(curves.unproved)} of the searches for {tried} methods and batches; a larger "
            "--budget-s may find faster layouts"
        )
    for method in inputs.methods:
        missing = [f"{float(batch):g}" for name, batch in curves.missing if name == method]
        if missing:
            yield f"{method}: nothing fits the reference with a batch per device of {', '.join(missing)}"
