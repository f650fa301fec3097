"""``pipeloom schedule``: what a family's schedule looks like, before anything runs."""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.comparison import MEMORY_UNIT, memory_in_microbatches
from pipeloom.analysis.summary import summarize
from pipeloom.cli.flags import SOURCE, or_note, read_flags
from pipeloom.cli.reference import Command, Output, Place
from pipeloom.config import find_problems
from pipeloom.config.file import read_run_file
from pipeloom.cost.costs import UniformCosts
from pipeloom.errors import ConfigError, UserError
from pipeloom.export.torch_csv import format_torch_csv, parse_torch_csv
from pipeloom.families import FAMILIES, Choice
from pipeloom.passes import Moves, add_slices
from pipeloom.passes.lower_sharding import ReduceGrad, Unshard
from pipeloom.passes.lower_stage_swaps import UpdatePlace
from pipeloom.predict.describe import with_model_sizes
from pipeloom.predict.sizes import sizes_in_training
from pipeloom.recipe import PlacedBy, Recipe, Residence, Sizes, build, nominal, schedule_text
from pipeloom.schedule import Kind, Schedule, format_schedule, read_schedule
from pipeloom.schedule.ledger import KeptBytes, Ledger
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.simulation import simulate
from pipeloom.system.files import MOST_SCHEDULE_BYTES, read_text
from pipeloom.terminal.words import and_finite, count, passes_of
from pipeloom.trace import Trace
from pipeloom.workload.limits import Common, Names, PlacementName


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``pipeloom schedule``.

    Costs are in units of a clock, on which a stage's forward takes 1 by default.
    """

    family: Annotated[str | None, Place("FAMILY"), Names("families")] = None
    """A schedule by name, or a file with one: text, a row per rank, or PyTorch's CSV (.csv)."""
    run: Common[Path | None] = None
    """A run file, whose schedule is printed instead. `pipeloom train` executes the same. With --format text it has the
    form of schedule.txt in a run folder."""
    pp: Common[int] = 4
    """Pipeline-model-parallel size: pipeline ranks."""
    loops: Common[int | None] = None
    """Virtual stages on each pipeline rank. None: as many as the schedule takes, else 1."""
    microbatches: Common[int] = 8
    """Micro-batches of a step."""
    slices: int = 1
    """Token slices of a micro-batch, all of one length. Costs are of whole micro-batches, and slices share them."""
    group_size: int | None = None
    """Micro-batches that a rank runs on one virtual stage before the next; hybrid only. None: pp / slices, rounded
    up."""
    placement: Common[PlacementName | None] = None
    """Placement of stages on ranks. None: that of the schedule, else looped."""
    keep: tuple[int, ...] | None = None
    """For each rank the stage inputs that it keeps with all activations. The others are recomputed. None: all."""
    forward: Common[float] = 1.0
    """Cost of a stage's forward for one micro-batch."""
    backward: Common[float] = 2.0
    """Cost of a stage's backward for one micro-batch."""
    transfer: Common[float] = 0.0
    """Cost of sending one tensor to another rank. It takes time of the lane between the two ranks, not of compute."""
    gather: float = 0.0
    """Cost of gathering one stage's weights, on the data-parallel lane."""
    reduce: float = 0.0
    """Cost of reducing one stage's gradient, on the data-parallel lane."""
    tied: float | None = None
    """Cost of sending the matrix that embedding and head share, and its gradient. Adds these messages. None: they
    share none."""
    communication: Common[bool] = False
    """Add the sends and receives."""
    receive_buffers: int = 2
    """Receives posted ahead on each directed edge, with --communication."""
    unshard: int | Literal["all"] | None = None
    """Gather sharded weights, with this many stages of a rank gathered at once. all gathers each stage once."""
    prefetch: int = 1
    """With --unshard: visits to other stages that a gather may start ahead."""
    reduce_grad: bool = False
    """Add a reduction of each stage's gradient over data-parallel ranks."""
    gradient_buffers: int | None = None
    """With --reduce-grad: stages whose unreduced gradients a rank can hold. None: all."""
    update: Literal["at-once", "at-the-end", "in-the-next-step"] | None = None
    """Add the optimizer's step on each stage. at-once: behind its last backward. at-the-end: behind everything, as
    clipping needs. in-the-next-step: before its first forward, for the step before. None: no optimizer's step."""
    resident: int | None = None
    """Swap stages between device and host, with room for this many on each rank. None: all are on the device."""
    stage_swap: float = 0.0
    """With --resident: cost of moving one stage's weights. Its gradient takes as much, its optimizer state twice."""
    balance: bool = False
    """Pair full pipeline ranks with empty ones, which hold some of their activations (BPipe). A full rank evicts what
    it needs last, until the pair is balanced or all are within --budget."""
    offload: bool = False
    """Move activations beyond --budget to host memory. With --balance, those that are beyond it after that."""
    budget: float | None = None
    """With --balance or --offload: most stage inputs that a rank holds at once. Transfers count at both ends. None: as
    --balance leaves it."""
    move: float = 1.0
    """Cost of moving one micro-batch's activations of a stage to a partner or to the host, or back."""
    format: Common[Literal["text", "json", "torch-csv"] | None] = None
    """Form of the output. text has every action of every rank; json is for programs; torch-csv is for PyTorch's
    pipelining runtime. None: text, without actions that do not fit a screen."""
    json: bool = False
    """The same as --format json."""
    plot: Common[Annotated[Path | None, Output("picture")]] = None
    """Draw the schedule to this .png, .svg or .pdf file."""


