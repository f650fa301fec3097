"""Lengths of token slices: TeraPipe's dynamic program (arXiv 2102.07988, section 3.3), for any number of rounds.

A rank runs all slices of a step, and the last rank starts when the first slice has passed the others. With P
ranks, R rounds over a sequence (micro-batches x loops) and slices of t_i seconds, forward and backward, a step takes

    T = R sum_i t_i + (P - 1) max_i t_i

where a slice's seconds depend on its tokens and on those before it. For a given longest slice the sum is smallest by
dynamic programming over the end of each slice,

    S(e; t_max) = min over b < e of S(b; t_max) + t(e - b, b)  where t(e - b, b) <= t_max

and T is the minimum of R S(N; t_max) + (P - 1) t_max over all t_max. Lengths are multiples of a *unit* of tokens.

If messages overlap with compute, the sum excludes them, but t_max is the time of a slice from rank to rank, with its
messages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import nsmallest
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.errors import UserError
from pipeloom.predict.step import SimulatedStep, simulate_step
from pipeloom.recipe import Knobs
from pipeloom.workload.layout import even_slices

_MOST_UNITS = 128
"""Default for the most units of a sequence."""
_MOST_EVEN = 64
"""Even slices that ``plan_slices`` simulates for comparison."""
Seconds = NDArray[np.float64]
Latency = Callable[[Seconds, Seconds], Seconds]
"""(tokens of a slice, tokens before it), arrays of one shape -> seconds of its forward and backward on a rank."""


@dataclass(frozen=True)
class Slicing:
    """A sequence cut into slices.

    Attributes:
        lengths: tokens of each slice.
        seconds: of each slice, forward and backward on one rank.
        through_s: the same from rank to rank, with messages.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    through_s: tuple[float, ...]

    @property
    def sum_s(self) -> float:
        """Seconds of the whole sequence on one rank."""
        return sum(self.seconds)

    def step_s(self, num_ranks: int, rounds: int = 1) -> float:
        """Seconds of a step, by the formula above."""
        return rounds * self.sum_s + (num_ranks - 1) * max(self.through_s)


