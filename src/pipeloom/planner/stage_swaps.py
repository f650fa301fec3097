"""Partition of a model that is swapped through one device, and the number of micro-batches that hides the swaps.

ATOM (arXiv 2403.10504) cuts a list of layers so that two neighboring segments fit the device and executing one hides
the load of the next. Here with C micro-batches, stages i and i + 1 wait for each other

    forward    max(0, load(i + 1) + store(i) - C forward(i))
    backward   max(0, load(i) + store(i + 1) - C backward(i + 1))

where the bytes of an update move with the backward, or with the next forward. The best cut has the smallest sum of
these waits, found by dynamic programming over pairs of neighbors. It is then simulated, with similar cuts, since the
sum ignores memory for more than two stages and both ends of the step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipeloom.analysis.summary import communication, summarize
from pipeloom.cost.costs import StageCosts
from pipeloom.cost.exchanges import step_terms
from pipeloom.cost.placed import Placed
from pipeloom.errors import UserError
from pipeloom.families import Choice
from pipeloom.passes import place_of_updates
from pipeloom.predict.stage_swaps import swapped_amounts, swapped_costs, with_updates
from pipeloom.recipe import Recipe, Residence, build
from pipeloom.schedule import Schedule
from pipeloom.schedule.ledger import KeptBytes
from pipeloom.schedule.stage_swaps import Amounts, Content, stage_sizes
from pipeloom.simulation import simulate
from pipeloom.terminal.words import format_bytes
from pipeloom.trace import Trace

_WEIGHTS = Content.WEIGHTS | Content.BORROWED
_MOST_SIMULATED = 120
"""Cuts to simulate for one number of micro-batches."""
_FEW_NEIGHBORS = 4
"""Most adjacent stages whose bytes are tried as a smaller budget."""
_ENOUGH_MICROBATCHES = 4
"""Micro-batches that represent larger numbers in the simulations of cuts, each taking proportionally longer."""


@dataclass(frozen=True, kw_only=True)
class SwapQuestion:
    """Costs of the pieces of a model, and of the device through which it is swapped.

    Attributes:
        forward_s: for each piece, seconds of its forward for one micro-batch.
        backward_s: for each piece, seconds of its backward.
        update_s: for each piece, seconds of the optimizer's step.
        pieces: for each piece, bytes of weights, gradient and state.
        budget: most bytes of stages on the device at once.
        bytes_per_s: between host and device, in each direction.
        needs_norm: whether updates need the norm of the whole gradient (``place_of_updates``).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    pieces: tuple[Amounts, ...]
    budget: int
    bytes_per_s: float
    needs_norm: bool = True

    @cached_property
    def _sums(self) -> tuple[list[list[float]], list[Amounts]]:
        """Prefix sums over the pieces: seconds of forward, backward and update; and bytes."""
        seconds = [[0.0, *accumulate(of)] for of in (self.forward_s, self.backward_s, self.update_s)]
        return seconds, [Amounts(), *accumulate(self.pieces, _add)]

    def stage(self, begin: int, end: int) -> "SwapStage":
        """The stage of the pieces from ``begin`` to before ``end``."""
        seconds, sizes = self._sums
        forward_s, backward_s, update_s = (of[end] - of[begin] for of in seconds)
        return SwapStage(forward_s, backward_s, update_s, _add(sizes[end], sizes[begin].times(-1)))

    def stages(self, partition: Sequence[int]) -> "list[SwapStage]":
        """The stages of a cut."""
        return [self.stage(begin, end) for begin, end in pairwise(accumulate(partition, initial=0))]

    def taken_in(self, begin: int, end: int) -> float:
        """Bytes of the tied gradient that the first stage receives from a head in another stage."""
        return self.pieces[-1].lent_gradient if begin == 0 and end < len(self.pieces) else 0.0


def question_of(placed: Placed, budget: int, *, needs_norm: bool) -> SwapQuestion:
    """Closed-form costs of a run on one device; its pieces are embedding, layers and head.

    Raises:
        UserError: the cluster's file has no link to the host.
    """
    software, cluster, layers = placed.software, placed.cluster, placed.run.shape.layers
    run = replace(placed.run, pp=1, loops=layers + 2, layers_by_stage=(0, *(1,) * layers, 0))
    pieces = placed.of(run)
    update_s = step_terms(pieces, max(pieces.costs.backward_s)).optimizer_s
    costs = with_updates(swapped_costs(pieces.costs, pieces), pieces, update_s)
    return SwapQuestion(
        forward_s=costs.forward_s,
        backward_s=costs.backward_s,
        update_s=costs.update_s,
        pieces=swapped_amounts(run, software),
        budget=budget,
        bytes_per_s=cluster.host_link.bytes_per_s,
        needs_norm=needs_norm,
    )