COMMAND = Command(
    name="schedule",
    options=Options,
    examples={
        "pipeloom schedule 1f1b --pp 4 --microbatches 8": "actions, bubble, memory",
        "pipeloom schedule breadth-first --loops 4 --plot schedule.svg": "a picture",
        "pipeloom schedule --run run.toml": "the schedule that a run executes",
    },
)


def run(words: list[str]) -> int:
    """Parse the arguments, make the schedule, print it."""
    options, problems = read_flags(COMMAND, words)
    made = or_note(lambda: _recipes(options), problems)
    if problems or made is None:
        raise ConfigError(problems, SOURCE)
    recipe, sizes = made
    plain = build(replace(recipe, moves=Moves(), given=None), sizes)
    _refuse_idle_costs(options, plain)
    costs = _costs(options, plain.num_slices)
    timing = nominal if sizes is not None else lambda *_: PlacedBy(costs.seconds)
    schedule = build(recipe, sizes, timing)
    trace = simulate(schedule, costs)
    title = _title(options, schedule)
    if options.plot is not None:
        from pipeloom.plotting.draw import plot_timeline

        plot_timeline(trace, [options.plot], title=title, unit="units of cost")
    form = "json" if options.json else options.format
    if form == "torch-csv":
        print(format_torch_csv(schedule), end="")
    elif form == "text" and options.run is not None:
        print(schedule_text(recipe, schedule, sizes), end="")
    elif form == "json":
        tree = to_json(schedule, trace)
        rows = ",\n    ".join(json.dumps(row) for row in tree.pop("rows"))
        # A row a line: json.dumps writes all on one line, or each action on its own.
        print(f'{{"rows": [\n    {rows}\n], {json.dumps(tree)[1:]}')
    else:
        # What moves cost; what a file without them would take is not known.
        delay = None if schedule is plain else trace.end_s - simulate(plain, costs).end_s
        lines = _lines(to_json(schedule, trace), delay, has_unknown_room=schedule.max_resident is None)
        _print_text(title, schedule, lines, is_whole=form == "text")
    if options.plot is not None:
        is_data = form in ("json", "torch-csv")
        # Standard output is the data of another program then.
        print(f"{'' if is_data else '# '}picture            {options.plot}", file=sys.stderr if is_data else sys.stdout)
    return 0


def _costs(options: Options, num_slices: int) -> UniformCosts:
    """Seconds of the options, which are of whole micro-batches."""
    # Slices are equal here, and attention's growth along a sequence is left out.
    forward, backward, transfer, move = (
        cost / num_slices for cost in (options.forward, options.backward, options.transfer, options.move)
    )
    tied = options.tied or 0.0
    swap = Amounts(weights=1, gradient=1, state=2).times(options.stage_swap)
    exchanges = {"evict_s": move, "offload_s": move, "tied_s": tied, "tied_grad_s": tied, "move": swap}
    return UniformCosts(forward, backward, transfer, options.gather, options.reduce, **exchanges)


_PLACES: dict[str, UpdatePlace] = {place.replace(" ", "-"): place for place in get_args(UpdatePlace)}


