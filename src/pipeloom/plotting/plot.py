"""``pipeloom.plot``: pictures of schedules, traces and predicted steps, in notebooks and files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeloom.calls import checked
from pipeloom.cost.costs import Costs
from pipeloom.errors import UserError
from pipeloom.plotting.timelines import plot_timelines, timelines_svg
from pipeloom.predict.step import SimulatedStep
from pipeloom.schedule import Schedule
from pipeloom.simulation import simulate
from pipeloom.terminal.notebook import Pictured
from pipeloom.terminal.words import count, unit_s
from pipeloom.trace import Trace

Drawable = Schedule | Trace | SimulatedStep


@dataclass(frozen=True, repr=False)
class Picture(Pictured):
    """Timelines below each other on one time axis.

    Attributes:
        panels: headline -> trace.
        unit: unit of the time axis.
        scale: units per second of the traces.
    """

    panels: Mapping[str, Trace]
    unit: str
    scale: float

    def save(self, *files: str | Path) -> None:
        """Write the picture to files; their endings select the formats: .png, .svg or .pdf.

        Raises:
            UserError: an ending is not supported, or a file cannot be written.
        """
        plot_timelines(self.panels, [Path(file) for file in files], unit=self.unit, scale=self.scale, is_whole=False)

    def __repr__(self) -> str:
        """Headlines of the panels."""
        return f"Picture({'; '.join(self.panels)})"

    def _repr_svg_(self) -> str:
        return timelines_svg(self.panels, unit=self.unit, scale=self.scale, is_whole=False)


@checked
def plot(what: Drawable | Mapping[str, Drawable], file: str | Path | None = None) -> Picture:
    """Draw timelines: a row for each pipeline rank, a color for each kind of action, the micro-batch in each box.

    Schedules are simulated with 1 unit of time for a micro-batch's forward on all stages of a rank together and 2 for
    its backward, so that schedules with different numbers of stages have the same work. Of more than 16 ranks or 3,000
    compute actions only the first are drawn, and the headline has a note. It also has the bubble of the whole step.

    Examples:
        >>> from pipeloom import make_schedule, plot
        >>> orders = {
        ...     "1F1B": make_schedule("1f1b", pp=4, num_microbatches=8),
        ...     "breadth-first": make_schedule("breadth-first", pp=4, loops=2, num_microbatches=8),
        ... }
        >>> plot(orders)
        Picture(1F1B; breadth-first)
        >>> plot(orders).save("orders.svg")  # doctest: +SKIP

    Args:
        what: a schedule, a trace or a predicted step; or headline -> one of these, for panels below each other.
        file: to write: .png, .svg or .pdf; ``None`` for none.

    Returns:
        The picture; a notebook shows it, and ``save`` writes it.

    Raises:
        UserError: there is nothing to draw; schedules are mixed with traces, whose units differ; or the file cannot be
            written.
    """
    named = what if isinstance(what, Mapping) else {"": what}
    if not named:
        raise UserError("expected at least one schedule or trace to plot, found none")
    are_schedules = {isinstance(one, Schedule) for one in named.values()}
    if len(are_schedules) > 1:
        raise UserError(
            "expected schedules or traces to plot, found both, whose clocks differ; pass pipeloom.simulate(schedule, "
            "costs) in place of the schedules"
        )
    panels = {title or _title(one): _trace(one) for title, one in named.items()}
    if are_schedules == {True}:
        unit_seconds, unit = 1.0, "forwards of a rank"
    else:
        unit_seconds, unit = unit_s(max(trace.end_s - trace.start_s for trace in panels.values()))
    picture = Picture(panels, unit, 1 / unit_seconds)
    if file is not None:
        picture.save(file)
    return picture


def _trace(what: Drawable) -> Trace:
    if isinstance(what, Schedule):
        part = what.num_ranks / what.num_stages / what.num_slices
        return simulate(what, Costs(forward_s=part, backward_s=2 * part))
    return what if isinstance(what, Trace) else what.trace


def _title(what: Drawable) -> str:
    if isinstance(what, Schedule):
        return (
            f"{count(what.num_stages, 'stage')} on {count(what.num_ranks, 'pipeline rank')}, "
            f"{count(what.num_microbatches, 'micro-batch')}"
        )
    if isinstance(what, Trace):
        return f"a step on {count(what.num_ranks, 'pipeline rank')}"
    return f"{what.knobs.choice.family}, predicted on {what.cluster.name}"
