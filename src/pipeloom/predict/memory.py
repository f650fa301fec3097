"""Peak memory of each rank in a step, from the ledger of its schedule and closed forms of bytes."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeloom.analysis.matching import match_spans
from pipeloom.cost.kept import Kept
from pipeloom.cost.matrices import stage_shards, state_of_rank
from pipeloom.cost.memory import (
    Memory,
    State,
    first_trained,
    frozen_bytes,
    kept_logits,
    lent_bytes,
    logits_bytes,
    message_bytes,
    pending_logits,
    stage_kept_bytes,
    stage_pending_bytes,
    stage_recomputed_bytes,
    state_bytes,
    sum_of_parts,
    unreduced_bytes,
    working_bytes,
)
from pipeloom.cost.software import Software
from pipeloom.cost.stages import (
    gathered_parameters,
    layer_parameters,
    layers_by_kind,
    num_frozen_stages,
    shared_layers,
    stage_layers,
    stage_parameters,
    trained_parameters,
)
from pipeloom.schedule import Level, Placement, Schedule
from pipeloom.schedule.clock import nominal_s, times
from pipeloom.schedule.facts import Seconds
from pipeloom.schedule.kinds import MOVE_KINDS
from pipeloom.schedule.ledger import HeldBytes, KeptBytes, Ledger, most_gathered, most_in_rows
from pipeloom.schedule.peaks import Peaks
from pipeloom.schedule.stage_swaps import gradient_room, gradient_rooms
from pipeloom.trace import Trace
from pipeloom.workload.run import Run

Floats = NDArray[np.float64]


def memory_by_rank(
    run: Run, software: Software, schedule: Schedule, receive_buffers: int, trace: Trace | None = None
) -> tuple[Memory, ...]:
    """Memory of one device of each pipeline rank in a step, each part at its own peak.

    Args:
        run: model and layout.
        software: the training program.
        schedule: as it is simulated.
        receive_buffers: for each directed edge, if the schedule has communication.
        trace: of the schedule; determines when moved activations are on a rank. ``None`` for nominal times: a backward
            takes two forwards, a transfer one.
    """
    most_held = in_rows = partial(most_in_rows, schedule)
    if moves_anything(schedule):
        most_held = partial(_most_on, schedule, _clock(schedule, trace))
    masks = _most_masks(run, software, schedule.placement, in_rows)  # which never move
    received = receive_buffers if schedule.level is Level.COMMUNICATION else 0
    buffers = _buffers(run, software, schedule)
    parts = _parts(run, software, schedule.placement, most_held, buffers, receive_buffers=received, masks=masks)
    return tuple(map(Memory, *(part.tolist() for part in parts)))


class _Buffers(NamedTuple):
    """Maximal bytes of a rank for gathered weights and for unreduced gradients.

    Attributes:
        gathered_bytes: of the weights.
        gradients_bytes: of the gradients.
        has_all: whether these are all gradients of the rank, since stages are updated within the step; otherwise each
            stage has its own, or its shard, as well.
    """

    gathered_bytes: float
    gradients_bytes: float
    has_all: bool = False


def _buffers(run: Run, software: Software, schedule: Schedule) -> tuple[_Buffers, ...]:
    """The buffers of each rank in a schedule."""
    if not software.has_reduction_lane:
        return _buffers_for(run.of_state, software, schedule.placement, 1, schedule.gradient_buffers)
    most = most_gathered(schedule, _gathered_bytes(run, software))
    rooms = [one for row in schedule.rows if (one := gradient_rooms(row)) is not None]
    if len(rooms) == schedule.num_ranks:
        each = state_bytes(replace(run, shard="none"), 1.0, software).gradients_bytes
        sizes = [each * held for held in _trained_parameters(run, software)]
        held = (gradient_room(one, sizes) for one in rooms)
        return tuple(_Buffers(gathered, room, has_all=True) for gathered, room in zip(most, held, strict=True))
    gradients = _gradient_buffer_bytes(run, software, schedule.placement, schedule.gradient_buffers)
    return tuple(map(_Buffers, most, gradients))


@lru_cache(maxsize=1024)
def _buffers_for(
    run: Run, software: Software, placement: Placement, gathered: int, unreduced: int | None
) -> tuple[_Buffers, ...]:
    """The buffers of each rank for its ``gathered`` largest stages and for ``unreduced`` gradients."""
    # Without a reduction lane, layers are gathered one by one, which ``gathered_parameters`` counts for a stage.
    count, each = gathered if software.has_reduction_lane else 1, _gathered_bytes(run, software)
    if software.gathers_once(run.num_stages):
        count = run.num_stages
    largest = [0.0] * placement.num_ranks
    if any(each):
        largest = [
            sum(sorted((each[stage] for stage in stages), reverse=True)[:count]) for stages in _stages(placement)
        ]
    return tuple(map(_Buffers, largest, _gradient_buffer_bytes(run, software, placement, unreduced)))


def _stages(placement: Placement) -> list[Sequence[int]]:
    return [placement.stages_of(rank) for rank in range(placement.num_ranks)]


class Room(NamedTuple):
    """Numbers of buffers of a rank, for a schedule to which communication will be added.

    Attributes:
        receive_buffers: for each directed edge.
        gathered: stages gathered at once, with ``full`` sharding.
        unreduced: stages with unreduced gradients at once, if gradients are sharded; ``None`` for all.
    """

    receive_buffers: int
    gathered: int
    unreduced: int | None


def bytes_with_room(run: Run, software: Software, schedule: Schedule | Peaks, room: Room) -> Floats:
    """The bytes of ``memory_by_rank`` of a schedule without communication, which saves a search the time to add it.

    Args:
        run: model and layout.
        software: the training program.
        schedule: compute actions, or their peaks.
        room: buffers of each rank.
    """
    most_held = partial(most_in_rows, schedule)
    buffers = _buffers_for(run.of_state, software, schedule.placement, room.gathered, room.unreduced)
    masks = _most_masks(run, software, schedule.placement, most_held)
    parts = _parts(
        run, software, schedule.placement, most_held, buffers, receive_buffers=room.receive_buffers, masks=masks
    )
    return sum_of_parts(*parts)


def held_for_backwards(run: Run, software: Software, schedule: Schedule) -> list[float]:
    """For each rank the maximal bytes that its row holds for backwards, including the loss, before moves are added."""
    return most_in_rows(schedule, kept_with_loss(run, software))


def activation_room(run: Run, software: Software, schedule: Schedule, free_bytes: Sequence[float]) -> tuple[float, ...]:
    """For each rank the bytes for activations, without those that the allocator loses.

    Args:
        run: model and layout.
        software: the training program.
        schedule: compute actions.
        free_bytes: for each rank the bytes that a device has left beside this schedule.
    """
    held, loss = held_for_backwards(run, software, schedule), 1 + software.fragmentation
    return tuple(free / loss + own for free, own in zip(free_bytes, held, strict=True))


def kept_with_loss(run: Run, software: Software) -> KeptBytes:
    """Bytes that stages keep of a micro-batch for its backward, including those of the loss."""
    return _kept_with_loss(run.unsharded, software)


# A search tries many shardings and buffers of the same stages, which keep the same bytes.
@lru_cache(maxsize=1024)
def _kept_with_loss(run: Run, software: Software) -> KeptBytes:
    """``kept_with_loss`` of a run that is not sharded."""
    if run.slices and software.has_lanes:
        return _kept_by_slice(run, software)
    whole, pending = stage_kept_bytes(run, software), stage_pending_bytes(run, software)
    _, head = stage_layers(run, software)
    whole[head] += kept_logits(run, software)
    pending[head] += pending_logits(run, software)
    return KeptBytes(whole, pending, stage_recomputed_bytes(run, software), run.slice_shares)


def _kept_by_slice(run: Run, software: Software) -> KeptBytes:
    """``kept_with_loss`` for token slices: each counts as a sequence, and the cache has keys and values."""
    counts, _ = stage_layers(run, software)
    begins = accumulate(run.slices, initial=0)
    # Fix the layers of stages, which depend on the length of whole sequences.
    alone = [replace(run, layers_by_stage=counts, seq=length, slices=()) for length in run.slices]
    slices = [kept_with_loss(one, software) for one in alone]
    whole, pending, recomputed = (np.stack(columns, axis=1) for columns in list(zip(*slices, strict=True))[:3])
    place, begun = first_trained(run, software)
    for number, (one, begin) in enumerate(zip(alone, begins, strict=False)):
        for stage, layers in enumerate(layers_by_kind(one, software, trained=True)):
            for alike, count in layers:
                own = Kept(alike)
                # Keys and values that layers without full recomputation would keep are in the cache.
                whole[stage, number] -= count * own.key_values() * (alike.recompute != "full")
                whole[stage, number] += count * own.masks(begin) * (alike.recompute == "none")
        if begun is not None and not Kept(begun).has_core():  # the first layer keeps neither
            own = Kept(replace(begun, seq=one.seq, slices=()))
            whole[place, number] += own.key_values() * (begun.recompute != "full")
            whole[place, number] -= own.masks(begin) * (begun.recompute == "none")
    first = num_frozen_stages(run, software)
    caches = [count * Kept(run).key_values() * (stage >= first) for stage, count in enumerate(counts)]
    return KeptBytes(whole.tolist(), pending.tolist(), recomputed.tolist(), run.slice_shares, caches)


def kept_by_stage(run: Run, software: Software) -> list[float]:
    """For each stage the bytes that it keeps of a micro-batch for its backward, including those of the loss."""
    return kept_with_loss(run, software).by_stage(run.num_stages)


def _parts(
    run: Run,
    software: Software,
    placement: Placement,
    most_held: Callable[[KeptBytes], Sequence[float]],
    buffers: tuple[_Buffers, ...],
    *,
    receive_buffers: int,
    masks: Sequence[float],
) -> tuple[Floats, ...]:
    """The parts of ``Memory``, each an array over ranks: a search takes thousands of them.

    Args:
        run: model and layout.
        software: the training program.
        placement: stage -> pipeline rank.
        most_held: function from the bytes that stages keep to the maximum that each rank holds.
        buffers: of each rank.
        receive_buffers: for each directed edge.
        masks: bytes of each rank's masks of documents.
    """
    _, head = stage_layers(run, software)
    most = max(run.slice_shares)
    # One slice computes at a time; the largest counts. What the loss keeps is part of ``kept``.
    kept = np.asarray(most_held(kept_with_loss(run, software)))
    activations = kept + masks + working_bytes(run, software) * most
    logits = np.zeros(placement.num_ranks)
    logits[placement.rank_by_stage[head]] = (logits_bytes(run, software) - kept_logits(run, software)) * most
    received = num_peers(placement).astype(np.float64) * receive_buffers * (message_bytes(run, software) * most)
    reserve: Floats = np.full(placement.num_ranks, software.reserve_bytes)
    lost: Floats = software.fragmentation * (activations + logits)
    state = _besides_activations(run.of_state, software, placement, buffers)
    return *state, activations, logits, received, reserve, lost


@lru_cache(maxsize=1024)
def _besides_activations(
    run: Run, software: Software, placement: Placement, buffers: tuple[_Buffers, ...]
) -> tuple[Floats, Floats, Floats]:
    """For each rank its weights, its gradients and its optimizer state, with buffers and a tied matrix."""
    frozen, own, states = _frozen_bytes(run, software), _of_segments(run, software), dict[tuple[float, ...], State]()
    found = list[tuple[float, float, float]]()
    for rank, (stages, more) in enumerate(zip(_stages(placement), buffers, strict=True)):
        held = tuple(_held_parameters(one, software, by_stage, rank, stages) for one, by_stage in own)
        # Most ranks have equally many parameters.
        if (state := states.get(held)) is None:
            state = states[held] = _state_of(own, held, software)
        still = sum(frozen[stage] for stage in stages) if run.frozen_pieces else 0.0
        lent = lent_bytes(run, software, stages)
        found.append(
            (
                state.weights_bytes + still + lent.weights_bytes + more.gathered_bytes,
                state.gradients_bytes * (not more.has_all) + lent.gradients_bytes + more.gradients_bytes,
                state.optimizer_bytes + _whole_state(run, software, rank, stages),
            )
        )
    weights, gradients, optimizer = np.array(found).T
    return weights, gradients, optimizer


def _of_segments(run: Run, software: Software) -> list[tuple[Run, tuple[float, ...]]]:
    """Each segment of the state with its trained parameters by stage."""
    return [(one, _trained_parameters(one, software)) for one in run.segments]


def _state_of(segments: Sequence[tuple[Run, tuple[float, ...]]], held: Sequence[float], software: Software) -> State:
    """``state_bytes`` of all segments together, of which a device holds so many parameters each."""
    first, *others = (state_bytes(one, number, software) for (one, _), number in zip(segments, held, strict=True))
    return sum(others, first)


def _whole_state(run: Run, software: Software, rank: int, stages: Sequence[int]) -> float:
    """``state_of_rank`` of all segments together."""
    return sum(state_of_rank(one, software, rank, tuple(stages)) for one in run.segments)


def _masks(run: Run, software: Software, placement: Placement) -> KeptBytes:
    """Masks of documents, counted at the first stage of each rank: it has each micro-batch longest."""
    lengths, kinds = run.slices or (run.seq,), layers_by_kind(run, software)
    places = list(zip(lengths, accumulate(lengths, initial=0), strict=False))
    none = [[0.0] * len(lengths)] * run.num_stages
    whole = list(none)
    for stages in _stages(placement):
        own = {alike for stage in stages for alike, count in kinds[stage] if count}
        # All layers share the mask, but those with windows or soft caps need none.
        each = [
            [Kept(replace(one, seq=length, slices=())).shared_mask(begin) for one in own] for length, begin in places
        ]
        whole[min(stages)] = [float(max(of_slice, default=0)) for of_slice in each]
    return KeptBytes(whole, none, none, run.slice_shares)


def _most_masks(
    run: Run, software: Software, placement: Placement, most_held: Callable[[KeptBytes], Sequence[float]]
) -> Sequence[float]:
    return most_held(_masks(run, software, placement)) if run.by_document else [0.0] * placement.num_ranks


def moves_anything(schedule: Schedule) -> bool:
    """Whether a schedule moves activations to a partner or the host."""
    return bool(schedule.facts.row.is_kind(*MOVE_KINDS).any())


def _clock(schedule: Schedule, trace: Trace | None) -> tuple[Seconds, Seconds]:
    if trace is None:
        return times(schedule, nominal_s)
    matched = match_spans(schedule, trace)
    return matched.start_s, matched.end_s


def _most_on(schedule: Schedule, clock: tuple[Seconds, Seconds], kept: KeptBytes) -> list[float]:
    """``most_in_rows`` at given times: without activations that a rank has moved away, with those of its partner."""
    held = Ledger.of_kept(schedule, kept).on(schedule.num_ranks, *clock)
    return [held.peak(rank) for rank in range(schedule.num_ranks)]


@lru_cache(maxsize=1024)
def num_peers(placement: Placement) -> NDArray[np.int64]:
    """For each rank the number of other ranks from which it receives."""
    near = {pair for pair in pairwise(placement.rank_by_stage) if pair[0] != pair[1]}
    peers = Counter(rank for rank, _ in near | {(other, rank) for rank, other in near})
    return np.array([peers[rank] for rank in range(placement.num_ranks)])


def _trained_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """Number of trained parameters of each stage on one device, padded to a multiple of the number of shards."""
    shards = stage_shards(run, software)
    if shards is not None:
        return tuple(float(one.size * len(one.state)) for one in shards)
    return _padded(run, software, trained_parameters(run, software))


def _held_parameters(
    run: Run, software: Software, by_stage: Sequence[float], rank: int, stages: Sequence[int]
) -> float:
    """Number of trained parameters of a rank: of its stages, and of sets of weights that layers share over stages."""
    held = sum(by_stage[stage] for stage in stages)
    return held if run.shape.sharing is None else held + shared_layers(run, software)[rank] * layer_parameters(run)


def _frozen_parameters(run: Run, software: Software) -> tuple[float, ...]:
    """``_trained_parameters`` of those that are not trained; without ``full`` sharding they are not padded."""
    whole, trained = stage_parameters(run, software), trained_parameters(run, software)
    frozen = [held - own for held, own in zip(whole, trained, strict=True)]
    return _padded(run, software, frozen) if run.shard == "full" else tuple(frozen)


def _padded(run: Run, software: Software, parameters: Sequence[float]) -> tuple[float, ...]:
    among = run.shard_size if _is_sharded(run) and software.has_lanes else 1
    return tuple(parameters) if among == 1 else tuple(-(-held // among) * among for held in parameters)


def _frozen_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes of its frozen weights, without gathered ones."""
    if not run.frozen_pieces:
        return [0.0] * run.num_stages
    if len(run.segments) > 1:
        return _summed(_frozen_bytes(one, software) for one in run.segments)
    return [frozen_bytes(run, held) for held in _frozen_parameters(run, software)]


