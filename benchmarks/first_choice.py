"""How much slower than the fastest measured layout the first row of a plan is: the regret of its order.

Run by ``make first-choice TABLES="measured.csv modern.csv"``. A group has the measured layouts of one model, batch and
number of devices. Of those that leave the headroom by prediction, the order of ``planner/choice.py`` chooses one. Its
measured step time over that of the fastest measured layout of the group - 1 is the regret. The last lines compare with
the fastest of those that leave the headroom: the regret of the order alone, without the price of the headroom. Rows
that differ in nothing that a plan chooses, such as with and without torch.compile, are one layout with the mean of
their times. Left out are disturbed runs, and sets whose "measurements" are sums of a simulator
(``Software.is_composed``).
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

from held_out import tables_in
from pipeloom.accuracy.compare import Outcome, compare
from pipeloom.accuracy.programs import known_cluster, program_of
from pipeloom.accuracy.rows import Group, read_rows
from pipeloom.accuracy.schedules import FAMILY_OF
from pipeloom.planner.choice import SIMPLER, choice_order
from pipeloom.planner.comparison import Alternative
from pipeloom.planner.error_bar import error_bar
from pipeloom.planner.question import HEADROOM
from pipeloom.workload.run import Run

MARGINS = (0.0, SIMPLER, 0.01, 0.02, 0.03, 0.05, 0.1)
COMPARED = (
    (0.0, False, "0% free"),
    (HEADROOM, False, f"{HEADROOM:.0%} free"),
    (HEADROOM, True, f"{HEADROOM:.0%} free, of these"),
)
"""Headroom, whether the fastest is one of the layouts that leave it, and the title of a line."""


@dataclass(frozen=True)
class Measured:
    """A group of measured layouts with their predictions.

    Attributes:
        group: what they have in common.
        layouts: the measured rows of each layout.
        tie: error of a comparison for the program on the device.
    """

    group: Group
    layouts: Sequence[Sequence[Outcome]]
    tie: float

    def regret(self, headroom: float, margin: float | None, *, of_fitting: bool = False) -> float | None:
        """Regret of the first choice; ``None`` if nothing leaves the headroom.

        Args:
            headroom: fraction of the memory that stays free.
            margin: by how much a simpler layout may be slower, a fraction; ``None``: the error of a comparison.
            of_fitting: whether to compare with the fastest layout that leaves the headroom: the regret of the order
                alone; otherwise with the fastest of all, which adds the price of the headroom.
        """
        fitting = [rows for rows in self.layouts if rows[0].filled <= 1 - headroom]
        if not fitting:
            return None
        kinds = [Alternative(*_layout(rows[0]), "none", rows[0].filled) for rows in fitting]
        times_s = [rows[0].step_time_s for rows in fitting]
        first = choice_order(times_s, kinds, self.tie if margin is None else margin)[0]
        return _seconds(fitting[first]) / min(map(_seconds, fitting if of_fitting else self.layouts)) - 1


def _layout(outcome: Outcome) -> tuple[Run, str]:
    """What a plan chooses of a row."""
    run = outcome.row.run
    # A table may have sequence parallelism of one tensor rank, which is none.
    run = run.changed(sequence_parallel=run.sequence_parallel and run.tp > 1)
    return run, FAMILY_OF.get(outcome.row.schedule, "1f1b")


def _seconds(rows: Sequence[Outcome]) -> float:
    return fmean(one.row.step_time_s for one in rows if one.row.step_time_s is not None)


def measured_groups(tables: Sequence[Path], sets: Sequence[str] = ()) -> Iterator[Measured]:
    """Groups of at least two undisturbed measured layouts.

    Args:
        tables: of measurements.
        sets: beginnings of the names of the sets; empty for all.
    """
    rows = [row for table in tables for row in read_rows(table) if row.set_name.startswith(tuple(sets or ("",)))]
    found: dict[Group, list[Outcome]] = defaultdict(list)
    for one in compare(row for row in rows if not program_of(row)[1].is_composed).undisturbed.outcomes:
        if one.error is not None:
            found[one.row.group].append(one)
    for group, outcomes in found.items():
        layouts = defaultdict[tuple[Run, str], list[Outcome]](list)
        for one in outcomes:
            layouts[_layout(one)].append(one)
        if len(layouts) > 1:
            program = program_of(outcomes[0].row)[1]
            cluster = known_cluster(outcomes[0].row, program)
            assert cluster is not None, "the row was predicted"
            yield Measured(group, list(layouts.values()), error_bar(cluster, program).tie)


def mean_regret(
    groups: Sequence[Measured], headroom: float, margin: float | None, *, of_fitting: bool = False
) -> float:
    """Mean over the groups in which something leaves the headroom; not a number without such a group."""
    found = (one.regret(headroom, margin, of_fitting=of_fitting) for one in groups)
    regrets = [regret for regret in found if regret is not None]
    return fmean(regrets) if regrets else nan


def main() -> int:
    """Print a table of the mean regrets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--sets", nargs="*", default=(), help="beginnings of the names of sets; default: all")
    given = parser.parse_args()
    groups = list(measured_groups(tables_in(given.tables), given.sets))
    layouts = sum(len(one.layouts) for one in groups)
    print(f"{len(groups)} groups, {layouts} layouts; a plan prefers a simpler layout within {SIMPLER:.1%}")
    names = ["fastest" if not margin else f"within {margin:.1%}" for margin in MARGINS]
    print(f"{'mean regret':46}" + "".join(f"{name:>12}" for name in [*names, "tie"]))
    sets = defaultdict[str, list[Measured]](list)
    for one in groups:
        sets[one.group.set_name].append(one)
    for headroom, of_fitting, compared in COMPARED:
        for name, part in {"all": groups, **sets}.items():
            regrets = (mean_regret(part, headroom, margin, of_fitting=of_fitting) for margin in (*MARGINS, None))
            cells = "".join(f"{regret:12.1%}" for regret in regrets)
            print(f"{f'{compared}, {name[:24]} ({len(part)})':46}{cells}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
