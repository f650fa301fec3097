"""The answer of ``pipeloom tradeoff`` for people."""

from rich.console import Console
from rich.table import Table

from pipeloom.cli.run_config import dtype_words
from pipeloom.planner.tradeoff import Curves, Point
from pipeloom.terminal.console import headed, print_table, table, wide_console


def print_curves(curves: Curves, *, has_default_batch: bool) -> None:
    """Print the question, the best of each cluster, and the days and dollars of each method.

    Args:
        curves: the answer.
        has_default_batch: whether the critical batch is that of the published fit.
    """
    console = wide_console()
    _print_headline(console, curves, has_default_batch=has_default_batch)
    for title, rows in (
        ("The best method of each cluster size (* on the Pareto front)", _best_table(curves)),
        ("Days and dollars of each method at its own best batch", _method_table(curves)),
    ):
        console.print(headed(f"\n{title}"))
        print_table(console, rows)
    console.print(
        "layout: tensor/pipeline/data ranks, loops, micro-batches x their sequences, what is sharded, +what is "
        f"recomputed\non {curves.inputs.question.num_devices}: MFU of the method with that batch per device"
    )
    _print_notes(console, curves)


def _print_headline(console: Console, curves: Curves, *, has_default_batch: bool) -> None:
    inputs, training = curves.inputs, curves.inputs.training
    question = inputs.question
    source = " (a fit to small models, arXiv 2001.08361)" if has_default_batch else ""
    programs = {software.name for software in inputs.methods.values()}
    trained = programs.pop() if len(programs) == 1 else None
    by_method = ", ".join(f"{method} by {software.name}" for method, software in inputs.methods.items())
    lines = {
        "model": f"{question.shape.name}, sequences of {question.seq:,} tokens, "
        + dtype_words(question.precision, is_default=question.has_default_dtype),
        "cluster": f"{question.cluster.name} at {dollars(training.price_per_device_hour)} for a device and hour",
        "program": trained or by_method,
        "tokens": f"{training.tokens:.4g} with small batches, times 1 + B / B_crit",
        "B_crit": f"{training.critical_batch:,.0f} sequences{source}",
        "layouts": "searched on every cluster"
        if inputs.searches_every_size
        else f"searched on {question.num_devices:,} devices, scaled by the data axis and simulated again",
    }
    for name, text in lines.items():
        console.print(f"{name:<10}{text}")


def _best_table(curves: Curves) -> Table:
    reference = f"on {curves.inputs.question.num_devices}"
    columns = ("method", "layout", "batch", "MFU", reference, "days", "dollars")
    rows = table("devices", columns, texts=["method", "layout"])
    front = {id(point) for point in curves.front}
    for count in curves.inputs.device_counts:
        point = curves.best(count)
        if point is not None:
            rows.add_row(
                f"{count:,}{'*' if id(point) in front else ''}",
                point.method,
                layout(point),
                f"{point.run.global_batch:,}",
                f"{point.mfu:.1%}",
                "-" if point.reference_mfu is None else f"{point.reference_mfu:.1%}",
                days(point.days),
                dollars(point.dollars),
            )
    return rows


def _method_table(curves: Curves) -> Table:
    methods = list(curves.inputs.methods)
    rows = table("devices", methods)
    for count in curves.inputs.device_counts:
        found = (curves.best(count, method) for method in methods)
        cells = ("-" if point is None else f"{days(point.days)} {dollars(point.dollars)}" for point in found)
        rows.add_row(f"{count:,}", *cells)
    return rows


def layout(point: Point) -> str:
    """Axes, loops, micro-batches and sharding in one word each."""
    run = point.run
    recompute = "some" if run.recompute_layers else run.recompute
    again = "" if recompute == "none" else f" +{recompute}"
    shard = "" if run.shard == "none" else f" {run.shard}"
    return f"{run.tp}/{run.pp}/{run.dp} {run.loops} {run.num_microbatches}x{run.micro_batch}{shard}{again}"


def days(value: float) -> str:
    """With three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def dollars(value: float) -> str:
    """Three digits, in thousands or millions where it is as much."""
    scale, letter = next(pair for pair in ((1e6, "M"), (1e3, "k"), (0.0, "")) if value >= pair[0])
    return f"${value / (scale or 1):.3g}{letter}"


def _print_notes(console: Console, curves: Curves) -> None:
    ends = {max(curves.inputs.batches_per_device): "largest", min(curves.inputs.batches_per_device): "smallest"}
    for batch, end in ends.items():
        counts = [
            f"{count:,}"
            for count in curves.inputs.device_counts
            if (point := curves.best(count)) is not None and point.batch_per_device == batch
        ]
        if counts:
            console.print(
                f"on {', '.join(counts)} devices the best batch is the {end} that was tried, {float(batch):g} for each "
                "device: --batch-per-device takes others"
            )
    for method in curves.inputs.methods:
        batches = [f"{float(batch):g}" for missing, batch in curves.missing if missing == method]
        if batches:
            console.print(f"{method}: nothing fits the reference with a batch per device of {', '.join(batches)}")
