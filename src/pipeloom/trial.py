"""A schedule tried out on a clock of unit costs: what ``pipeloom schedule`` prints and the playground draws."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from pipeloom.analysis.bubble import BubbleAccount, account_bubble
from pipeloom.analysis.comparison import MEMORY_UNIT, memory_in_microbatches
from pipeloom.analysis.summary import summarize
from pipeloom.cost.costs import Costs
from pipeloom.errors import ConfigError
from pipeloom.families import FAMILIES, Choice
from pipeloom.families.family import default_loops
from pipeloom.passes import Moves, add_slices, split_backward
from pipeloom.passes.lower_sharding import ReduceGrad, Unshard
from pipeloom.passes.lower_stage_swaps import UpdatePlace
from pipeloom.recipe import PlacedBy, Recipe, Residence, Sizes, build, nominal
from pipeloom.schedule import Kind, Schedule
from pipeloom.schedule.ledger import KeptBytes, Ledger
from pipeloom.schedule.stage_swaps import Amounts
from pipeloom.simulation import simulate
from pipeloom.terminal.words import and_finite, count, passes_of
from pipeloom.trace import Trace
from pipeloom.workload.limits import Common, Count, PlacementName


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A family with its sizes, the passes over it, and what actions cost; or the last two for a schedule of a file."""

    family: str | None = None
    """Name of a schedule. None: a schedule that is given."""
    pp: Common[Count] = 4
    """Pipeline-model-parallel size: pipeline ranks."""
    loops: Common[Count | None] = None
    """Virtual stages on each pipeline rank. None: 2 or 1; the only number that the schedule takes, otherwise 2."""
    num_microbatches: Common[Count] = 8
    """Micro-batches of a step."""
    slices: Count = 1
    """Token slices of a micro-batch, of equal length. Costs are of whole micro-batches, and slices divide them."""
    group_size: int | None = None
    """Micro-batches that a rank runs on one virtual stage before the next; hybrid only. None: pp / slices, rounded
    up."""
    placement: Common[PlacementName | None] = None
    """Placement of stages on ranks. None: that of the schedule, else looped."""
    keep: tuple[int, ...] | None = None
    """For each rank, the number of stage inputs whose activations it keeps; the others are recomputed. None: all."""
    split_backward: int | Literal["end"] | None = None
    """Split backwards into input gradient (I) and weight gradient (W). 0: each W follows its own I. N: it follows the
    N-th I after that. end: all W are at the end of the row."""
    forward: Common[float] = 1.0
    """Cost of a stage's forward for one micro-batch."""
    backward: Common[float] = 2.0
    """Cost of a stage's backward for one micro-batch."""
    weight: float | None = None
    """Cost of the weight gradients (W) of a split backward, a part of the backward. None: half of the backward."""
    transfer: Common[float] = 0.0
    """Cost of sending one tensor to another rank. It occupies the link between the two ranks, not compute."""
    gather: float = 0.0
    """Cost of gathering one stage's weights, on the data-parallel lane."""
    reduce: float = 0.0
    """Cost of reducing one stage's gradient, on the data-parallel lane."""
    tied: float | None = None
    """Cost of sending the matrix of a tied embedding and head, and its gradient; adds these messages. None: not
    tied."""
    communication: Common[bool] = False
    """Add sends and receives."""
    receive_buffers: int = 2
    """Receives posted ahead on each directed edge, with --communication."""
    unshard: int | Literal["all"] | None = None
    """Gather sharded weights; a rank holds at most N gathered stages at once. all: no limit, each is gathered once."""
    prefetch: int = 1
    """With --unshard: how many visits to other stages ahead a gather may start."""
    reduce_grad: bool = False
    """Add a reduction of each stage's gradient over data-parallel ranks."""
    gradient_buffers: int | None = None
    """With --reduce-grad: stages whose unreduced gradients a rank can hold. None: all."""
    update: Literal["at-once", "at-the-end", "in-the-next-step"] | None = None
    """Add an optimizer update of each stage. at-once: after its last backward. at-the-end: after all backwards, as
    gradient clipping requires. in-the-next-step: before its first forward, for the previous step. None: no update."""
    resident: int | None = None
    """Swap stages between device and host; the device of a rank holds N of them. None: all are on the device."""
    stage_swap: float = 0.0
    """With --resident: cost of moving one stage's weights. Its gradient takes as much, its optimizer state twice."""
    balance: bool = False
    """Move activations of full pipeline ranks to empty ones (BPipe). A full rank evicts those that it needs last, until
    the pair is balanced or all ranks are within --budget."""
    offload: bool = False
    """Move activations beyond --budget to host memory. With --balance, those still beyond it after balancing."""
    budget: float | None = None
    """With --balance or --offload: limit on the stage inputs that a rank holds at once. Transfers count at both ends.
    None: with --balance, each pair of ranks shares evenly."""
    move: float = 1.0
    """Cost of moving one micro-batch's activations of a stage to a partner or to the host, or back."""


