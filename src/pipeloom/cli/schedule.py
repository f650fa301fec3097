"""``pipeloom schedule``: what a family's schedule looks like, before anything runs."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from pipeloom.analysis.bubble import account_bubble
from pipeloom.analysis.comparison import MEMORY_UNIT, memory_in_microbatches
from pipeloom.analysis.summary import summarize
from pipeloom.cli.flags import parse_flags
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
from pipeloom.simulate import simulate
from pipeloom.system.files import MOST_SCHEDULE_BYTES, read_text
from pipeloom.terminal.words import and_finite, count, passes_of
from pipeloom.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Options:
    """Print a schedule, its bubble and its memory on a clock of unit costs."""

    family: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="FAMILY")] = None
    """A family by name, or a file with a schedule as text (one row a line) or as PyTorch's CSV (.csv)."""
    run: Path | None = None
    """A run file, whose schedule is printed instead: the one that `pipeloom train` executes. With --format text as the
    file that the run's folder has."""
    pp: int = 4
    """Pipeline ranks."""
    loops: int | None = None
    """Stages on each pipeline rank. None: as many as the family takes, else 1."""
    microbatches: int = 8
    """Micro-batches of a step."""
    slices: int = 1
    """Token slices of a micro-batch, all alike; costs are of whole micro-batches, and shared out among them."""
    group_size: int | None = None
    """Micro-batches that go through one local stage before the next; hybrid only. None: pp / slices, rounded up."""
    placement: str | None = None
    """Stage -> rank: looped, v or linear. None: the one that the family runs on, else looped."""
    keep: tuple[int, ...] | None = None
    """For each rank the stage inputs kept with everything computed from them; the others are recomputed. None: all."""
    forward: float = 1.0
    """Cost of one stage's forward for one micro-batch."""
    backward: float = 2.0
    """Cost of one stage's backward for one micro-batch."""
    transfer: float = 0.0
    """Cost of moving one tensor between two ranks; draws on the rank's lane for that edge, not on its compute."""
    gather: float = 0.0
    """Cost of gathering one stage's weights; draws on the rank's data-parallel lane."""
    reduce: float = 0.0
    """Cost of reducing one stage's gradient; draws on the rank's data-parallel lane."""
    tied: float | None = None
    """Cost of moving the matrix that embedding and head share, and of moving its gradient; adds these messages. None:
    they share none."""
    communication: bool = False
    """Add the sends and receives."""
    receive_buffers: int = 2
    """Receives posted ahead for each directed edge; with --communication."""
    unshard: int | Literal["all"] | None = None
    """Gather sharded weights, with so many stages of a rank gathered at once; all: each once, and kept."""
    prefetch: int = 1
    """How many visits to other stages ahead a gather may start; with --unshard."""
    reduce_grad: bool = False
    """Add the gradient reductions."""
    gradient_buffers: int | None = None
    """Stages whose unreduced gradients a rank can hold; with --reduce-grad. None: all."""
    update: Literal["at-once", "at-the-end", "in-the-next-step"] | None = None
    """Add the optimizer's step on each stage: behind its last backward; behind everything, as clipping needs; or before
    its first forward, for the step before. None: it is not in the schedule."""
    resident: int | None = None
    """Swap stages between device and host, with room for so many on each rank. None: all are on the device."""
    stage_swap: float = 0.0
    """Cost of moving one stage's weights; its gradient takes as much, its optimizer state twice; with --resident."""
    balance: bool = False
    """Pair full pipeline ranks with empty ones: of what they keep for backwards, the full ones evict to the others what
    they need last, until a pair is balanced or all are within --budget."""
    offload: bool = False
    """Move what is too much for --budget to the memory of the host; with --balance what is left then."""
    budget: float | None = None
    """Most stage inputs that a rank may hold at once, what is under way counted at both ends; with --balance or
    --offload. None: as --balance leaves it."""
    move: float = 1.0
    """Cost of moving what a stage keeps for a micro-batch to a partner or to the host, or back."""
    format: Literal["text", "json", "torch-csv"] | None = None
    """text: every action of every rank; json for programs; torch-csv for PyTorch's pipelining runtime. None: text,
    without the actions where they are more than a screen shows."""
    json: bool = False
    """The same as --format json."""
    plot: Path | None = None
    """Draw the schedule to this file: .png, .svg or .pdf; prints where it is."""


