"""Token slices of a described run: which lengths make its step fastest, beside even ones."""

from dataclasses import dataclass, replace

from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.errors import UserError
from pipeloom.planner.slice_lengths import LatencyTable, default_unit, judged_slices
from pipeloom.predict.step import Order, SimulatedStep, simulate_step
from pipeloom.workload.run import Run

_MOST_UNITS = 128
_MOST_EVEN = 64


@dataclass(frozen=True)
class EvenSlices:
    """A step with even slices.

    Attributes:
        number: of slices.
        formula_s: seconds of the pipeline by the formula of ``pipeloom.planner.slice_lengths``.
        step: simulated.
    """

    number: int
    formula_s: float
    step: SimulatedStep


@dataclass(frozen=True)
class SlicePlan:
    """The slices with which a step is fastest.

    Attributes:
        lengths: tokens of each; one for whole sequences.
        formula_s: seconds of the pipeline by the formula.
        step: simulated.
        even: the same for even slices, by their number; first whole sequences.
    """

    lengths: tuple[int, ...]
    formula_s: float
    step: SimulatedStep
    even: tuple[EvenSlices, ...]


def modelled_table(placed: Placed, unit: int) -> LatencyTable:
    """What slices of a run's sequences take by the cost model, their messages as the program has them.

    Raises:
        UserError: the cluster has not so many devices.
    """
    model = SliceModel(placed)
    return LatencyTable(model.seconds, placed.run.seq, unit, model.through_s)


def plan_slices(placed: Placed, order: Order, unit: int | None = None) -> SlicePlan:
    """Lengths from the dynamic programme, judged by the simulator for the family that runs.

    Args:
        placed: what is trained; its slices do not count.
        order: which schedule.
        unit: tokens that every length is a multiple of; ``None`` for the smallest that cuts a sequence into no more
            than 128.

    Raises:
        UserError: the unit does not divide the sequence, or tensor parallelism not the unit; or the run cannot be
            simulated.
    """
    run = placed.run
    unit = _unit(run, unit)
    table = modelled_table(placed, unit)
    rounds = order.choice.num_microbatches * order.choice.loops
    steps: dict[tuple[int, ...], SimulatedStep] = {}

    def step_of(lengths: tuple[int, ...]) -> SimulatedStep:
        # Programme, judgement and the even ones ask for some lengths twice, and each is a whole simulation.
        if lengths not in steps:
            sliced = replace(run, slices=lengths if len(lengths) > 1 else ())
            chosen = replace(order, choice=replace(order.choice, num_slices=len(lengths)))
            steps[lengths] = simulate_step(placed.of(sliced), chosen)
        return steps[lengths]

    best, _ = judged_slices(table, run.pp, rounds, lambda lengths: step_of(lengths).prediction.step_time_s)
    even = [table.even(number) for number in _numbers(table.num_units)]
    return SlicePlan(
        best.lengths,
        best.step_s(run.pp, rounds),
        step_of(best.lengths),
        tuple(EvenSlices(len(one.lengths), one.step_s(run.pp, rounds), step_of(one.lengths)) for one in even),
    )


def _unit(run: Run, unit: int | None) -> int:
    if unit is not None:
        if unit < 1 or run.seq % unit or unit % run.tp:
            raise UserError(
                f"the unit must divide data.seq_len {run.seq} and be a multiple of layout.tp {run.tp}, found {unit}"
            )
        return unit
    return default_unit(run.seq, run.tp, _MOST_UNITS)


def _numbers(num_units: int) -> list[int]:
    """Powers of two, and what is as many as there can be."""
    powers = [2**power for power in range(num_units.bit_length()) if 2**power <= min(num_units, _MOST_EVEN)]
    # The most slices that a unit allows, though not a power of two, are the other end of what can be chosen.
    return powers if num_units > _MOST_EVEN or num_units in powers else [*powers, num_units]