_BOUNDS = {
    **dict.fromkeys(("forward", "backward"), "above 0"),
    **dict.fromkeys(("weight", "transfer", "gather", "reduce", "move", "stage_swap", "tied", "budget"), "at least 0"),
}
"""Numbers of the options, with what they have to be."""


def differing(trial: Trial) -> frozenset[str]:
    """Fields with another value than the default."""
    return frozenset(one.name for one in fields(Trial) if getattr(trial, one.name) != one.default)


def _start(trial: Trial, given: Schedule | None, checked: Collection[str]) -> Choice | Schedule:
    """The family with its sizes, or the schedule that is given."""
    choice = trial_choice(trial)
    problems = [*trial_problems(trial, checked), *(choice.problems() if given is None else [])]
    if problems:
        raise ConfigError(problems, "the command line")
    split = trial.split_backward
    if given is None and split is None:
        return choice
    schedule = choice.make() if given is None else given
    if given is not None and trial.slices > 1:
        # The only size that such a schedule still takes: its micro-batches can be cut.
        schedule = add_slices(schedule, trial.slices)
    if split is None:
        return schedule
    found = split_backward(schedule, None if split == "end" else split)
    if found.rows == schedule.rows and "split_backward" in checked:
        raise ConfigError([f"{flag('split_backward')} has no effect: {_UNSPLIT}; leave it out"], "the command line")
    return found


def trial_choice(trial: Trial) -> Choice:
    """The family with its sizes."""
    return Choice(
        family=trial.family or "",
        pp=trial.pp,
        num_microbatches=trial.num_microbatches,
        loops=trial.loops if trial.loops is not None else default_loops(trial.family or ""),
        group_size=trial.group_size,
        placement=trial.placement,
        keep=trial.keep,
        num_slices=trial.slices,
    )


STAGE_COSTS = ("forward", "backward", "weight", "gather", "reduce", "move", "stage_swap")
"""Costs of a stage."""


def with_same_work(trial: Trial, num_stages: int, first_num_stages: int) -> Trial:
    """A trial beside another one, whose stages are parts of the same model.

    Args:
        trial: with costs of a stage, and a budget of stage inputs, as the other one has them.
        num_stages: of its own schedule.
        first_num_stages: of the other one.

    Returns:
        The trial with the costs of its own stages and a budget of their inputs; costs that have no effect are left.
    """
    ratio = first_num_stages / num_stages
    trains = trial.family not in FAMILIES or FAMILIES[trial.family].has_backward
    used = {"forward", *(["backward"] if trains else []), *(["move"] if trial.balance or trial.offload else [])}
    used |= differing(trial)
    scaled = {name: getattr(trial, name) * ratio for name in STAGE_COSTS if name in used}
    return replace(trial, **scaled, budget=None if trial.budget is None else trial.budget / ratio)


def trial_problems(trial: Trial, checked: Collection[str] | None = None) -> list[str]:
    """What is wrong with the numbers of a trial, a sentence each; the family with its sizes checks its own.

    Args:
        trial: the numbers.
        checked: fields that have to have an effect; ``None``: those with another value than the default.
    """
    problems, checked = list[str](), differing(trial) if checked is None else checked
    for name, limit in _BOUNDS.items():
        value = getattr(trial, name)
        # NaN is neither above nor at 0.
        if value is not None and not (0 < value < math.inf or (value == 0 and limit == "at least 0")):
            problems.append(f"{flag(name)} must be {and_finite(limit, value)}, found {value:g}")
    if trial.resident is not None and trial.resident < 1:
        problems.append(f"--resident must be at least 1, found {trial.resident}")
    if trial.weight is not None and trial.weight > trial.backward:
        problems.append(f"--weight must be at most --backward, {trial.backward:g}, found {trial.weight:g}")
    if trial.offload and trial.budget is None:
        problems.append("--offload needs --budget: how many stage inputs a rank may hold")
    moves, is_family = trial.balance or trial.offload, trial.family in FAMILIES
    # A file may have what the two costs of moving need; _refuse_idle looks there.
    for name, needed, is_used in (
        ("budget", "balance or --offload", moves),
        ("move", "balance or --offload", moves or not is_family),
        ("prefetch", "unshard", trial.unshard is not None),
        ("stage_swap", "resident", trial.resident is not None or not is_family),
        ("gradient_buffers", "reduce-grad", trial.reduce_grad),
        ("receive_buffers", "communication", _communicates(trial)),
    ):
        if not is_used and name in checked:
            problems.append(f"{flag(name)} has no effect without --{needed}")
    return problems