def _recipe(options: Options) -> Recipe:
    """The recipe of the options. Passes that take communication bring it with them."""
    unshard, resident = options.unshard, options.resident
    adds = (unshard, options.tied, options.update, resident)
    communicates = options.communication or options.transfer or options.reduce_grad or adds != (None,) * len(adds)
    residency = unshard if isinstance(unshard, int) else None
    return Recipe(
        start=_start(options),
        receive_buffers=options.receive_buffers if communicates else None,
        lends_tied=options.tied is not None,
        unshard=None if unshard is None else Unshard(residency, options.prefetch),
        reduce_grad=ReduceGrad(options.gradient_buffers) if options.reduce_grad else None,
        updates=None if options.update is None else _PLACES[options.update],
        residence=None if resident is None else Residence(resident, is_bytes=False),
        moves=Moves(balance=options.balance, offload=options.offload, budget_bytes=options.budget),
    )


def _recipes(options: Options) -> tuple[Recipe, Sizes | None]:
    """The recipe of the options, or that of a run file with the bytes of its stages."""
    return (_recipe(options), None) if options.run is None else _run_recipe(options, options.run)


def _run_recipe(options: Options, file: Path) -> tuple[Recipe, Sizes]:
    """The recipe of a run file, with the bytes of its stages."""
    problems = [*_option_problems(options), *_unused_problems(options, file, _MAKE)]
    problems += [f"FAMILY {options.family} has no effect with --run; leave one out"] if options.family else []
    config, found = read_run_file(file)
    config, unknown = with_model_sizes(config)
    problems += [*found, *unknown, *find_problems(config, trains=False, is_model_known=not unknown)]
    if problems:
        raise ConfigError(problems, str(file))
    return config.recipe(), sizes_in_training(config)


_SIZES = ("pp", "loops", "microbatches", "group_size", "placement", "keep")
_MAKE = (
    *_SIZES, "slices", "tied", "communication", "receive_buffers", "unshard", "prefetch", "reduce_grad",
    "gradient_buffers", "update", "resident", "balance", "offload", "budget",
)  # fmt: skip
"""Options that define a schedule."""
_BOUNDS = {
    **dict.fromkeys(("forward", "backward"), "above 0"),
    **dict.fromkeys(("transfer", "gather", "reduce", "move", "stage_swap", "tied", "budget"), "at least 0"),
}
"""Numbers of the options, with what they have to be."""


def _start(options: Options) -> Choice | Schedule:
    """The family with its sizes, or the schedule of a file."""
    problems = _option_problems(options)
    if options.family is None:
        problems.append("expected FAMILY, a family or a file with a schedule, or --run")
        raise ConfigError(problems, "the command line")
    file = Path(options.family)
    is_family = options.family in FAMILIES or not (os.sep in options.family or file.suffix or _is_file(file))
    # By default the loops of a family that takes one number of them alone.
    own = FAMILIES[options.family].loops if options.family in FAMILIES else None
    choice = Choice(
        family=options.family,
        pp=options.pp,
        num_microbatches=options.microbatches,
        loops=options.loops if options.loops is not None else own or 1,
        group_size=options.group_size,
        placement=options.placement,
        keep=options.keep,
        num_slices=options.slices,
    )
    problems += choice.problems() if is_family else _unused_problems(options, file, _SIZES)
    if problems:
        raise ConfigError(problems, "the command line")
    if is_family:
        return choice
    schedule = _read_csv(file) if file.suffix == ".csv" else read_schedule(file).schedule
    # The only size that a file still takes: its micro-batches can be cut.
    return schedule if options.slices == 1 else add_slices(schedule, options.slices)