def default_unit(num_tokens: int, multiple: int, most_units: int) -> int:
    """The smallest multiple of ``multiple`` that cuts a sequence into at most ``most_units``; else the sequence."""
    fitting = (n for n in range(multiple, num_tokens + 1, multiple) if num_tokens % n == 0)
    return next((unit for unit in fitting if num_tokens // unit <= most_units), num_tokens)


class LatencyTable:
    """Seconds of every slice that a sequence may have.

    Args:
        latency: of a slice.
        num_tokens: of the sequence.
        unit: tokens that every length is a multiple of; divides ``num_tokens``.
        through: of a slice from rank to rank, with messages that overlap with compute; ``None`` for ``latency``.

    Attributes:
        unit: as given.
        num_units: of the sequence.
        by_end: [end, begin] in units, seconds of the slice between them; infinite for ``end <= begin``.
        through_by_end: the same from rank to rank.
    """

    def __init__(self, latency: Latency, num_tokens: int, unit: int = 1, through: Latency | None = None) -> None:
        assert num_tokens % unit == 0, f"units of {unit} tokens do not make {num_tokens}"
        self.unit = unit
        self.num_units = num_tokens // unit
        # One call for all slices: the latency works on arrays.
        ends, begins = np.tril_indices(self.num_units + 1, -1)
        places = (((ends - begins) * unit).astype(np.float64), (begins * unit).astype(np.float64))
        self.by_end: Seconds = np.full((self.num_units + 1, self.num_units + 1), np.inf)
        self.by_end[ends, begins] = latency(*places)
        self.through_by_end = self.by_end
        if through is not None:
            self.through_by_end = np.full_like(self.by_end, np.inf)
            self.through_by_end[ends, begins] = through(*places)

    def slicing(self, bounds: Sequence[int]) -> Slicing:
        """The slices between bounds in units, from 0 to the end."""
        pairs = list(pairwise(bounds))
        lengths = tuple((end - begin) * self.unit for begin, end in pairs)
        seconds, through_s = (
            tuple(float(known[end, begin]) for begin, end in pairs) for known in (self.by_end, self.through_by_end)
        )
        return Slicing(lengths, seconds, through_s)

    def even(self, number: int) -> Slicing:
        """A number of slices, as even as units allow."""
        lengths = even_slices(self.num_units, number)
        return self.slicing([0, *np.cumsum(lengths).tolist()])

    def shortest(self, longest_s: float) -> Slicing | None:
        """The slices with the smallest sum, none longer than ``longest_s`` from rank to rank; ``None`` without any."""
        allowed = np.where(self.through_by_end <= longest_s, self.by_end, np.inf)
        best = np.zeros(self.num_units + 1)
        begin_of = np.zeros(self.num_units + 1, np.int64)
        for end in range(1, self.num_units + 1):
            sums = best[:end] + allowed[end, :end]
            begin_of[end] = sums.argmin()
            best[end] = sums[begin_of[end]]
        if not np.isfinite(best[-1]):
            return None
        bounds = [self.num_units]
        while bounds[-1]:
            bounds.append(int(begin_of[bounds[-1]]))
        return self.slicing(bounds[::-1])


def trade_offs(table: LatencyTable, num_ranks: int, rounds: int = 1) -> Iterator[Slicing]:
    """Pareto-optimal slicings in order of falling longest slice and rising sum.

    Stops when no slicing with a shorter longest slice can be faster than the best so far.

    Args:
        table: seconds of slices.
        num_ranks: pipeline ranks.
        rounds: of the sequence on each rank in a step: micro-batches x loops.
    """
    longest_s, best_s = np.inf, np.inf
    while (found := table.shortest(longest_s)) is not None and rounds * found.sum_s < best_s:
        yield found
        best_s = min(best_s, found.step_s(num_ranks, rounds))
        # The next smaller number, or the same slices would be found again.
        longest_s = np.nextafter(max(found.through_s), 0.0)


def best_slices(table: LatencyTable, num_ranks: int, rounds: int = 1) -> Slicing:
    """The slices with the shortest step by the formula; of equal steps, the one with the fewest slices."""
    return min(trade_offs(table, num_ranks, rounds), key=lambda one: one.step_s(num_ranks, rounds))


StepSeconds = Callable[[tuple[int, ...]], float]
"""Lengths in tokens -> seconds of a step."""


def judged_slices(
    table: LatencyTable, num_ranks: int, rounds: int, step_s: StepSeconds, most: int = 8
) -> tuple[Slicing, float]:
    """The slices with the shortest simulated step, among the best few by the formula and all even ones.

    The formula joins forward and backward, assumes equal ranks, and has no waits between messages; the simulation has
    none of these simplifications. Slices whose compute alone exceeds the best step so far are not simulated.

    Args:
        table: seconds of slices.
        num_ranks: pipeline ranks.
        rounds: of the sequence on each rank in a step: micro-batches x loops.
        step_s: simulates; at least ``rounds`` times the seconds of the sequence in the table.
        most: slicings by the formula to simulate.

    Returns:
        The slices, and the seconds of their step.
    """

    def formula_s(one: Slicing) -> float:
        return one.step_s(num_ranks, rounds)

    even = sorted((table.even(number) for number in range(1, table.num_units + 1)), key=formula_s)
    chosen = [*nsmallest(most, trade_offs(table, num_ranks, rounds), formula_s), *even]
    found, best_s = chosen[0], np.inf
    for one in {one.lengths: one for one in chosen}.values():
        if rounds * one.sum_s < best_s and (seconds := step_s(one.lengths)) < best_s:
            found, best_s = one, seconds
    return found, best_s


@dataclass(frozen=True)
class SlicedStep:
    """A step with its slices.

    Attributes:
        lengths: tokens of each slice; one for whole sequences.
        formula_s: seconds of the pipeline by the formula above.
        step: simulated.
    """

    lengths: tuple[int, ...]
    formula_s: float
    step: SimulatedStep


@dataclass(frozen=True)
class SlicePlan(SlicedStep):
    """The slices with the fastest step.

    Attributes:
        even: steps with even slices, in the order of their number, first whole sequences; without those that the
            schedule's budget or family does not allow.
    """

    even: tuple[SlicedStep, ...]


def modelled_table(placed: Placed, unit: int | None = None) -> LatencyTable:
    """Seconds of the slices of a run's sequences by the cost model, with the program's messages.

    Args:
        placed: the run.
        unit: tokens that every length is a multiple of; ``None`` for the smallest that cuts a sequence into no more
            than 128.

    Raises:
        UserError: the cluster has too few devices.
    """
    run, model = placed.run, SliceModel(placed)
    return LatencyTable(model.seconds, run.seq, unit or default_unit(run.seq, run.tp, _MOST_UNITS), model.through_s)


def plan_slices(placed: Placed, knobs: Knobs, unit: int | None = None, *, moves_by_seconds: bool = False) -> SlicePlan:
    """The fastest slices of a run: candidates of the dynamic program and even ones, compared by simulation.

    Args:
        placed: the run; its slices are ignored.
        knobs: of its schedule; its number of slices is ignored.
        unit: see ``modelled_table``.
        moves_by_seconds: see ``simulate_step``.

    Raises:
        UserError: the unit does not divide the sequence, or the tensor axis does not divide the unit; or the run cannot
            be simulated with any slices.
    """
    run = placed.run
    if unit is not None and (unit < 1 or run.seq % unit or unit % run.tp):
        raise UserError(
            f"the unit must divide data.seq_len {run.seq} and be a multiple of layout.tp {run.tp}, found {unit}"
        )
    table = modelled_table(placed, unit)
    rounds = knobs.choice.num_microbatches * knobs.choice.loops

    @cache  # the best and the even slices share some lengths, and each takes a whole simulation
    def step_of(lengths: tuple[int, ...]) -> SimulatedStep:
        sliced = replace(run, slices=lengths if len(lengths) > 1 else ())
        chosen = replace(knobs, choice=replace(knobs.choice, num_slices=len(lengths)))
        return simulate_step(placed.of(sliced), chosen, moves_by_seconds=moves_by_seconds)

    def step_s(lengths: tuple[int, ...]) -> float:
        try:
            return step_of(lengths).prediction.step_time_s
        except UserError:  # for example, a budget is too small for whole sequences; if all fail, the best one raises it
            return np.inf

    def step(one: Slicing) -> SlicedStep:
        return SlicedStep(one.lengths, one.step_s(run.pp, rounds), step_of(one.lengths))

    best, _ = judged_slices(table, run.pp, rounds, step_s)
    found = step(best)
    even = [table.even(number) for number in _numbers(table.num_units)]
    possible = tuple(step(one) for one in even if step_s(one.lengths) < np.inf)
    return SlicePlan(found.lengths, found.formula_s, found.step, possible)


def _numbers(num_units: int) -> list[int]:
    """Numbers of even slices to compare: powers of two, and one slice for each unit."""
    powers = [2**power for power in range(num_units.bit_length()) if 2**power <= min(num_units, _MOST_EVEN)]
    # The largest number that the unit allows completes the range, although it is no power of two.
    return powers if num_units > _MOST_EVEN or num_units in powers else [*powers, num_units]