_UNSPLIT = "the schedule has no whole backward to split"
_ALONE = ("communication", "transfer", "receive_buffers", "placement", "balance")
"""Fields that have no effect on one pipeline rank."""
_OF_BACKWARDS = ("backward", "reduce_grad", "gradient_buffers", "update", "balance", "offload")
"""Fields that have no effect without backwards."""


def _refuse_idle(trial: Trial, schedule: Schedule, checked: Collection[str]) -> None:
    """Refuse fields that have no effect on the schedule, such as costs of kinds of actions that it lacks."""
    moves, is_kind = trial.balance or trial.offload, schedule.facts.row.is_kind
    alone, trains = schedule.num_ranks == 1, schedule.first_backward_stage < schedule.num_stages
    found = [(name, "there is one pipeline rank; leave it out") for name in _ALONE if alone]
    found += [(name, "the schedule has no backward; leave it out") for name in _OF_BACKWARDS if not trains]
    for name, kinds, reason in (
        ("gather", [Kind.UNSHARD], "the schedule has no UNSHARD; add --unshard or leave it out"),
        ("reduce", [Kind.REDUCE_GRAD], "the schedule has no REDUCE_GRAD; add --reduce-grad or leave it out"),
        ("weight", [Kind.BACKWARD_WEIGHT], "the schedule has no W; add --split-backward or leave it out"),
        ("move", [Kind.EVICT, Kind.OFFLOAD], "the schedule has no EVICT or OFFLOAD; leave it out"),
        ("stage_swap", [Kind.SWAP_IN], "the schedule has no SWAP_IN; leave it out"),
        ("tied", [Kind.SEND_TIED], "the first and the last stage are on one rank; leave it out"),
    ):
        if not (name == "move" and moves) and not is_kind(*kinds).any():
            found.append((name, reason))
    idle = dict[str, str]()
    for name, reason in found:
        idle.setdefault(name, f"{flag(name)} has no effect: {reason}")
    if problems := [sentence for name, sentence in idle.items() if name in checked]:
        raise ConfigError(problems, "the command line")


def flag(name: str) -> str:
    """A field as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def unit_costs(trial: Trial, num_slices: int) -> Costs:
    """Seconds of a trial, whose costs are of whole micro-batches."""
    # Slices are equal here, and attention's growth along a sequence is left out.
    forward, backward, transfer, move = (
        cost / num_slices for cost in (trial.forward, trial.backward, trial.transfer, trial.move)
    )
    share = 0.5 if trial.weight is None else trial.weight / trial.backward
    tied = trial.tied or 0.0
    swap = Amounts(weights=1, gradient=1, state=2).times(trial.stage_swap)
    exchanges = {"evict_s": move, "offload_s": move, "tied_s": tied, "tied_grad_s": tied, "move": swap}
    return Costs(forward, backward, transfer, trial.gather, trial.reduce, weight_share=share, **exchanges)


_PLACES: dict[str, UpdatePlace] = {place.replace(" ", "-"): place for place in get_args(UpdatePlace)}


def _communicates(trial: Trial) -> bool:
    """Whether a pass of the trial brings sends and receives."""
    adds = any(one is not None for one in (trial.unshard, trial.tied, trial.update, trial.resident))
    return bool(adds or trial.communication or trial.transfer or trial.reduce_grad)


def trial_recipe(trial: Trial, given: Schedule | None = None, checked: Collection[str] | None = None) -> Recipe:
    """The recipe of a trial. Passes that take communication bring it with them.

    Args:
        trial: what to build.
        given: the schedule to begin with; ``None``: the family makes it.
        checked: as for ``trial_problems``.

    Raises:
        ConfigError: the numbers, or the family with its sizes, are wrong.
    """
    start = _start(trial, given, differing(trial) if checked is None else checked)
    unshard, resident = trial.unshard, trial.resident
    residency = unshard if isinstance(unshard, int) else None
    return Recipe(
        start=start,
        receive_buffers=trial.receive_buffers if _communicates(trial) else None,
        lends_tied=trial.tied is not None,
        unshard=None if unshard is None else Unshard(residency, trial.prefetch),
        reduce_grad=ReduceGrad(trial.gradient_buffers) if trial.reduce_grad else None,
        updates=None if trial.update is None else _PLACES[trial.update],
        residence=None if resident is None else Residence(resident, is_bytes=False),
        moves=Moves(balance=trial.balance, offload=trial.offload, budget_bytes=trial.budget),
    )


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        schedule: that was built, verified.
        trace: of it, on the clock of the costs.
        delay: of the step by what moves to partners or to the host; ``None`` where the trial adds no such moves.
    """

    schedule: Schedule
    trace: Trace
    delay: float | None

    @cached_property
    def accounts(self) -> tuple[BubbleAccount, ...]:
        """For each rank where its time goes."""
        return account_bubble(self.schedule, self.trace)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """What a schedule comes to, for programs.

        Keys: ``rank_by_stage``, ``num_microbatches``, ``level``, ``makespan``, ``bubble_overhead`` (idle / ideal),
        ``bubble_fraction`` (idle / total), ``memory`` (for each rank, in units of one micro-batch's activations on all
        its stages, as ``pipeloom families --json`` has it), ``peak_stage_inputs`` (for each rank, what leaves counted
        as if it stayed), ``peak_held`` (for each rank what it holds at once: its own, and what its partner evicted, if
        partners are known), ``num_evictions`` and ``num_offloads`` (for each rank), ``partners`` (for each rank the
        rank to which it evicts, or null), ``num_recomputed``, ``num_unshards``, ``num_reductions``, ``num_swaps_in``
        and ``exposed_data_parallel`` (for each rank: forwards that run again, gathers, reductions, whole stages swapped
        in, and how long it waits for collectives), ``gradients_final_at`` (for each stage; null where nothing trains).
        """
        schedule, trace = self.schedule, self.trace
        summary = summarize(trace)
        held = Ledger.of_kept(schedule, KeptBytes()).on(schedule.num_ranks, trace.spans.start_s, trace.spans.end_s)
        return {
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
            "exposed_data_parallel": [one.exposed_data_parallel_s for one in self.accounts],
            "gradients_final_at": [summary.gradients_final_s.get(stage) for stage in range(schedule.num_stages)],
        }

    def lines(self) -> dict[str, str]:
        """The figures for people, a line for each; of actions that there are none of, no line."""
        tree, delay = self.figures, self.delay
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
            room = ": room unknown, so that none waits for it" if self.schedule.max_resident is None else ""
            lines["stages swapped in"] = _by_rank(tree["num_swaps_in"]) + room
        if gathers or reduces:
            lines["exposed for them"] = _by_rank(tree["exposed_data_parallel"])
        if final := [time for time in tree["gradients_final_at"] if time is not None]:
            lines["gradients final at"] = f"{' '.join(f'{time:g}' for time in final)} (by stage)"
        return lines