def run(words: list[str]) -> int:
    """Parse the arguments, make the schedule, print it."""
    families = "\n".join(f"  {item.name:<15}{item.summary}" for item in FAMILIES.values())
    options = parse_flags(Options, words, "schedule", f"{Options.__doc__}\n\nFamilies:\n{families}")
    recipe, sizes = (_recipe(options), None) if options.run is None else _run_recipe(options, options.run)
    plain = build(replace(recipe, moves=Moves(), given=None), sizes)
    _refuse_idle_costs(options, plain)
    costs = UniformCosts(
        # Costs are of whole micro-batches; slices are equal here, and attention's growth along a sequence is left out.
        options.forward / plain.num_slices,
        options.backward / plain.num_slices,
        options.transfer / plain.num_slices,
        options.gather,
        options.reduce,
        evict_s=options.move / plain.num_slices,
        offload_s=options.move / plain.num_slices,
        tied_s=options.tied or 0.0,
        tied_grad_s=options.tied or 0.0,
        move=Amounts(weights=1, gradient=1, state=2).times(options.stage_swap),
    )
    timing = nominal if sizes is not None else lambda *_: PlacedBy(costs.seconds)
    schedule = build(recipe, sizes, timing)
    trace = simulate(schedule, costs)
    if options.plot is not None:
        _plot(options, schedule, trace)
    form = "json" if options.json else options.format
    if form == "torch-csv":
        print(format_torch_csv(schedule), end="")
    elif form == "text" and options.run is not None:
        print(schedule_text(recipe, schedule, sizes), end="")
    elif form == "json":
        print(_one_row_a_line(to_json(schedule, trace)))
    else:
        delay = None if schedule is plain else trace.end_s - simulate(plain, costs).end_s  # a file's is not known
        _print_text(options, schedule, trace, delay)
    if options.plot is not None:
        is_data = form in ("json", "torch-csv")
        # Standard output is the data of another program then.
        print(f"{'' if is_data else '# '}picture            {options.plot}", file=sys.stderr if is_data else sys.stdout)
    return 0


def _recipe(options: Options) -> Recipe:
    """The recipe of the options. Passes that take communication bring it with them."""
    communicates = options.communication or options.transfer or options.reduce_grad
    chosen = (options.unshard, options.tied, options.update, options.resident)
    return Recipe(
        start=_start(options),
        receive_buffers=options.receive_buffers if communicates or any(one is not None for one in chosen) else None,
        lends_tied=options.tied is not None,
        unshard=None if options.unshard is None else Unshard(_residency(options.unshard), options.prefetch),
        reduce_grad=ReduceGrad(options.gradient_buffers) if options.reduce_grad else None,
        updates=None if options.update is None else _PLACES[options.update],
        residence=None if options.resident is None else Residence(options.resident, is_bytes=False),
        moves=Moves(balance=options.balance, offload=options.offload, budget_bytes=options.budget),
    )


def _run_recipe(options: Options, file: Path) -> tuple[Recipe, Sizes]:
    """What a run file asks for, with the bytes of its stages."""
    problems = [*_option_problems(options), *_family_problems(options, file, _MAKE)]
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
"""Options that say what a schedule is."""


def _residency(unshard: int | str) -> int | None:
    return unshard if isinstance(unshard, int) else None


_PLACES: dict[str, UpdatePlace] = {place.replace(" ", "-"): place for place in get_args(UpdatePlace)}