def _option_problems(options: Options) -> list[str]:
    is_torn = options.json and options.format == "torch-csv"
    problems = ["--json and --format torch-csv disagree; choose one"] if is_torn else []
    for name, limit in _BOUNDS.items():
        value = getattr(options, name)
        # NaN is neither above nor at 0.
        if value is not None and not (0 < value < math.inf or (value == 0 and limit == "at least 0")):
            problems.append(f"{_flag(name)} must be {and_finite(limit, value)}, found {value:g}")
    if options.resident is not None and options.resident < 1:
        problems.append(f"--resident must be at least 1, found {options.resident}")
    if options.offload and options.budget is None:
        problems.append("--offload needs --budget: how many stage inputs a rank may hold")
    moves, is_family = options.balance or options.offload, options.family in FAMILIES
    # A file may have what the two costs of moving need; _refuse_idle_costs looks there.
    for name, needed, is_used in (
        ("budget", "balance or --offload", moves),
        ("move", "balance or --offload", moves or not is_family),
        ("prefetch", "unshard", options.unshard is not None),
        ("stage_swap", "resident", options.resident is not None or not is_family),
        ("gradient_buffers", "reduce-grad", options.reduce_grad),
    ):
        if not is_used and getattr(options, name) != getattr(Options, name):
            problems.append(f"{_flag(name)} has no effect without --{needed}")
    return problems


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse_idle_costs(options: Options, schedule: Schedule) -> None:
    """Refuse costs of kinds of actions that the schedule lacks."""
    moves = options.balance or options.offload
    for name, kinds, reason in (
        ("gather", [Kind.UNSHARD], "the schedule has no UNSHARD; add --unshard or leave it out"),
        ("reduce", [Kind.REDUCE_GRAD], "the schedule has no REDUCE_GRAD; add --reduce-grad or leave it out"),
        ("move", [Kind.EVICT, Kind.OFFLOAD], "the schedule has no EVICT or OFFLOAD; leave it out"),
        ("stage_swap", [Kind.SWAP_IN], "the schedule has no SWAP_IN; leave it out"),
        ("tied", [Kind.SEND_TIED], "the first and the last stage are on one rank; leave it out"),
    ):
        is_used = (name == "move" and moves) or schedule.facts.row.is_kind(*kinds).any()
        if getattr(options, name) != getattr(Options, name) and not is_used:
            raise UserError(f"{_flag(name)} has no effect: {reason}")


def _unused_problems(options: Options, file: Path, names: Sequence[str]) -> list[str]:
    """Options that have no effect, since a file contains the schedule."""
    flags = ", ".join(_flag(name) for name in names if getattr(options, name) != getattr(Options, name))
    return [f"{file} contains the whole schedule, so {flags} has no effect; leave it out"] if flags else []


def _read_csv(file: Path) -> Schedule:
    text = read_text(file, "the schedule", MOST_SCHEDULE_BYTES)
    try:
        return parse_torch_csv(text)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def to_json(schedule: Schedule, trace: Trace) -> dict[str, Any]:
    """What ``--json`` prints.

    Keys: ``rows`` (for each pipeline rank its actions), ``rank_by_stage``, ``num_microbatches``, ``level``,
    ``makespan``, ``bubble_overhead`` (idle / ideal), ``bubble_fraction`` (idle / total), ``memory`` (for each rank, in
    units of what a rank keeps of one micro-batch, as ``pipeloom families --json`` has it), ``peak_stage_inputs``
    (for each rank, what leaves counted as if it stayed), ``peak_held`` (for each rank what it holds at once: its own,
    and what its partner evicted, if partners are known), ``num_evictions`` and ``num_offloads`` (for each rank),
    ``partners`` (for each rank the rank to which it evicts, or null), ``num_recomputed``, ``num_unshards``,
    ``num_reductions``, ``num_swaps_in`` and ``exposed_data_parallel`` (for each rank: forwards that run again, gathers,
    reductions, whole stages swapped in, and how long it stands still for collectives), ``gradients_final_at`` (for each
    stage; null where nothing trains).
    """
    summary = summarize(trace)
    held = Ledger.of_kept(schedule, KeptBytes()).on(schedule.num_ranks, trace.spans.start_s, trace.spans.end_s)
    return {
        "rows": [[str(action) for action in row] for row in schedule.rows],
        "rank_by_stage": list(schedule.placement.rank_by_stage),
        "num_microbatches": schedule.num_microbatches,
        "level": schedule.level.value,
        "makespan": summary.makespan_s,
        "bubble_overhead": summary.bubble_overhead,
        "bubble_fraction": summary.bubble_fraction,
        "memory": list(memory_in_microbatches(schedule, trace)),
        "peak_stage_inputs": list(schedule.peak_stage_inputs),
        "peak_held": [held.peak(rank) for rank in range(schedule.num_ranks)],
        "partners": None if schedule.partners is None else list(schedule.partners),
        **{name: [int(row.is_kind(kind).sum()) for row in schedule.rows] for name, kind in _COUNTED.items()},
        "exposed_data_parallel": [one.exposed_data_parallel_s for one in account_bubble(schedule, trace)],
        "gradients_final_at": [summary.gradients_final_s.get(stage) for stage in range(schedule.num_stages)],
    }


_COUNTED = {
    "num_evictions": Kind.EVICT,
    "num_offloads": Kind.OFFLOAD,
    "num_recomputed": Kind.RECOMPUTE,
    "num_unshards": Kind.UNSHARD,
    "num_reductions": Kind.REDUCE_GRAD,
    "num_swaps_in": Kind.SWAP_IN,
}