_COUNTED = {
    "num_evictions": Kind.EVICT,
    "num_offloads": Kind.OFFLOAD,
    "num_recomputed": Kind.RECOMPUTE,
    "num_unshards": Kind.UNSHARD,
    "num_reductions": Kind.REDUCE_GRAD,
    "num_swaps_in": Kind.SWAP_IN,
}


def try_out(
    trial: Trial, recipe: Recipe, sizes: Sizes | None = None, checked: Collection[str] | None = None
) -> Outcome:
    """Build a schedule and run it on the clock of a trial's costs.

    Args:
        trial: has the costs.
        recipe: ``trial_recipe``, or that of a run.
        sizes: bytes of a run's stages; ``None``: each keeps 1 of each micro-batch.
        checked: as for ``trial_problems``.

    Raises:
        UserError: the recipe cannot be built, or a field has no effect on the schedule.
    """
    plain = build(replace(recipe, moves=Moves(), given=None), sizes)
    _refuse_idle(trial, plain, differing(trial) if checked is None else checked)
    costs = unit_costs(trial, plain.num_slices)
    timing = nominal if sizes is not None else lambda *_: PlacedBy(costs.seconds)
    is_plain = not recipe.moves.is_any and recipe.given is None
    schedule = plain if is_plain else build(recipe, sizes, timing)
    trace = simulate(schedule, costs)
    # What moves cost; what a schedule that was given with them would take without is not known.
    delay = None if is_plain else trace.end_s - simulate(plain, costs).end_s
    return Outcome(schedule, trace, delay)


def _by_rank(values: Sequence[float]) -> str:
    return f"{' '.join(f'{value:g}' for value in values)} (by rank)"


def trial_title(trial: Trial, name: str, schedule: Schedule) -> str:
    """A schedule in one line.

    Args:
        trial: what was built.
        name: of the family or the file.
        schedule: that was built.
    """
    backward = f", backward {trial.backward:g}" if schedule.first_backward_stage < schedule.num_stages else ""
    cut = f" of {count(schedule.num_slices, 'token slice')}" if schedule.num_slices > 1 else ""
    transfer = f", transfer {trial.transfer:g}" if trial.transfer else ""
    passes = passes_of(trial.keep, balance=trial.balance, offload=trial.offload)
    return (
        f"{name}{passes}: {count(schedule.num_stages, 'stage')} on "
        f"{count(schedule.num_ranks, 'pipeline rank')}, {count(schedule.num_microbatches, 'micro-batch')}{cut}; "
        f"forward {trial.forward:g}{backward}{transfer}"
    )
