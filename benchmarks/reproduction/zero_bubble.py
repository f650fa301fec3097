"""Zero-bubble's published steps (arXiv 2401.10241), simulated with the seconds that its authors profiled.

The measured steps, and the profiled seconds of those that have some, are read from a table that is no part of the
repository. The bubbles are those of the paper's table 5, which its authors computed from the same seconds.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from pipeloom.accuracy.rows import Row as Measured
from pipeloom.accuracy.rows import read_rows
from pipeloom.accuracy.schedules import FAMILY_OF, pending_share, predict
from pipeloom.analysis.summary import longest_rank_s
from pipeloom.catalog import load_cluster, load_software
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.exchanges import step_terms
from pipeloom.cost.placed import Placed
from pipeloom.families import make_schedule
from pipeloom.families.greedy import INPUTS_BY_RANKS, Task, best_schedule
from pipeloom.passes import lower
from pipeloom.schedule import Placement, Schedule
from pipeloom.simulation import simulate
from pipeloom.workload.run import Run
from reproduction.machine import Row
from reproduction.tables import FOLDER, percent, table

PAGE = FOLDER / "zero_bubble.md"
TABLE = Path(__file__).parents[3] / "shared" / "data" / "measured.csv"
"""Of measured training steps, next to the repository."""
SET = "zero-bubble-2401.10241"
SOFTWARE, CLUSTER = load_software("zero-bubble"), load_cluster("dgx-a100")
FREE = replace(SOFTWARE, is_blocking=False)
"""Whose seconds of stages have no exchanges in them."""

BUBBLES: dict[tuple[str, int], tuple[float, ...]] = {
    ("gpt-1.5b", 24): (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    ("gpt-1.5b", 32): (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    ("gpt-1.5b", 64): (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    ("gpt-6.2b", 24): (0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    ("gpt-6.2b", 32): (0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022),
    ("gpt-6.2b", 64): (0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010),
}
"""Model and micro-batches -> published bubble of each of ``SCHEDULES``: the paper's table 5."""
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p")
MEASURED_SCHEDULES = ("1f1b", "interleaved", "zb-1p", "zb-2p")
LOOPS = {"gpt-1.5b": 3, "gpt-6.2b": 4}
READINGS = ("alike", "middle", "mean", "paced")
"""What the profiled seconds are taken for, see the page."""


class Profile(NamedTuple):
    """Profiled seconds: a stage's forward, both halves of its backward, a message."""

    forward_s: float
    input_s: float
    weight_s: float
    message_s: float

    @property
    def compute_s(self) -> float:
        """Of a micro-batch on a stage."""
        return self.forward_s + self.input_s + self.weight_s

    @classmethod
    def of_note(cls, note: str) -> "Profile | None":
        """From a row's note, which gives milliseconds; ``None`` if it has none."""
        found = [re.search(rf"\b{name}=([\d.]+)", note) for name in ("T_F", "T_B", "T_W", "T_comm")]
        values = [float(match[1]) / 1e3 for match in found if match]
        return cls(*values) if len(values) == len(found) else None


@dataclass(frozen=True)
class Case:
    """A measured step with the seconds of its stages.

    Attributes:
        run: what ran.
        schedule: in which schedule, by the table's name.
        measured_s: seconds of a step.
        memory_bytes: peak of the fullest device.
        profile: its own seconds, or those of a row with the same stages and micro-batches; ``None`` without one.
        is_own: whether they are its own.
        pace_s: seconds that a micro-batch more takes in the rows of 1F1B; ``None`` without such rows.
    """

    run: Run
    schedule: str
    measured_s: float
    memory_bytes: float
    profile: Profile | None
    is_own: bool
    pace_s: float | None


def cases() -> list[Case]:
    """Every row of the set; empty without the table."""
    if not TABLE.exists():
        return []
    rows = [row for row in read_rows(TABLE) if row.set_name == SET]
    profiles: dict[tuple[str, int, int], Profile] = {}
    for row in sorted(rows, key=lambda row: row.run.num_microbatches):
        own = Profile.of_note(row.note)
        if own:
            profiles.setdefault(_stages(row), own)
    paces = {stages: measured_pace_s([row for row in rows if _stages(row) == stages], "1f1b") for stages in profiles}
    return [_case(row, profiles.get(_stages(row)), paces.get(_stages(row))) for row in rows]


def _stages(row: Measured) -> tuple[str, int, int]:
    return row.run.shape.name, row.run.pp, row.run.micro_batch


