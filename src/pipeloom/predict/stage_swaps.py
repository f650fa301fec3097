"""Bytes, seconds and memory of a run whose stages are swapped through one device."""

from dataclasses import replace

from pipeloom.cost.costs import StageCosts
from pipeloom.cost.matrices import state_of_rank
from pipeloom.cost.memory import Memory, state_bytes
from pipeloom.cost.partition import fastest_partition
from pipeloom.cost.placed import Placed
from pipeloom.cost.software import Software
from pipeloom.cost.stages import layers_of_pieces, placement_of, stage_layers, stage_parameters
from pipeloom.schedule import Schedule
from pipeloom.schedule.stage_swaps import Amounts, Content, stage_stays
from pipeloom.workload.run import Run


def swapped_amounts(run: Run, software: Software) -> tuple[Amounts, ...]:
    """For each stage the bytes of its weights, gradient and optimizer state, and of a borrowed tied matrix."""
    found: list[Amounts] = []
    for stage, parameters in enumerate(stage_parameters(run, software)):
        state = state_bytes(run, parameters, software)
        kept = state.optimizer_bytes + state_of_rank(run, software, 0, (stage,))
        found.append(Amounts(weights=state.weights_bytes, gradient=state.gradients_bytes, state=kept))
    _, head = stage_layers(run, software)
    if run.shape.tied and head > 0:
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


def swapped_memory(memory: Memory, run: Run, software: Software, schedule: Schedule) -> Memory:
    """The memory of a rank whose stages are swapped: maximal weights, gradients and state of resident stages.

    A stage is resident from its swap in to its swap out, in the order of the row.
    """
    amounts, stays = swapped_amounts(run, software), stage_stays(schedule.rows[0])
    most = max(
        ([stay for stay in stays if stay.first <= now.first <= stay.last] for now in stays),
        key=lambda here: sum(amounts[stay.stage].of(stay.held) for stay in here),
    )

    def held_bytes(content: Content) -> float:
        return sum(amounts[stay.stage].of(stay.held & content) for stay in most)

    return replace(
        memory,
        weights_bytes=held_bytes(Content.WEIGHTS | Content.BORROWED),
        gradients_bytes=held_bytes(Content.GRADIENT | Content.LENT_GRADIENT),
        optimizer_bytes=held_bytes(Content.STATE),
    )
