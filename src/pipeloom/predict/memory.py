"""Memory of each rank of a step: what its row holds at once, and how large those things are."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipeloom.analysis.matching import match_spans
from pipeloom.cost.analytic import gathered_parameters, layers_by_recompute, stage_layers, stage_parameters
from pipeloom.cost.kept import Kept
from pipeloom.cost.memory import (
    Memory,
    kept_logits,
    lent_bytes,
    logits_bytes,
    message_bytes,
    num_logits,
    stage_kept_bytes,
    stage_pending_bytes,
    stage_recomputed_bytes,
    state_bytes,
    working_bytes,
)
from pipeloom.cost.software import Software
from pipeloom.schedule import Level, Placement, Schedule
from pipeloom.schedule.clock import nominal_s, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.schedule.ledger import HeldBytes, KeptBytes, Ledger, most_in_rows
from pipeloom.schedule.peaks import Peaks
from pipeloom.schedule.sharding import unreduced_counts
from pipeloom.trace import Trace
from pipeloom.workload.run import Run


def memory_by_rank(
    run: Run, software: Software, schedule: Schedule, receive_buffers: int, trace: Trace | None = None
) -> tuple[Memory, ...]:
    """Memory of each pipeline rank's devices, with what the rows of a schedule hold: each part at its own peak.

    Args:
        run: what is trained.
        software: with what.
        schedule: as it is simulated.
        receive_buffers: for each directed edge, where the schedule has its communication.
        trace: of the schedule; what it moves to partners or to the host is counted by its times. ``None`` for those of
            a clock on which a backward takes two forwards and a transfer one.
    """
    _, unreduced = _whole_bytes(run, software)
    stages = [schedule.placement.stages_of(rank) for rank in range(schedule.num_ranks)]
    received = receive_buffers if schedule.level is Level.COMMUNICATION else 0
    rooms = [
        Room(
            received,
            min(schedule.max_gathered or len(own), len(own)),
            _most_unreduced(schedule, rank) if any(unreduced) else 0,
        )
        for rank, own in enumerate(stages)
    ]
    most_held = partial(most_in_rows, schedule)
    if moves_anything(schedule):
        most_held = partial(_most_on, schedule, _clock(schedule, trace))
    return _memory(run, software, rooms, schedule.placement, most_held)


class Room(NamedTuple):
    """What a rank will have room for once communication is added to its schedule.

    Attributes:
        receive_buffers: for each directed edge.
        gathered: stages that it has gathered at once, where weights are sharded at all times.
        unreduced: stages whose unreduced gradients it holds, where gradients are sharded.
    """

    receive_buffers: int
    gathered: int
    unreduced: int


def memory_with_room(run: Run, software: Software, schedule: Schedule | Peaks, room: Room) -> tuple[Memory, ...]:
    """The same of a schedule whose communication is not added yet, for a search that need not add it to see it.

    Args:
        run: what is trained.
        software: with what.
        schedule: compute actions, or the peaks of what they hold.
        room: of every rank.
    """
    most_held = schedule.most if isinstance(schedule, Peaks) else partial(most_in_rows, schedule)
    return _memory(run, software, [room] * schedule.placement.num_ranks, schedule.placement, most_held)


def held_for_backwards(run: Run, software: Software, schedule: Schedule) -> list[float]:
    """For each rank the most bytes that its row holds for backwards, the loss's part as well; nothing has left."""
    return most_in_rows(schedule, kept_with_loss(run, software))


def kept_with_loss(run: Run, software: Software) -> KeptBytes:
    """What micro-batches keep, with what the loss does."""
    if run.slices and software.has_lanes:
        return _kept_by_slice(run, software)
    whole, pending = stage_kept_bytes(run, software), stage_pending_bytes(run, software)
    _, head = stage_layers(run, software)
    whole[head] += kept_logits(run, software)
    # Between the halves of a backward the gradient of the logits is left of the loss.
    pending[head] += num_logits(run, software) * run.element_bytes
    return KeptBytes(whole, pending, stage_recomputed_bytes(run, software), run.slice_shares)


def _kept_by_slice(run: Run, software: Software) -> KeptBytes:
    """The same where sequences are cut: each slice as a sequence of its own, which leaves keys and values behind."""
    counts, _ = stage_layers(run, software)
    begins = accumulate(run.slices, initial=0)
    # How many layers stages have depends on the length of whole sequences.
    alone = [replace(run, layers_by_stage=counts, seq=length, slices=()) for length in run.slices]
    slices = [kept_with_loss(one, software) for one in alone]
    whole, pending, recomputed = (np.stack(columns, axis=1) for columns in list(zip(*slices, strict=True))[:3])
    for number, (one, begin) in enumerate(zip(alone, begins, strict=False)):
        for stage, layers in enumerate(layers_by_recompute(one, software)):
            for alike, count in layers:
                own = Kept(alike)
                # The cache has what layers that are not recomputed as a whole would keep of keys and values.
                whole[stage, number] -= count * own.key_values() * (alike.recompute != "full")
                whole[stage, number] += count * own.masks(begin) * (alike.recompute == "none")
    caches = [count * Kept(run).key_values() for count in counts]
    return KeptBytes(whole.tolist(), pending.tolist(), recomputed.tolist(), run.slice_shares, caches)


def kept_by_stage(run: Run, software: Software) -> list[float]:
    """For each stage what a micro-batch keeps there from forward to backward, the loss's part as well."""
    return kept_with_loss(run, software).by_stage(run.num_stages)


