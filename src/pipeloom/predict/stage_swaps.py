"""Bytes, seconds and memory of a run whose stages are swapped through one device."""

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.matrices import state_of_rank
from pipeloom.cost.memory import Memory, state_bytes
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.cost.stages import layers_of_pieces, placement_of, stage_layers, stage_parameters
from pipeloom.schedule import Placement, Row, Schedule
from pipeloom.schedule.ledger import HeldBytes
from pipeloom.schedule.stage_swaps import Amounts, Content, StageStay, stage_stays
from pipeloom.workload.run import Run


def swapped_amounts(run: Run, software: Software) -> tuple[Amounts, ...]:
    """For each stage the swapped bytes: of weights, gradient and optimizer state, and of a borrowed tied matrix.

    Those of a rank's experts, where they alone are swapped (``Run.swapped``).
    """
    found: list[Amounts] = []
    part = run.swapped
    for stage, parameters in enumerate(stage_parameters(part, software)):
        state = state_bytes(part, parameters, software)
        kept = state.optimizer_bytes + state_of_rank(part, software, 0, (stage,))
        found.append(Amounts(weights=state.weights_bytes, gradient=state.gradients_bytes, state=kept))
    _, head = stage_layers(run, software)
    if run.shape.tied and head > 0 and part is run:
        lent = state_bytes(run, run.shape.embedding_parameters, software)
        found[head] = replace(found[head], borrowed=lent.weights_bytes, lent_gradient=lent.gradients_bytes)
    return tuple(found)


def with_alike_stages(run: Run, software: Software) -> Run:
    """The run with a partition into stages of nearly equal bytes, unless it has ``layers_by_stage``."""
    if run.layers_by_stage is not None:
        return run
    pieces = (0, *[1] * run.shape.layers, 0)
    alone = replace(run, loops=len(pieces), layers_by_stage=pieces, placement="looped")
    sizes = [int(amounts.total) for amounts in swapped_amounts(alone, software)]
    return replace(run, layers_by_stage=layers_of_pieces(fastest_partition(sizes, placement_of(run))))


def swapped_costs(costs: StageCosts, placed: Placed) -> StageCosts:
    """Add the seconds of moving each stage to costs.

    Args:
        costs: of the same run without swaps.
        placed: the run.

    Raises:
        UserError: the cluster's file has no ``[host]`` link.
    """
    link = placed.cluster.host_link
    each = swapped_amounts(placed.run, placed.software)
    return replace(costs, moves=tuple(amounts.times(1 / link.bytes_per_s) for amounts in each))


def with_updates(costs: StageCosts, placed: Placed, update_s: float) -> StageCosts:
    """Add the seconds of updating each stage, for schedules with updates.

    Args:
        costs: of the same run.
        placed: the run.
        update_s: seconds of updating all stages of a rank, of the slowest one.
    """
    most = max(placed.trained_rank_parameters)
    # In proportion to parameters: an update reads and writes each of them once.
    return replace(costs, update_s=tuple(update_s * held / most for held in placed.trained_parameters))


def swapped_memory(memory: Sequence[Memory], run: Run, software: Software, schedule: Schedule) -> tuple[Memory, ...]:
    """The memory of each rank whose stages are swapped: maximal weights, gradients and state of resident stages.

    A stage is resident from its swap in to its swap out, in the order of the row. Where experts alone are swapped, the
    rest of ``memory`` stays.
    """
    amounts, is_whole = swapped_amounts(run, software), run.swapped is run
    found: list[Memory] = []
    for rank, (held, row) in enumerate(zip(memory, schedule.rows, strict=True)):
        most = _most_resident(row, amounts)
        bytes_of = dict[str, float]()
        for name, contents in _OF_MEMORY.items():
            own = sum(amounts[stage].of(contents) for stage in schedule.placement.stages_of(rank))
            rest = 0.0 if is_whole else getattr(held, name) - own
            bytes_of[name] = rest + sum(amounts[stay.stage].of(stay.held & contents) for stay in most)
        found.append(replace(held, **bytes_of))
    return tuple(found)


def swapped_held(held: HeldBytes, run: Run, software: Software, placement: Placement) -> HeldBytes:
    """The sizes of a ledger for a run whose stages, or experts, are swapped."""
    amounts = swapped_amounts(run, software)
    always: tuple[float, ...] = (software.reserve_bytes,)
    if run.swapped is not run:
        always = tuple(
            before - sum(amounts[stage].total for stage in placement.stages_of(rank))
            for rank, before in enumerate(held.always_bytes)
        )
    return replace(held, always_bytes=always, stages=amounts)


_OF_MEMORY = {
    "weights_bytes": Content.WEIGHTS | Content.BORROWED,
    "gradients_bytes": Content.GRADIENT | Content.LENT_GRADIENT,
    "optimizer_bytes": Content.STATE,
}
"""Field of ``Memory`` -> its contents of a stage."""


def _most_resident(row: Row, amounts: Sequence[Amounts]) -> Sequence[StageStay]:
    """The stays of a row at the moment at which they take most."""
    stays = stage_stays(row)
    return max(
        ([stay for stay in stays if stay.first <= now.first <= stay.last] for now in stays),
        key=lambda here: sum(amounts[stay.stage].of(stay.held) for stay in here),
    )