def _case(row: Measured, profile: Profile | None, pace_s: float | None) -> Case:
    own = Profile.of_note(row.note)
    assert row.step_time_s is not None
    assert row.memory_bytes is not None
    return Case(row.run, row.schedule, row.step_time_s, row.memory_bytes, own or profile, own is not None, pace_s)


def measured_pace_s(rows: Sequence[Measured], schedule: str) -> float:
    """Seconds that a micro-batch more takes, from steps of 32 and of 64 micro-batches."""
    times = {row.run.num_microbatches: row.step_time_s or 0.0 for row in rows if row.schedule == schedule}
    return (times[64] - times[32]) / 32


@cache
def order_of(run: Run, schedule: str, profile: Profile) -> Schedule:
    """The schedule of a name; where authors search, as they do: for stages that all take the profiled seconds."""
    if schedule not in INPUTS_BY_RANKS:
        family = FAMILY_OF[schedule]
        return make_schedule(family, pp=run.pp, loops=run.loops, num_microbatches=run.num_microbatches)
    pp = run.pp
    task = Task(
        placement=Placement.looped(pp, 1),
        num_microbatches=run.num_microbatches,
        forward_s=[profile.forward_s] * pp,
        input_s=[profile.input_s] * pp,
        weight_s=[profile.weight_s] * pp,
        boundary_s=[profile.message_s] * (pp - 1),
        budgets=[float(INPUTS_BY_RANKS[schedule] * pp)] * pp,
        pending=[pending_share(run, SOFTWARE)] * pp,
    )
    return best_schedule(task, "rank", tries=0).schedule


def alike(run: Run, profile: Profile) -> StageCosts:
    """Every rank takes the profiled seconds, and messages none of them, as the paper computes its bubbles."""
    stages = run.pp * run.loops
    forward_s, weight_s = profile.forward_s / run.loops, profile.weight_s / run.loops
    backward_s = profile.input_s / run.loops + weight_s
    times = ((seconds,) * stages for seconds in (forward_s, backward_s))
    return StageCosts(*times, profile.message_s, weight_s=(weight_s,) * stages)