def _lines(tree: dict[str, Any], delay: float | None, *, has_unknown_room: bool) -> dict[str, str]:
    """What people see of the JSON: a line for each figure; of actions that there are none of, no line."""
    lines = {
        "makespan": f"{tree['makespan']:g}",
        "bubble overhead": f"{tree['bubble_overhead']:.5g} (idle / ideal)",
        "bubble fraction": f"{tree['bubble_fraction']:.5g} (idle / total)",
        "memory": f"{_by_rank(tree['memory'])}, in {MEMORY_UNIT}",
        "peak stage inputs": _by_rank(tree["peak_stage_inputs"]),
    }
    evicts, partners = any(tree["num_evictions"]), tree["partners"]
    if delay is not None or evicts or any(tree["num_offloads"]):
        # A file that moves does not name the partners.
        is_unknown, is_even = partners is None and evicts, partners is not None and not evicts
        remark = ": without what ranks accept from partners" if is_unknown else ""
        unpaired = "unknown" if is_unknown else "none"
        lines |= {
            "partners": unpaired if partners is None else _by_rank(partners),
            "evictions": _by_rank(tree["num_evictions"]) + ": no rank holds enough less than another" * is_even,
            "offloads": _by_rank(tree["num_offloads"]),
            "peak with moves": _by_rank(tree["peak_held"]) + remark,
        }
    if delay is not None:
        lines["delay by moves"] = f"{delay:g}"
    gathers, reduces, swaps = (any(tree[name]) for name in ("num_unshards", "num_reductions", "num_swaps_in"))
    if any(tree["num_recomputed"]):
        lines |= {"recomputed": _by_rank(tree["num_recomputed"]), "peak kept whole": _by_rank(tree["peak_held"])}
    if gathers:
        lines["weight gathers"] = _by_rank(tree["num_unshards"])
    if reduces:
        lines["reductions"] = _by_rank(tree["num_reductions"])
    if swaps:
        room = ": room unknown, so that none waits for it" if has_unknown_room else ""
        lines["stages swapped in"] = _by_rank(tree["num_swaps_in"]) + room
    if gathers or reduces:
        lines["exposed for them"] = _by_rank(tree["exposed_data_parallel"])
    if final := [time for time in tree["gradients_final_at"] if time is not None]:
        lines["gradients final at"] = f"{' '.join(f'{time:g}' for time in final)} (by stage)"
    return lines


def _by_rank(values: Sequence[float]) -> str:
    return f"{' '.join(f'{value:g}' for value in values)} (by rank)"


def _title(options: Options, schedule: Schedule) -> str:
    backward = f", backward {options.backward:g}" if schedule.first_backward_stage < schedule.num_stages else ""
    cut = f" of {count(schedule.num_slices, 'token slice')}" if schedule.num_slices > 1 else ""
    passes = passes_of(options.keep, balance=options.balance, offload=options.offload)
    return (
        f"{(options.run or Path(options.family or '')).name}{passes}: {count(schedule.num_stages, 'stage')} on "
        f"{count(schedule.num_ranks, 'pipeline rank')}, {count(schedule.num_microbatches, 'micro-batch')}{cut}; "
        f"forward {options.forward:g}{backward}"
    )


_SCREEN = 8000
"""Characters of rows that are printed unasked: a screen of 200 columns and 40 lines."""
_MOST_WORDS = 32
"""Values by rank or by stage that are printed beside rows that are not."""


def _print_text(title: str, schedule: Schedule, lines: dict[str, str], *, is_whole: bool) -> None:
    rows = format_schedule(schedule)
    is_whole = is_whole or len(rows) <= _SCREEN
    left_out = (
        f"# rows               {schedule.num_actions:,} actions on {count(schedule.num_ranks, 'rank')}, more than a "
        "screen shows; --format text > FILE writes them all\n"
    )
    print(f"# {title}\n{rows if is_whole else left_out}")
    for name, value in lines.items():
        print(f"# {name:<18} {value if is_whole else _shortened(value)}")


def _shortened(line: str) -> str:
    """A line of many values with those in its middle left out; what follows them in brackets stays."""
    values, bracket, rest = line.partition(" (")
    words = values.split(" ")
    if len(words) <= _MOST_WORDS:
        return line
    half = _MOST_WORDS // 2
    return f"{' '.join([*words[:half], '...', *words[-half:]])}{bracket}{rest}"