def _add(one: Amounts, other: Amounts) -> Amounts:
    return Amounts(**{name: value + getattr(other, name) for name, value in vars(one).items()})


class SwapStage(NamedTuple):
    """Costs of a stage: seconds for one micro-batch and for its update, and bytes."""

    forward_s: float
    backward_s: float
    update_s: float
    amounts: Amounts


@dataclass(frozen=True)
class SwapPlan:
    """A cut into stages, a number of micro-batches, and their simulated step.

    Attributes:
        partition: pieces of each stage.
        num_microbatches: of a step.
        schedule: of the step; its ``max_resident`` is the budget, or less where that is faster.
        trace: of its simulation.
    """

    partition: tuple[int, ...]
    num_microbatches: int
    schedule: Schedule
    trace: Trace

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.trace.end_s

    @property
    def utilization(self) -> float:
        """Share of the step in which the device computes."""
        return 1 - summarize(self.trace).bubble_fraction

    @property
    def hidden(self) -> float:
        """Share of the time on the lanes between host and device that compute hides."""
        uses = communication(self.trace)
        busy_s = sum(use.busy_s for use in uses)
        return sum(use.hidden_s for use in uses) / busy_s if busy_s else 1.0


def plan_swaps(
    question: SwapQuestion,
    microbatches: Iterable[int],
    *,
    num_stages: int | None = None,
    utilization: float = 0.95,
) -> SwapPlan:
    """The cut with the fewest micro-batches that reaches a utilization; if none does, the one with the highest.

    Args:
        question: costs and budget.
        microbatches: numbers to try, ascending.
        num_stages: of the cut; ``None`` for any number.
        utilization: share of the step in which the device computes.

    Raises:
        UserError: a piece is larger than the budget, or no cut into so many stages fits.
    """
    _check(question, num_stages)
    best: SwapPlan | None = None
    for count in microbatches:
        plan = _best_plan(question, count, num_stages)
        if best is None or plan.utilization > best.utilization:
            best = plan
        if plan.utilization >= utilization:
            return plan
    assert best is not None, "at least one number of micro-batches"
    return best


def swapped_step(question: SwapQuestion, partition: Sequence[int], num_microbatches: int) -> SwapPlan:
    """The simulated step of a cut, breadth-first on one device.

    Raises:
        UserError: a stage does not fit into the budget.
    """
    forward_s, backward_s, update_s, amounts = zip(*question.stages(partition), strict=True)
    recipe = Recipe(
        start=Choice(family="breadth-first", pp=1, loops=len(partition), num_microbatches=num_microbatches),
        updates=place_of_updates(len(partition), needs_norm=question.needs_norm),
        residence=Residence(question.budget),
    )
    schedule = build(recipe, _StageSizes(amounts))
    moves = tuple(one.times(1 / question.bytes_per_s) for one in amounts)
    costs = StageCosts(forward_s, backward_s, moves=moves, update_s=update_s)
    return SwapPlan(tuple(partition), num_microbatches, schedule, simulate(schedule, costs))


class _StageSizes(NamedTuple):
    """``Sizes`` of a recipe that moves no activations."""

    amounts: tuple[Amounts, ...]

    def kept(self, _schedule: Schedule) -> KeptBytes:
        return KeptBytes()

    def stages(self) -> tuple[Amounts, ...]:
        return self.amounts


def _check(question: SwapQuestion, num_stages: int | None) -> None:
    largest = max(one.total + question.taken_in(n, n + 1) for n, one in enumerate(question.pieces))
    if largest > question.budget:
        raise UserError(
            f"the largest piece of the model takes {format_bytes(largest)}, the budget is "
            f"{format_bytes(question.budget)}; use a larger budget"
        )
    if num_stages is not None and next(_cuts(question, 1, num_stages), None) is None:
        raise UserError(
            f"no partition into {num_stages} stages has every stage within {format_bytes(question.budget)}; use more "
            "stages or a larger budget"
        )


