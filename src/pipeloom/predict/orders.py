"""An order of compute actions for the predicted seconds of a run, and the lower bound of all orders."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeloom.cost.placed import Placed
from pipeloom.errors import ConfigError
from pipeloom.orders.search import FoundOrder, search_order
from pipeloom.orders.work import Work
from pipeloom.predict.memory import activation_room
from pipeloom.predict.places import shared_links
from pipeloom.predict.sizes import ClosedSizes
from pipeloom.predict.step import (
    SimulatedStep,
    compute_schedule,
    placed_in,
    recipe_of,
    simulate_step,
    with_collectives,
)
from pipeloom.recipe import Knobs, communicating
from pipeloom.schedule import Schedule


def order_problems(placed: Placed, knobs: Knobs) -> Iterator[str]:
    """Why no order can be searched for a run, a sentence each."""
    run, moves = placed.run, knobs.moves
    if not placed.software.has_lanes:
        yield f"an order is for pipeloom alone, and {placed.software.name} has its own"
    if placed.placement.num_ranks == 1:
        yield "an order is of pipeline ranks that wait for each other, found layout.pp 1"
    taken = {
        "layout.token_slices": run.slices or knobs.choice.num_slices > 1,
        "training.freeze_layers": run.frozen_pieces,
        "adapter.rank": run.adapter,
        "schedule.keep": knobs.choice.keep is not None,
        "schedule.balance": moves.balance,
        "schedule.offload": moves.offload,
        "schedule.device_budget": knobs.device_budget is not None,
        "schedule.file": knobs.given is not None,
    }
    for name in (name for name, is_set in taken.items() if is_set):
        yield f"an order is searched for runs without {name}; leave one of both out"


def order_work(placed: Placed, knobs: Knobs, room: Sequence[float]) -> Work:
    """The work of a run's step.

    Args:
        placed: the run, its cluster and its program.
        knobs: choices for its schedule; the order of the family does not count.
        room: for each rank the bytes for activations.

    Raises:
        ConfigError: no order can be searched; with every reason.
    """
    if problems := list(order_problems(placed, knobs)):
        raise ConfigError(problems, "the search of an order")
    placed = placed_in(placed, knobs.choice)
    run, software = placed.run, placed.software

    def complete(schedule: Schedule) -> Schedule:
        return communicating(recipe_of(run, software, replace(knobs, found=schedule)))

    start, sizes = compute_schedule(knobs.choice), ClosedSizes.of(run, software, is_gpu=placed.cluster.device.is_gpu)
    return Work(
        start=start,
        complete=complete,
        costs=with_collectives(placed),
        sharing=shared_links(placed, placed.placement),
        kept=sizes.kept(start),
        room=room,
    )


def find_order(placed: Placed, knobs: Knobs, room: Sequence[float], tries: int) -> FoundOrder:
    """Search an order for a run (``search_order``).

    Raises:
        UserError: no order can be searched, or none fits.
    """
    return search_order(order_work(placed, knobs, room), tries)


def with_order(step: SimulatedStep, tries: int) -> SimulatedStep:
    """The step with the fastest order found that fits its devices, or the step itself if that is as fast.

    Raises:
        UserError: no order can be searched, or none fits.
    """
    found = find_order(step.placed, step.knobs, _room(step), tries)
    other = simulate_step(step.placed, replace(step.knobs, found=found.schedule))
    is_better = other.prediction.fits and other.prediction.step_time_s < step.prediction.step_time_s
    return other if is_better or not step.prediction.fits else step


def least_step_s(step: SimulatedStep) -> float:
    """Lower bound of the predicted step time over all orders of its placement that fit.

    Raises:
        ConfigError: no order can be searched, so there is no bound.
    """
    least_s = order_work(step.placed, step.knobs, _room(step)).least_s(step.schedule)
    return least_s + step.drain_s + step.prediction.terms.total_s


def _room(step: SimulatedStep) -> tuple[float, ...]:
    """For each rank the bytes that its devices have for activations."""
    sizes, prediction = step.sizes, step.prediction
    computed = compute_schedule(step.knobs.choice) if step.knobs.found is None else step.knobs.found
    pairs = zip(prediction.device_bytes, prediction.memory_by_rank, strict=True)
    free = [device - memory.total_bytes for device, memory in pairs]
    return activation_room(sizes.run, step.software, computed, free)