def _refuse_idle_costs(options: Options, schedule: Schedule) -> None:
    for name, pass_name, kind in (("gather", "unshard", Kind.UNSHARD), ("reduce", "reduce-grad", Kind.REDUCE_GRAD)):
        if getattr(options, name) and not any(_counts(schedule, kind)):
            raise UserError(f"--{name} has no effect: the schedule has no {kind}; add --{pass_name} or leave it out")
    moves = options.balance or options.offload or schedule.facts.row.is_kind(Kind.EVICT, Kind.OFFLOAD).any()
    if options.move != Options.move and not moves:
        raise UserError("--move has no effect: the schedule has no EVICT or OFFLOAD; leave it out")
    if options.stage_swap and not any(_counts(schedule, Kind.SWAP_IN)):
        raise UserError("--stage-swap has no effect: the schedule has no SWAP_IN; leave it out")
    if options.tied is not None and not any(_counts(schedule, Kind.SEND_TIED)):
        raise UserError("--tied has no effect: the first and the last stage are on one rank; leave it out")


def to_json(schedule: Schedule, trace: Trace) -> dict[str, Any]:
    """What ``--json`` prints.

    Keys: ``rows`` (for each pipeline rank its actions), ``rank_by_stage``, ``num_microbatches``, ``level``,
    ``makespan``, ``bubble_overhead`` (idle / ideal), ``bubble_fraction`` (idle / total), ``memory`` (for each rank, in
    units of what a rank keeps of one micro-batch, as ``pipeloom families --json`` has it), ``peak_stage_inputs``
    (for each rank, what leaves counted as if it stayed), ``peak_held`` (for each rank what it holds at once: its own,
    and what its partner evicted, if partners are known), ``num_evictions`` and ``num_offloads`` (for each rank),
    ``partners`` (for each rank the rank to which it evicts, or null), ``num_unshards``, ``num_reductions``,
    ``num_swaps_in`` and ``exposed_data_parallel`` (for each rank: gathers, reductions, whole stages swapped in, and how
    long it stands still for collectives), ``gradients_final_at`` (for each stage; null where nothing trains).
    """
    summary = summarize(trace)
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
        "peak_held": _peaks_held(schedule, trace),
        "num_evictions": _counts(schedule, Kind.EVICT),
        "num_offloads": _counts(schedule, Kind.OFFLOAD),
        "partners": None if schedule.partners is None else list(schedule.partners),
        "num_unshards": _counts(schedule, Kind.UNSHARD),
        "num_reductions": _counts(schedule, Kind.REDUCE_GRAD),
        "num_swaps_in": _counts(schedule, Kind.SWAP_IN),
        "exposed_data_parallel": _exposed(schedule, trace),
        "gradients_final_at": [summary.gradients_final_s.get(stage) for stage in range(schedule.num_stages)],
    }


def _counts(schedule: Schedule, kind: Kind) -> list[int]:
    """For each rank the number of its actions of a kind."""
    return [int(row.is_kind(kind).sum()) for row in schedule.rows]


def _peaks_held(schedule: Schedule, trace: Trace) -> list[float]:
    """For each rank the most stage inputs that it holds, its own and accepted ones."""
    ledger = Ledger.of_kept(schedule, KeptBytes())
    held = ledger.on(schedule.num_ranks, trace.spans.start_s, trace.spans.end_s)
    return [held.peak(rank) for rank in range(schedule.num_ranks)]


def _exposed(schedule: Schedule, trace: Trace) -> list[float]:
    """For each rank how long it stands still for collectives."""
    return [account.exposed_data_parallel_s for account in account_bubble(schedule, trace)]


def _one_row_a_line(tree: dict[str, Any]) -> str:
    rows = ",\n    ".join(json.dumps(row) for row in tree["rows"])
    # A row a line: json.dumps writes all on one line, or each action on its own.
    rest = json.dumps({key: value for key, value in tree.items() if key != "rows"})
    return f'{{"rows": [\n    {rows}\n], {rest[1:]}'


