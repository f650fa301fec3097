"""``pipeloom families``: compares all families of schedules."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from pipeloom.analysis.comparison import MEMORY_UNIT, compare
from pipeloom.cli.flags import SOURCE, read_flags
from pipeloom.cli.reference import Command
from pipeloom.cost.costs import Costs
from pipeloom.errors import ConfigError, UserError
from pipeloom.families import FAMILIES, Choice, make_schedule
from pipeloom.passes import balance, offload
from pipeloom.schedule import Schedule
from pipeloom.terminal.console import Columns, print_table, table_of, wide_console
from pipeloom.terminal.words import count, percent
from pipeloom.workload.limits import Common, Count


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom families``.

    All stages are equally fast, and a backward takes twice the time of a forward.
    """

    pp: Common[Count] = 4
    """Pipeline-model-parallel size: pipeline ranks."""
    num_microbatches: Common[Count] = 8
    """Micro-batches of a step."""
    loops: Common[Count] = 2
    """Virtual stages on each pipeline rank, for schedules that allow several."""
    json: Common[bool] = False
    """Print JSON for programs."""


COMMAND = Command(
    name="families",
    options=Options,
    examples={"pipeloom families --pp 8 --num-microbatches 32 --loops 4": "8 ranks, 32 stages"},
)


MOST_ACTIONS = 200_000
"""Most forwards and backwards of a schedule: making and simulating all of that length takes half a minute of a core."""
SLICES = 4
"""Token slices of the rows that have some."""
LEGEND = (
    "overhead: bubble overhead, which is idle time / ideal time; own: the same between a rank's own first and last "
    f"action; memory: most that each rank holds, in {MEMORY_UNIT}; gathers: of sharded weights on the busiest rank, "
    "one stage gathered at once; messages: tensors that change rank; sent: what they carry, in micro-batches at the "
    "border of a stage; moves: transfers to a partner or the host and back; moved: what they carry, in units of "
    "the memory"
)


def run(words: list[str]) -> int:
    """Parse the arguments, make all schedules, print them."""
    options, problems = read_flags(COMMAND, words)
    sizes = {"pp": options.pp, "loops": options.loops, "num_microbatches": options.num_microbatches}
    problems += Choice(family="breadth-first", num_slices=SLICES, **sizes).problems()
    actions = 2 * options.pp * options.num_microbatches * options.loops
    if actions > MOST_ACTIONS:
        problems.append(
            f"the product of --pp, --num-microbatches and --loops must be at most {MOST_ACTIONS // 2:,}, found "
            f"{actions // 2:,}: each of {len(FAMILIES)} families would be simulated with {actions:,} actions; "
            "`pipeloom schedule FAMILY` makes a single schedule of any length"
        )
    if problems:
        raise ConfigError(problems, SOURCE)
    found = list(lines(options.pp, options.num_microbatches, options.loops))
    if options.json:
        print(json.dumps(found))
        return 0
    console = wide_console()
    ranks, microbatches = count(options.pp, "pipeline rank"), count(options.num_microbatches, "micro-batch")
    console.print(f"{ranks}, {microbatches}, equal stages, a backward takes two forwards")
    print_table(console, table_of({line["name"]: line for line in found}, COLUMNS, "family"))
    console.print(LEGEND, style="dim")
    return 0


def lines(pp: int, num_microbatches: int, loops: int, names: Collection[str] = FAMILIES) -> Iterator[dict[str, Any]]:
    """A record for each family, and for each pass over one that changes its memory.

    Args:
        pp: pipeline ranks.
        num_microbatches: micro-batches of a step.
        loops: stages on each pipeline rank, for families that take several.
        names: of the families, of which those that train have a line.

    Yields:
        ``name`` (of the family, with its passes), ``loops`` (stages on each rank), and what ``Comparison`` has.
    """
    for name, schedule in [*_schedules(pp, num_microbatches, loops, names), *_passes(pp, num_microbatches, loops)]:
        forward = 1 / schedule.num_slices
        costs = Costs(forward, 2 * forward, evict_s=forward, offload_s=forward)
        stages = schedule.num_stages // schedule.num_ranks
        yield {"name": name, "loops": stages, **asdict(compare(schedule, costs))}


def _schedules(pp: int, num_microbatches: int, loops: int, names: Collection[str]) -> Iterator[tuple[str, Schedule]]:
    for name, family in sorted(FAMILIES.items(), key=lambda item: (item[1].is_found, item[1].splits_backward)):
        if name not in names or not family.has_backward:
            continue
        own = family.loops or (loops if family.is_looped else 1)
        plain = Choice(family=name, pp=pp, num_microbatches=num_microbatches, loops=own)
        group_size = min(2 * pp, num_microbatches) if family.is_grouped and num_microbatches >= pp else None
        label = name if group_size is None else f"{name}, groups of {group_size}"
        try:
            yield label, Choice(**{**asdict(plain), "group_size": group_size}).make()
        except UserError as error:
            if error.family != name or not FAMILIES.leave_out(name, error):
                raise


def _passes(pp: int, num_microbatches: int, loops: int) -> Iterator[tuple[str, Schedule]]:
    """What passes make of two families, where they have anything to do. A swap takes as long as a forward."""
    sizes = {"pp": pp, "num_microbatches": num_microbatches}
    plain, wide = make_schedule("1f1b", **sizes), make_schedule("breadth-first", loops=loops, **sizes)
    kept = pp // 2 + 1
    if plain.peak_stage_inputs[0] > kept:
        yield "1f1b, balanced", balance(plain)
        yield f"1f1b, offloaded to {kept}", offload(plain, budget_bytes=[float(kept)] * pp)
        yield f"1f1b, {kept - 1} kept", make_schedule("1f1b", keep=(kept - 1,) * pp, **sizes)
    half = -(-num_microbatches * loops // 2)
    if half > 2:
        yield "breadth-first, offloaded", offload(wide, budget_bytes=[float(half)] * pp)
    yield f"1f1b, {SLICES} slices", make_schedule("1f1b", num_slices=SLICES, **sizes)
    yield f"breadth-first, {SLICES} slices", make_schedule("breadth-first", loops=loops, num_slices=SLICES, **sizes)


def by_rank(values: Sequence[float]) -> str:
    """Values by rank; at least three that fall or rise evenly by their ends: ``4…1`` is 4 3 2 1, ``2x4`` is 2 2 2 2."""
    texts: list[str] = []
    begin = 0
    while begin < len(values):
        size = _even(values[begin:])
        first, last = f"{values[begin]:.3g}", f"{values[begin + size - 1]:.3g}"
        texts += [first] if size == 1 else [f"{first}x{size}" if first == last else f"{first}…{last}"]
        begin += size
    return " ".join(texts)


def _even(values: Sequence[float]) -> int:
    """How many of the first values lie evenly; 1 if that is not even three."""
    steps = [round(b - a, 6) for a, b in pairwise(values)]
    size = 1 + next((n for n, step in enumerate(steps) if step != steps[0]), len(steps))
    return size if size >= 3 else 1


def _amount(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


COLUMNS: Columns = {
    "loops": ("loops", str),
    "bubble_overhead": ("overhead", percent),
    "own_overhead": ("own", percent),
    "memory": ("memory by rank", by_rank),
    **{name: (name, _amount) for name in ("gathers", "messages", "sent", "moves", "moved")},
}