def _is_sharded(run: Run) -> bool:
    return run.sharded != "none"


def _gathered_bytes(run: Run, software: Software) -> list[float]:
    """For each stage the bytes of its gathered weights with ``full`` sharding, else 0."""
    if len(run.segments) > 1:
        return _summed(_gathered_bytes(one, software) for one in run.segments)
    if not _is_sharded(run) or run.shard != "full":
        return [0.0] * run.num_stages
    each = state_bytes(replace(run, shard="none"), 1.0, software).weights_bytes
    if not software.has_lanes:
        return [each * parameters for parameters in gathered_parameters(run, software)]
    trained, frozen = _trained_parameters(run, software), _frozen_parameters(run, software)
    if run.shard_size == 1:
        return [each * held for held in trained]  # the only rank that holds frozen weights has them whole
    return [each * (held + still) for held, still in zip(trained, frozen, strict=True)]


def _gradient_buffer_bytes(run: Run, software: Software, placement: Placement, buffers: int | None) -> list[float]:
    """For each rank the bytes of its unreduced gradients, without their shards.

    Args:
        run: model and layout.
        software: the training program.
        placement: stage -> pipeline rank.
        buffers: number of buffers, each for the largest stage; ``None``: each stage has its own, which includes its
            shard.
    """
    if len(run.segments) > 1:
        return _summed(_gradient_buffer_bytes(one, software, placement, buffers) for one in run.segments)
    # With level ``optimizer``, ``state_bytes`` includes whole gradients.
    has_buffers = software.has_reduction_lane or software.gathers_once(run.num_stages)
    if not (_is_sharded(run) and has_buffers) or run.shard == "optimizer":
        return [0.0] * placement.num_ranks
    each = unreduced_bytes(run, software)
    held = _trained_parameters(run, software)
    of_rank = [[held[stage] for stage in stages] for stages in _stages(placement)]
    if buffers is None:
        return [each * (sum(own) * (1 - 1 / run.shard_size)) for own in of_rank]
    return [each * (min(buffers, len(own)) * max(own)) for own in of_rank]