def _option_problems(options: Options) -> list[str]:
    is_torn = options.json and options.format == "torch-csv"
    problems = ["--json and --format torch-csv disagree; choose one"] if is_torn else []
    may_be_zero = ("transfer", "gather", "reduce", "move", "stage_swap")
    for name in ("forward", "backward", *may_be_zero):
        value = getattr(options, name)
        if not (0 < value < float("inf") or (name in may_be_zero and value == 0)):
            least = "at least" if name in may_be_zero else "above"
            wanted = and_finite(f"{least} 0", value)
            problems.append(f"--{name.replace('_', '-')} must be {wanted}, found {value:g}")
    if options.resident is not None and options.resident < 1:
        problems.append(f"--resident must be at least 1, found {options.resident}")
    if options.tied is not None and not 0 <= options.tied < float("inf"):
        problems.append(f"--tied must be {and_finite('at least 0', options.tied)}, found {options.tied:g}")
    moves, swaps_none = options.balance or options.offload, options.resident is None and options.stage_swap != 0
    if options.offload and options.budget is None:
        problems.append("--offload needs --budget: how many stage inputs a rank may hold")
    if options.budget is not None and not 0 <= options.budget < float("inf"):
        problems.append(f"--budget must be {and_finite('at least 0', options.budget)}, found {options.budget:g}")
    for name, needed, is_idle in (
        ("budget", "balance or --offload", not moves and options.budget is not None),
        ("move", "balance or --offload", not moves and options.family in FAMILIES and options.move != Options.move),
        ("prefetch", "unshard", options.unshard is None and options.prefetch != Options.prefetch),
        ("stage-swap", "resident", swaps_none and options.family in FAMILIES),
        ("gradient-buffers", "reduce-grad", not options.reduce_grad and options.gradient_buffers is not None),
    ):
        if is_idle:
            problems.append(f"--{name} has no effect without --{needed}")
    return problems


def _start(options: Options) -> Choice | Schedule:
    """The family with its sizes, or the schedule of a file."""
    problems = _option_problems(options)
    if options.family is None:
        raise ConfigError(
            [*problems, "expected FAMILY, a family or a file with a schedule, or --run"], "the command line"
        )
    file = Path(options.family)
    is_path = os.sep in options.family or file.suffix or _is_file(file)
    is_family = options.family in FAMILIES or not is_path
    choice = Choice(
        family=options.family,
        pp=options.pp,
        num_microbatches=options.microbatches,
        loops=_loops(options),
        group_size=options.group_size,
        placement=options.placement,
        keep=options.keep,
        num_slices=options.slices,
    )
    if is_family:
        problems += choice.problems()
    if problems:
        raise ConfigError(problems, "the command line")
    if is_family:
        return choice
    if found := _family_problems(options, file, _SIZES):
        raise ConfigError(found, "the command line")
    schedule = _read_csv(file) if file.suffix == ".csv" else read_schedule(file).schedule
    # The only size that a file still takes: its micro-batches can be cut.
    return schedule if options.slices == 1 else add_slices(schedule, options.slices)


def _loops(options: Options) -> int:
    """Those of the options; by default those of a family that takes one number of them alone."""
    own = FAMILIES[options.family].loops if options.family in FAMILIES else None
    return options.loops if options.loops is not None else own or 1


def _read_csv(file: Path) -> Schedule:
    text = read_text(file, "the schedule", MOST_SCHEDULE_BYTES)
    try:
        return parse_torch_csv(text)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error


def _family_problems(options: Options, file: Path, names: Sequence[str]) -> list[str]:
    """Options that have no effect, since a file says what the schedule is."""
    given = [name for name in names if getattr(options, name) != getattr(Options, name)]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    return [f"{file} contains the whole schedule, so {flags} has no effect; leave it out"] if given else []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _title(options: Options, schedule: Schedule) -> str:
    backward = f", backward {options.backward:g}" if schedule.first_backward_stage < schedule.num_stages else ""
    cut = f" of {count(schedule.num_slices, 'token slice')}" if schedule.num_slices > 1 else ""
    passes = passes_of(options.keep, balance=options.balance, offload=options.offload)
    return (
        f"{(options.run or Path(options.family or '')).name}{passes}: {count(schedule.num_stages, 'stage')} on "
        f"{count(schedule.num_ranks, 'pipeline rank')}, {count(schedule.num_microbatches, 'micro-batch')}{cut}; "
        f"forward {options.forward:g}{backward}"
    )


def _plot(options: Options, schedule: Schedule, trace: Trace) -> None:
    from pipeloom.plot.draw import plot_timeline

    assert options.plot is not None
    plot_timeline(trace, [options.plot], title=_title(options, schedule), unit="units of cost")