def uneven(run: Run, schedule: str, profile: Profile, reading: str) -> StageCosts:
    """Stages differ as in the cost model, and the middle one, or the mean, takes the profiled seconds.

    Where nothing is split exchanges block, as in Megatron-LM: half of a message with each action on either side.
    """
    whole = Placed(replace(run, loops=1), CLUSTER, FREE).costs
    modelled = [_parts(whole, stage) for stage in range(run.pp)]
    base = modelled[run.pp // 2] if reading == "middle" else [fmean(each) for each in zip(*modelled, strict=True)]
    own = Placed(run, CLUSTER, FREE).costs
    stages = run.pp * run.loops
    parts = [
        [profiled * seconds / of for profiled, seconds, of in zip(profile, _parts(own, stage), base, strict=False)]
        for stage in range(stages)
    ]
    is_blocking = schedule in ("1f1b", "interleaved")
    sides = [(stage > 0) + (stage < stages - 1) for stage in range(stages)]
    still_s = [profile.message_s * number / 2 * is_blocking for number in sides]
    return StageCosts(
        tuple(forward_s + more_s for (forward_s, _, _), more_s in zip(parts, still_s, strict=True)),
        tuple(input_s + weight_s + more_s for (_, input_s, weight_s), more_s in zip(parts, still_s, strict=True)),
        0.0 if is_blocking else profile.message_s,
        weight_s=tuple(weight_s for _, _, weight_s in parts),
    )


def _parts(costs: StageCosts, stage: int) -> list[float]:
    """Seconds of a stage's forward and of the halves of its backward."""
    half_s = costs.half_s(stage)
    return [costs.forward_s[stage], costs.backward_s[stage] - half_s, half_s]


def pipeline_s(run: Run, schedule: str, profile: Profile, costs: StageCosts) -> float:
    """Seconds from a rank's first action to its last, of the rank that takes longest."""
    order = order_of(run, schedule, profile)
    return longest_rank_s(simulate(lower(order) if costs.transfer_s else order, costs))


def paced(case: Case, profile: Profile) -> Profile:
    """The seconds by the one factor with which 1F1B, read as "middle", takes its measured pace."""
    runs = [replace(case.run, loops=1, global_batch=case.run.micro_batch * m) for m in (32, 64)]
    first_s, second_s = (pipeline_s(run, "1f1b", profile, uneven(run, "1f1b", profile, "middle")) for run in runs)
    messages_s = 2 * profile.message_s
    assert case.pace_s is not None
    factor = (case.pace_s - messages_s) / ((second_s - first_s) / 32 - messages_s)
    return Profile(*(factor * seconds for seconds in profile[:3]), profile.message_s)


def step_s(case: Case, reading: str) -> float | None:
    """Seconds of a step with the profiled seconds in one of the ``READINGS``; ``None`` without any."""
    run, profile = case.run, case.profile
    if profile is None:
        return None
    if reading == "alike":
        return pipeline_s(run, case.schedule, profile, alike(run, profile))
    if reading == "paced":
        profile, reading = paced(case, profile), "middle"
    costs = uneven(run, case.schedule, profile, reading)
    return (
        pipeline_s(run, case.schedule, profile, costs)
        + step_terms(Placed(run, CLUSTER, SOFTWARE), max(costs.backward_s)).total_s
    )


def step_row(case: Case) -> dict[str, str]:
    """A measured step, and what is simulated for it."""
    run, modelled = case.run, predict(Placed(case.run, CLUSTER, SOFTWARE), case.schedule).prediction
    return {
        "model": run.shape.name,
        "ranks": str(run.pp),
        "schedule": case.schedule,
        "loops": str(run.loops),
        "micro_batch": str(run.micro_batch),
        "micro_batches": str(run.num_microbatches),
        "profile": "" if case.profile is None else "own" if case.is_own else "same stages",
        "profile_s": "" if case.profile is None else f"{case.profile.compute_s:.6f}",
        "message_s": "" if case.profile is None else f"{case.profile.message_s:.6f}",
        "measured_s": f"{case.measured_s:.4f}",
        **{f"{reading}_s": _seconds(step_s(case, reading)) for reading in READINGS},
        "modelled_s": _seconds(modelled.step_time_s),
        "measured_gb": f"{case.memory_bytes / 1e9:.0f}",
        "modelled_gb": f"{modelled.memory.total_bytes / 1e9:.1f}",
    }


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def bubble_rows(found: Sequence[Case]) -> list[Row]:
    """For each profiled setting and schedule the bubble: published, and simulated as the paper computes it."""
    rows: list[Row] = []
    own = {(case.run.shape.name, case.run.num_microbatches): case for case in found if case.is_own}
    for setting, published in BUBBLES.items():
        case = own[setting]
        assert case.profile is not None
        for schedule, expected in zip(SCHEDULES, published, strict=True):
            loops = LOOPS[setting[0]] if schedule == "interleaved" else 1
            run = replace(case.run, loops=loops)
            rows.append(
                {
                    "model": setting[0],
                    "micro_batches": str(setting[1]),
                    "schedule": schedule,
                    **{name: f"{value:.6f}" for name, value in case.profile._asdict().items()},
                    "published": f"{expected:.4f}",
                    "simulated": f"{bubble(run, schedule, case.profile):.4f}",
                }
            )
    return rows


def bubble(run: Run, schedule: str, profile: Profile) -> float:
    """Part of the longest rank's time in which it does not compute, stages alike: the paper's section 5.3."""
    return 1 - run.num_microbatches * profile.compute_s / pipeline_s(run, schedule, profile, alike(run, profile))


# -------------------------------------------------------------------------------------------------------------- tables

PREDICTIONS = (*READINGS, "modelled")
Group = tuple[str, str, int]
"""Model, ranks, sequences of a step."""


def error(row: Row, name: str) -> float:
    """Predicted / measured - 1."""
    return float(row[f"{name}_s"]) / float(row["measured_s"]) - 1


def groups(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """Rows whose schedules compete."""
    found: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["model"], row["ranks"], int(row["micro_batch"]) * int(row["micro_batches"])].append(row)
    return {group: members for group, members in found.items() if len(members) > 1}


def swapped(rows: Sequence[Row], name: str) -> list[tuple[Row, Row]]:
    """Pairs that are predicted the other way round than they were measured, the one measured faster first."""
    pairs = (sorted(pair, key=lambda row: float(row["measured_s"])) for pair in combinations(rows, 2))
    return [
        (first, second)
        for first, second in pairs
        if float(first["measured_s"]) < float(second["measured_s"])
        and float(first[f"{name}_s"]) >= float(second[f"{name}_s"])
    ]


def zero_bubble_blocks(rows: Sequence[Row], bubbles: Sequence[Row]) -> dict[str, str]:
    """The tables of the page."""
    return {
        "bubbles": _bubbles(bubbles),
        "pace": _pace(rows),
        "readings": _readings(rows),
        "swapped": _swapped(rows),
        "memory": _memory(rows),
        "steps": _steps(rows),
    }


def _bubbles(bubbles: Sequence[Row]) -> str:
    found = {(row["model"], row["micro_batches"], row["schedule"]): row for row in bubbles}
    lines = []
    for model, count in BUBBLES:
        own = [found[model, str(count), schedule] for schedule in SCHEDULES]
        lines.append([model, str(count), *(f"{row['published']}, {row['simulated']}" for row in own)])
    return table(("model", "micro-batches", *SCHEDULES), lines)


def _pace(rows: Sequence[Row]) -> str:
    lines = []
    for model in LOOPS:
        own = [row for row in rows if row["model"] == model and row["profile"] == "own"]
        times = {(row["schedule"], row["micro_batches"]): float(row["measured_s"]) for row in own}
        pace_s = [(times[schedule, "64"] - times[schedule, "32"]) / 32 for schedule in MEASURED_SCHEDULES]
        (profile,) = {(float(row["profile_s"]), float(row["message_s"])) for row in own if row["micro_batches"] == "64"}
        known = [profile[0], profile[0] + 2 * profile[1]]
        lines.append([model, *(f"{1e3 * seconds:.1f}" for seconds in [*known, *pace_s])])
    head = ("model", "T_F + T_B + T_W, ms", "with two messages", *(f"{each}, measured" for each in MEASURED_SCHEDULES))
    return table(head, lines)


def _readings(rows: Sequence[Row]) -> str:
    lines = []
    for title, kinds in (("own", ("own",)), ("own or same stages", ("own", "same stages"))):
        lines += [_reading(title, name, [row for row in rows if row["profile"] in kinds]) for name in PREDICTIONS]
    lines.append(_reading("all rows", "modelled", rows))
    return table(
        ("rows with profile", "seconds", "rows", "mean", "bias", "largest", "within 3 %", "order right"), lines
    )


def _reading(title: str, name: str, rows: Sequence[Row]) -> list[str]:
    errors = [error(row, name) for row in rows]
    sizes = [abs(each) for each in errors]
    competing = groups(rows).values()
    right = sum(not swapped(members, name) for members in competing)
    shares = [_percent(fmean(sizes)), percent(fmean(errors)), percent(max(errors, key=abs))]
    within = f"{sum(size <= 0.03 for size in sizes)} of {len(sizes)}"
    return [title, name, str(len(rows)), *shares, within, f"{right} of {len(competing)}"]


def _percent(part: float) -> str:
    return f"{part:.1%}".replace("%", " %")


def _swapped(rows: Sequence[Row]) -> str:
    lines = []
    for (model, ranks, batch), members in groups(rows).items():
        for first, second in swapped(members, "modelled"):
            apart = [
                percent(float(second[f"{name}_s"]) / float(first[f"{name}_s"]) - 1) for name in ("measured", "modelled")
            ]
            lines.append([f"{model}, {ranks} ranks, {batch}", _short(first), _short(second), *apart])
    return table(("group", "faster", "slower", "apart, measured", "modelled"), lines)


def _short(row: Row) -> str:
    return f"{row['schedule']}, micro-batch {row['micro_batch']}"


def _memory(rows: Sequence[Row]) -> str:
    lines = []
    for schedule in (*MEASURED_SCHEDULES, "zb-v"):
        own = [row for row in rows if row["schedule"] == schedule]
        errors = [float(row["modelled_gb"]) / float(row["measured_gb"]) - 1 for row in own]
        within = f"{sum(abs(each) <= 0.05 for each in errors)} of {len(errors)}"
        lines.append([schedule, _percent(fmean(map(abs, errors))), percent(max(errors, key=abs)), within])
    return table(("schedule", "mean", "largest", "within 5 %"), lines)


def _steps(rows: Sequence[Row]) -> str:
    lines = [
        [
            row["model"],
            row["ranks"],
            _short(row),
            row["micro_batches"],
            row["measured_s"],
            *("" if not row[f"{name}_s"] else percent(error(row, name)) for name in PREDICTIONS),
            f"{row['measured_gb']}, {row['modelled_gb']}",
        ]
        for row in rows
    ]
    head = ("model", "ranks", "schedule", "micro-batches", "measured, s", *PREDICTIONS, "GB: measured, modelled")
    return table(head, lines)