def _memory(
    run: Run,
    software: Software,
    rooms: Sequence[Room],
    placement: Placement,
    most_held: Callable[[KeptBytes], Sequence[float]],
) -> tuple[Memory, ...]:
    """Memory of each rank with its room, and with the most that it holds of what micro-batches keep."""
    _, head = stage_layers(run, software)
    by_stage = stage_parameters(run, software)
    working, logits_each = working_bytes(run, software), logits_bytes(run, software)
    gathered, unreduced = _whole_bytes(run, software)
    shares = run.slice_shares
    kept = most_held(kept_with_loss(run, software))
    # One slice computes at a time, and any may be the largest.
    working, logits_each = working * max(shares), logits_each * max(shares)
    found: list[Memory] = []
    for rank, room in enumerate(rooms):
        stages = placement.stages_of(rank)
        activations = kept[rank] + working
        logits = 0.0
        if head in stages:
            # What the loss keeps is part of its worst moment, and is counted once.
            logits = logits_each - max(shares) * kept_logits(run, software)
        state = state_bytes(run, sum(by_stage[stage] for stage in stages), software)
        lent = lent_bytes(run, software, stages)
        # Without a lane, gathers are layer by layer, and ``gathered_parameters`` has counted that for a stage.
        most_gathered = room.gathered if software.has_reduction_lane else 1
        found.append(
            Memory(
                weights_bytes=state.weights_bytes + lent.weights_bytes + _largest(gathered, stages, most_gathered),
                gradients_bytes=state.gradients_bytes
                + lent.gradients_bytes
                + _largest(unreduced, stages, room.unreduced),
                optimizer_bytes=state.optimizer_bytes,
                activations_bytes=activations,
                head_bytes=logits,
                buffers_bytes=_num_peers(placement, stages)
                * room.receive_buffers
                * message_bytes(run, software)
                * max(shares),
                reserve_bytes=software.reserve_bytes,
                fragmentation_bytes=software.fragmentation * (activations + logits),
            )
        )
    return tuple(found)


def _largest(by_stage: Sequence[float], stages: Sequence[int], number: int) -> float:
    """The sum of the largest few of a rank's stages."""
    return sum(sorted((by_stage[stage] for stage in stages), reverse=True)[:number])


def _most_unreduced(schedule: Schedule, rank: int) -> int:
    """Whole gradients at once: those of the row, and one more that is being reduced while the next one begins."""
    counts = [count for _, count in unreduced_counts(schedule.rows[rank])]
    room = schedule.gradient_buffers or len(schedule.placement.stages_of(rank))
    return min(max(counts, default=0) + 1, room)


def moves_anything(schedule: Schedule) -> bool:
    """Whether what backwards need leaves a rank in between."""
    return bool(schedule.facts.row.is_kind(*MOVE_KINDS).any())


def _clock(schedule: Schedule, trace: Trace | None) -> tuple[Seconds, Seconds]:
    if trace is None:
        return times(schedule, nominal_s)
    matched = match_spans(schedule, trace)
    return matched.start_s, matched.end_s


def _most_on(schedule: Schedule, clock: tuple[Seconds, Seconds], kept: KeptBytes) -> list[float]:
    """The same as ``most_in_rows`` on a clock: without what has left, with what is accepted."""
    held = Ledger.of_kept(schedule, kept).on(schedule.num_ranks, *clock)
    return [held.peak(rank) for rank in range(schedule.num_ranks)]


@lru_cache(maxsize=4096)
def _num_peers(placement: Placement, stages: Sequence[int]) -> int:
    """Other ranks from which a rank receives."""
    owner = placement.rank_by_stage
    near = {stage + step for stage in stages for step in (-1, 1) if 0 <= stage + step < len(owner)}
    return len({owner[stage] for stage in near} - {owner[stages[0]]})


def _whole_bytes(run: Run, software: Software) -> tuple[list[float], list[float]]:
    """For each stage the bytes of its whole weights and gradients where a device keeps only its share of them."""
    # With nothing shared out, or the optimizer's state alone, ``state_bytes`` has the whole weights and gradients.
    none = [0.0] * run.num_stages
    if run.dp == 1 or run.shard in ("none", "optimizer"):
        return none, none
    each = state_bytes(replace(run, shard="none"), 1.0, software)
    gathered, whole = gathered_parameters(run, software), stage_parameters(run, software)
    weights = [each.weights_bytes * held for held in gathered] if run.shard == "full" else none
    return weights, [each.gradients_bytes * held for held in whole] if software.has_reduction_lane else none


def held_bytes(run: Run, software: Software, schedule: Schedule) -> HeldBytes:
    """How large the things are that the ranks of a schedule hold; fragmentation is left out."""
    _, head = stage_layers(run, software)
    stages = layers_by_recompute(run, software)
    working = [max((working_bytes(a, software) for a, count in stage if count), default=0.0) for stage in stages]
    working[head] += max(0.0, logits_bytes(run, software) - kept_logits(run, software))
    gathered, unreduced = _whole_bytes(run, software)
    by_stage = stage_parameters(run, software)
    always = [
        state_bytes(run, sum(by_stage[stage] for stage in schedule.placement.stages_of(rank)), software).total_bytes
        + lent_bytes(run, software, schedule.placement.stages_of(rank)).total_bytes
        + (0.0 if software.has_reduction_lane else _largest(gathered, schedule.placement.stages_of(rank), 1))
        + software.reserve_bytes
        for rank in range(run.pp)
    ]
    return HeldBytes(
        always_bytes=tuple(always),
        kept=kept_with_loss(run, software),
        working_bytes=tuple(working),
        gathered_bytes=tuple(gathered) if software.has_reduction_lane else (),
        gradient_bytes=tuple(unreduced),
        message_bytes=0.0 if schedule.level is Level.COMPUTE or software.is_blocking else message_bytes(run, software),
    )
