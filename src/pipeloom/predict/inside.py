"""Communication inside compute actions, whose parts no trace shows: messages of blocking programs, layers' gathers.

All seconds are those of one micro-batch.
"""

from dataclasses import replace

from pipeloom.cost.collectives import layer_collectives_s
from pipeloom.cost.pieces import InnerSeconds
from pipeloom.cost.placed import Placed
from pipeloom.cost.slices import SliceModel
from pipeloom.cost.software import Software


def blocked_s(placed: Placed) -> tuple[float, ...]:
    """For each rank the seconds of exchanges in its compute actions; 0 unless the program is blocking."""
    # Exchanges on lanes are part of the bubble account.
    if not placed.software.is_blocking:
        return (0.0,) * placed.placement.num_ranks
    return _more_s(placed, replace(placed.software, is_blocking=False))


def gathered_s(placed: Placed) -> tuple[InnerSeconds, ...]:
    """For each rank the gathers and reductions of its layers in compute actions; 0 unless layers are gathered there."""
    parts = [layer_collectives_s(placed.run, part, placed.software) for part in placed.parts]
    if not any(map(sum, parts)):
        return (InnerSeconds(0.0, 0.0),) * placed.placement.num_ranks
    exposed_s = _more_s(placed, replace(placed.software, gathers_layers=False))
    layers = [sum(placed.layers[stage] for stage in placed.placement.stages_of(rank)) for rank in range(len(parts))]
    busy_s = [number * sum(both_s) for number, both_s in zip(layers, parts, strict=True)]
    return tuple(map(InnerSeconds, busy_s, exposed_s))


def _more_s(placed: Placed, without: Software) -> tuple[float, ...]:
    """For each rank the seconds by which its compute actions are longer than with another program."""
    placement, run, by_stage = placed.placement, placed.run, [0.0] * placed.run.num_stages
    for sign, program in ((1, placed.software), (-1, without)):
        other = replace(placed, software=program)
        parts = (other.costs,)
        if run.slices:
            parts = SliceModel(other).costs(other.costs, run.slices).slices
        for part in parts:
            for stage, both_s in enumerate(zip(part.forward_s, part.backward_s, strict=True)):
                by_stage[stage] += sign * sum(both_s)
    return tuple(sum(by_stage[stage] for stage in placement.stages_of(rank)) for rank in range(placement.num_ranks))