def _print_text(options: Options, schedule: Schedule, trace: Trace, delay: float | None) -> None:
    """Print the rows and what they come to; ``delay`` is what moves cost, ``None`` where that is not known."""
    summary = summarize(trace)
    lines = {
        "makespan": f"{summary.makespan_s:g}",
        "bubble overhead": f"{summary.bubble_overhead:.5g} (idle / ideal)",
        "bubble fraction": f"{summary.bubble_fraction:.5g} (idle / total)",
        "memory": f"{_by_rank(memory_in_microbatches(schedule, trace))}, in {MEMORY_UNIT}",
        "peak stage inputs": _by_rank(schedule.peak_stage_inputs),
    }
    lines |= _move_lines(schedule, trace, is_asked=delay is not None)
    if delay is not None:
        lines["delay by moves"] = f"{delay:g}"
    kinds = {"weight gathers": Kind.UNSHARD, "reductions": Kind.REDUCE_GRAD, "stages swapped in": Kind.SWAP_IN}
    counts = {name: _counts(schedule, kind) for name, kind in kinds.items()}
    again = _counts(schedule, Kind.RECOMPUTE)
    if any(again):
        lines |= {"recomputed": _by_rank(again), "peak kept whole": _by_rank(_peaks_held(schedule, trace))}
    lines |= {name: _by_rank(values) for name, values in counts.items() if any(values)}
    if any(counts["stages swapped in"]) and schedule.max_resident is None:
        lines["stages swapped in"] += ": room unknown, so that none waits for it"
    if any(counts["weight gathers"]) or any(counts["reductions"]):
        lines["exposed for them"] = _by_rank(_exposed(schedule, trace))
    if summary.gradients_final_s:
        lines["gradients final at"] = f"{' '.join(f'{t:g}' for t in summary.gradients_final_s.values())} (by stage)"
    print(f"# {_title(options, schedule)}")
    rows = format_schedule(schedule)
    is_whole = options.format == "text" or len(rows) <= _SCREEN
    print(rows if is_whole else f"# rows               {_left_out(schedule)}\n")
    for name, value in lines.items():
        print(f"# {name:<18} {value if is_whole else _shortened(value)}")


_SCREEN = 8000
"""Characters of rows that are printed unasked: a screen of 200 columns and 40 lines."""
_MOST_WORDS = 32
"""Values by rank or by stage that are printed beside rows that are not."""


def _left_out(schedule: Schedule) -> str:
    return (
        f"{schedule.num_actions:,} actions on {count(schedule.num_ranks, 'rank')}, more than a screen shows; "
        "--format text > FILE writes them all"
    )


def _shortened(line: str) -> str:
    """A line of many values with those in its middle left out; what follows them in brackets stays."""
    values, bracket, rest = line.partition(" (")
    words = values.split(" ")
    if len(words) <= _MOST_WORDS:
        return line
    half = _MOST_WORDS // 2
    return f"{' '.join([*words[:half], '...', *words[-half:]])}{bracket}{rest}"


def _move_lines(schedule: Schedule, trace: Trace, *, is_asked: bool) -> dict[str, str]:
    """What moves away in between, if the schedule or an option moves anything; a file does not name the partners."""
    evictions, offloads = _counts(schedule, Kind.EVICT), _counts(schedule, Kind.OFFLOAD)
    if not (is_asked or any(evictions) or any(offloads)):
        return {}
    is_unknown = schedule.partners is None and any(evictions)
    partners = "unknown" if is_unknown else "none"
    lines = {
        "partners": partners if schedule.partners is None else _by_rank(schedule.partners),
        "evictions": _by_rank(evictions),
        "offloads": _by_rank(offloads),
        "peak with moves": _by_rank(_peaks_held(schedule, trace)),
    }
    if is_unknown:
        lines["peak with moves"] += ": without what ranks accept from partners"
    elif schedule.partners is not None and not any(evictions):
        lines["evictions"] += ": no rank holds enough less than another"
    return lines


def _by_rank(values: Sequence[float]) -> str:
    return f"{' '.join(f'{value:g}' for value in values)} (by rank)"