def _best_plan(question: SwapQuestion, count: int, num_stages: int | None) -> SwapPlan:
    """The best cut by simulation: local search from the cuts with the smallest sums of waits."""
    few = min(count, _ENOUGH_MICROBATCHES)
    alike = _with_longer_visits(question, count / few)
    known: dict[tuple[int, ...], float] = {}

    def step_s(partition: tuple[int, ...]) -> float:
        if partition not in known:
            known[partition] = swapped_step(alike, partition, few).step_s
        return known[partition]

    starts = sorted(_cuts(question, count, num_stages), key=lambda cut: cut[0])[: _MOST_SIMULATED // 4]
    best = min((partition for _, partition in starts), key=step_s)
    while len(known) < _MOST_SIMULATED:
        following = min(_near(question, best, num_stages), key=step_s, default=best)
        if step_s(following) >= step_s(best):
            break
        best = following
    finest = (1,) * len(question.pieces) if num_stages is None else best
    plans = [
        swapped_step(replace(question, budget=room), partition, count)
        for partition in dict.fromkeys((best, finest))
        for room in _rooms(question, partition)
    ]
    return min(plans, key=lambda plan: plan.step_s)


def _rooms(question: SwapQuestion, partition: Sequence[int]) -> list[int]:
    """Budgets to try: the full one, and smaller ones for a few adjacent stages.

    Stages that stay on the device between forward and backward are loaded in the forward pass only and stored in the
    backward pass only. If the link is always busy, it is faster to use both directions in each pass.
    """
    sizes = stage_sizes([stage.amounts for stage in question.stages(partition)])
    few = range(2, min(_FEW_NEIGHBORS, len(sizes)) + 1)
    least = {max(sum(sizes[begin : begin + number]) for begin in range(len(sizes) - number + 1)) for number in few}
    return [question.budget, *sorted(room for room in least if room < question.budget)]


def _with_longer_visits(question: SwapQuestion, factor: float) -> SwapQuestion:
    """The question with longer micro-batches, so that fewer of them take as long on each stage."""
    forward_s, backward_s = (tuple(factor * s for s in of) for of in (question.forward_s, question.backward_s))
    return replace(question, forward_s=forward_s, backward_s=backward_s)


def _near(question: SwapQuestion, partition: tuple[int, ...], num_stages: int | None) -> Iterator[tuple[int, ...]]:
    """Feasible cuts with one border moved, or, if the number of stages is free, removed or added."""
    borders = list(accumulate(partition))[:-1]
    pieces = sum(partition)
    found = {(*borders[:n], border + step, *borders[n + 1 :]) for n, border in enumerate(borders) for step in (-1, 1)}
    if num_stages is None:
        found |= {(*borders[:n], *borders[n + 1 :]) for n in range(len(borders))}
        found |= {tuple(sorted({*borders, border})) for border in range(1, pieces)}
    for cut in sorted(found):
        sizes = tuple(end - begin for begin, end in pairwise((0, *cut, pieces)))
        if min(sizes) > 0 and all(_fits(question, *ends) for ends in pairwise((0, *cut, pieces))):
            yield sizes


def _fits(question: SwapQuestion, begin: int, end: int) -> bool:
    return question.stage(begin, end).amounts.total + question.taken_in(begin, end) <= question.budget


def _cuts(question: SwapQuestion, count: int, num_stages: int | None) -> Iterator[tuple[float, tuple[int, ...]]]:
    """For each feasible number of stages the smallest sum of waits in seconds, and its cut."""
    pieces = len(question.pieces)
    stage = {
        (begin, end): question.stage(begin, end)
        for begin in range(pieces)
        for end in range(begin + 1, pieces + 1)
        if _fits(question, begin, end)
    }
    wait_s = {
        (begin, middle, end): _wait_s(question, first, stage[middle, end], count)
        for (begin, middle), first in stage.items()
        for end in range(middle + 1, pieces + 1)
        if (middle, end) in stage
    }
    known = {(0, end): (0.0, (end,)) for end in range(1, pieces + 1) if (0, end) in stage}
    for number in range(1, pieces + 1):
        whole = [known[begin, pieces] for begin in range(pieces) if (begin, pieces) in known]
        if whole and num_stages in (None, number):
            yield min(whole)
        following: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (begin, middle, end), more_s in wait_s.items():
            if (begin, middle) in known:
                before_s, sizes = known[begin, middle]
                found = before_s + more_s, (*sizes, end - middle)
                following[middle, end] = min(found, following.get((middle, end), found))
        known = following


def _wait_s(question: SwapQuestion, first: SwapStage, second: SwapStage, count: int) -> float:
    """Seconds that two adjacent stages wait for each other; all of their swaps if both exceed the budget."""
    changed, gradient = Content.WEIGHTS | Content.STATE, Content.GRADIENT
    forward_s, backward_s = count * first.forward_s, count * second.backward_s
    if question.needs_norm:
        there = second.amounts.of(_WEIGHTS | changed | gradient) + first.amounts.of(changed)
        back = first.amounts.of(_WEIGHTS) + second.amounts.of(gradient | Content.LENT_GRADIENT)
        forward_s += first.update_s
    else:
        there = second.amounts.of(_WEIGHTS)
        back = first.amounts.of(_WEIGHTS | changed) + second.amounts.of(changed | Content.LENT_GRADIENT)
        backward_s += second.update_s
    there_s, back_s = there / question.bytes_per_s, back / question.bytes_per_s
    if first.amounts.total + second.amounts.total > question.budget:
        # One stage has to leave before the other loads, so no swap is hidden.
        return there_s + back_s
    return max(0.0, there_s - forward_s) + max(0.0, back_s - backward_s)