def _summed(lists: Iterable[Sequence[float]]) -> list[float]:
    """The sums of the first elements, of the second ones, and so on."""
    return [sum(each) for each in zip(*lists, strict=True)]


def _total_bytes(state: State, more: _Buffers) -> float:
    """Of a rank's weights, gradients and optimizer state, without the gradients that are part of its buffers."""
    return state.total_bytes - state.gradients_bytes * more.has_all


def held_bytes(run: Run, software: Software, schedule: Schedule) -> HeldBytes:
    """Sizes of everything that the ranks of a schedule hold, without fragmentation."""
    _, head = stage_layers(run, software)
    stages, frozen = layers_by_kind(run, software), _frozen_bytes(run, software)
    working = [max((working_bytes(a, software) for a, count in stage if count), default=0.0) for stage in stages]
    working[head] += max(0.0, logits_bytes(run, software) - kept_logits(run, software))
    own = _of_segments(run, software)
    always = [
        _total_bytes(
            _state_of(own, [_held_parameters(one, software, each, rank, stages) for one, each in own], software), more
        )
        + _whole_state(run, software, rank, stages)
        + sum(frozen[stage] for stage in stages)
        + lent_bytes(run, software, stages).total_bytes
        + more.gradients_bytes
        + (0.0 if software.has_reduction_lane else more.gathered_bytes)
        + software.reserve_bytes
        + masks
        for rank, stages, more, masks in zip(
            range(schedule.num_ranks),
            _stages(schedule.placement),
            _buffers(run, software, schedule),
            _most_masks(run, software, schedule.placement, partial(most_in_rows, schedule)),
            strict=True,
        )
    ]
    return HeldBytes(
        always_bytes=tuple(always),
        kept=kept_with_loss(run, software),
        working_bytes=tuple(working),
        gathered_bytes=tuple(_gathered_bytes(run, software)) if software.has_reduction_lane else (),
        message_bytes=0.0 if schedule.level is Level.COMPUTE or software.is_blocking else message_bytes(run, software),
    )
