"""Bytes that each rank holds over time, from a schedule, a trace of it, and the bytes of each thing.

It does not matter whether the trace was simulated or measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeloom.analysis.matching import match_spans
from pipeloom.schedule import Row, Schedule
from pipeloom.schedule.held import KeptBytes, accepted_changes, input_changes, shares_of
from pipeloom.schedule.kinds import COMPUTE_KINDS, RECEIVE_KINDS, Kind
from pipeloom.schedule.sharding import unreduced_counts
from pipeloom.schedule.stage_swaps import Amounts, stage_stays
from pipeloom.trace import Trace
from pipeloom.trace.spans import Seconds, Spans

Bytes = NDArray[np.float64]
Changes = Iterator[tuple[str, Seconds, Bytes]]
"""Of what, when, and how many bytes more or fewer."""


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """How large the things are that a rank holds.

    Attributes:
        always_bytes: for each rank what it holds all the time: its weights, gradients, optimizer state, reserve.
        kept: what stages keep of micro-batches, from the start of a forward on; its shares of slices are also those in
            what a micro-batch is and needs.
        working_bytes: for each stage what a compute action needs while it runs, beside that; empty for nothing, as
            below.
        gathered_bytes: for each stage its weights from the start of a gather until they are dropped; 0 where they are
            among ``always_bytes``.
        gradient_bytes: for each stage its gradient from the start of the first backward that adds to it to the end of
            its reduction; 0 where it is among ``always_bytes``.
        stages: for each stage the bytes of what there is of it, which it takes on the device from the start of a swap
            in to the end of the swap out; empty where no stage is swapped, and their bytes are in ``always_bytes``.
        message_bytes: a received tensor, from the moment its receive is posted to the end of the action that uses it.
    """

    always_bytes: tuple[float, ...]
    kept: KeptBytes
    working_bytes: tuple[float, ...] = ()
    gathered_bytes: tuple[float, ...] = ()
    gradient_bytes: tuple[float, ...] = ()
    message_bytes: float = 0.0
    stages: tuple[Amounts, ...] = ()


PARTS = (
    "always",
    "stage inputs",
    "accepted",
    "working",
    "gathered weights",
    "gradients",
    "receive buffers",
    "resident stages",
)
"""What the bytes of a curve are made of; accepted is what a partner evicted to this rank."""


@dataclass(frozen=True)
class MemoryCurve:
    """What one rank holds over time.

    Attributes:
        points: (seconds from the start of the step, bytes held from then on), ascending, from 0 on; each holds other
            bytes than the one before.
        peak_bytes: the most.
        peak_s: when it is first held.
        peak_parts: what it is then made of, by ``PARTS``.
    """

    points: tuple[tuple[float, float], ...]
    peak_bytes: float
    peak_s: float
    peak_parts: dict[str, float]


def memory_over_time(schedule: Schedule, trace: Trace, held: HeldBytes) -> tuple[MemoryCurve, ...]:
    """For each rank its bytes over time.

    Args:
        schedule: what was run or simulated, at the level at which it was.
        trace: of one step of it.
        held: how large things are.
    """
    matched = match_spans(schedule, trace)
    bounds = schedule.facts.columns.first.tolist()
    curves: list[MemoryCurve] = []
    arguments = (schedule, matched.start_s, matched.end_s, held.kept)
    inputs, accepted = input_changes(*arguments), accepted_changes(*arguments)
    for rank, always in enumerate(held.always_bytes):
        own = matched.take(slice(bounds[rank], bounds[rank + 1]))
        changes = [
            ("stage inputs", *inputs.of(rank)),
            ("accepted", *accepted.of(rank)),
            *_work(schedule, own, held),
            *_whole_stages(schedule, own, held, trace.end_s),
            *_resident(own, held),
            *_messages(schedule, rank, matched, held, trace.start_s),
        ]
        curves.append(_curve(always, changes, trace.start_s))
    return tuple(curves)


def inputs_over_time(schedule: Schedule, trace: Trace) -> tuple[MemoryCurve, ...]:
    """The same for what ranks keep for backwards alone, 1 for each stage's micro-batch, which its slices share.

    What a partner evicted to a rank counts there; what is recomputed counts from when it is.
    """
    return memory_over_time(schedule, trace, HeldBytes(always_bytes=(0.0,) * schedule.num_ranks, kept=KeptBytes()))


def _curve(always: float, changes: list[tuple[str, Seconds, Bytes]], origin_s: float) -> MemoryCurve:
    part = np.repeat([PARTS.index(name) for name, _, _ in changes], [len(times) for _, times, _ in changes])
    times = np.concatenate([np.empty(0), *(times for _, times, _ in changes)]) - origin_s
    more = np.concatenate([np.empty(0), *(more for _, _, more in changes)])
    order = np.lexsort((more, times))  # at one time, what goes comes before what is added
    part, times, more = part[order], times[order], more[order]
    total = always + np.cumsum(more)
    peak = int(total.argmax()) if len(total) and total.max() > always else -1
    parts = np.bincount(part[: peak + 1].astype(np.intp), more[: peak + 1], len(PARTS))
    parts[PARTS.index("always")] += always
    # Of several changes at one time the last sum is what is held from then on.
    is_last = np.append(times[1:] != times[:-1], True)[: len(times)]
    points = list(zip(times[is_last].tolist(), total[is_last].tolist(), strict=True))
    if not points or points[0][0] > 0:
        points.insert(0, (0.0, always))
    differing = [point for number, point in enumerate(points) if number == 0 or point[1] != points[number - 1][1]]
    peak_bytes, peak_s = (float(total[peak]), float(times[peak])) if peak >= 0 else (always, 0.0)
    return MemoryCurve(tuple(differing), peak_bytes, peak_s, dict(zip(PARTS, parts.tolist(), strict=True)))


def _work(schedule: Schedule, own: Spans, held: HeldBytes) -> Changes:
    """What compute needs while it runs."""
    share, computes = shares_of(schedule, held.kept.shares)[own.row.slice], own.row.is_kind(*COMPUTE_KINDS)
    working = _by_stage(schedule, held.working_bytes)[own.row.stage] * share
    yield "working", own.start_s[computes], working[computes]
    yield "working", own.end_s[computes], -working[computes]


def _by_stage(schedule: Schedule, sizes: Sequence[float]) -> Bytes:
    """Bytes of each stage; nothing where none are told."""
    return np.asarray(sizes or [0.0] * schedule.num_stages)


def _whole_stages(schedule: Schedule, own: Spans, held: HeldBytes, end_s: float) -> Changes:
    """Gathered weights and unreduced gradients, each of a whole stage."""
    begins = np.zeros(len(own), np.bool_)
    begins[[slot for slot, _ in unreduced_counts(own.row)]] = True
    gathered, gradients = (_by_stage(schedule, sizes) for sizes in (held.gathered_bytes, held.gradient_bytes))
    is_gather, is_drop = own.row.is_kind(Kind.UNSHARD), own.row.is_kind(Kind.RESHARD)
    yield from _until("gathered weights", own, is_gather, is_drop, gathered, end_s=end_s)
    yield from _until("gradients", own, begins, own.row.is_kind(Kind.REDUCE_GRAD), gradients, end_s=end_s)


def _resident(own: Spans, held: HeldBytes) -> Changes:
    """Stages on the device, from the start of their swap in to the end of their swap out."""
    stays = stage_stays(own.row) if held.stages else []
    sizes = np.array([held.stages[stay.stage].of(stay.held) for stay in stays], np.float64)
    yield "resident stages", own.start_s[np.array([stay.first for stay in stays], np.intp)], sizes
    yield "resident stages", own.end_s[np.array([stay.last for stay in stays], np.intp)], -sizes


def _until(
    what: str, own: Spans, begins: NDArray[np.bool_], ends: NDArray[np.bool_], by_stage: Bytes, *, end_s: float
) -> Changes:
    """From the start of some actions to the end of others on the same stages; what is left, to the end of the step."""
    taken, given = own.row.stage[begins], own.row.stage[ends]
    yield what, own.start_s[begins], by_stage[taken]
    yield what, own.end_s[ends], -by_stage[given]
    left = np.bincount(taken, minlength=len(by_stage)) - np.bincount(given, minlength=len(by_stage))
    yield what, np.full(len(by_stage), end_s), -by_stage * left


def _messages(schedule: Schedule, rank: int, matched: Spans, held: HeldBytes, start_s: float) -> Changes:
    """Received tensors, from the posting of the receive, at its place in the row, to the end of what uses them."""
    facts = schedule.facts
    nodes = np.arange(facts.columns.first[rank], facts.columns.first[rank + 1])
    own: Row = matched.row.take(nodes)
    computes, receives = own.is_kind(*COMPUTE_KINDS), own.is_kind(*RECEIVE_KINDS)
    before = np.concatenate([[-1], np.maximum.accumulate(np.where(computes, nodes, -1))])[:-1][receives]
    # A receive is posted when the compute action before it has ended; its buffer is taken from then on.
    posted_s = np.where(before >= 0, matched.end_s[before], start_s)
    _, stage, microbatch, part = (array[receives] for array in own.arrays)
    uses_gradient = facts.node_of[Kind.BACKWARD.code], facts.node_of[Kind.BACKWARD_INPUT.code]
    place = (stage, microbatch, part)
    user = np.where(
        own.is_kind(Kind.RECV_F)[receives],
        facts.node_of[Kind.FORWARD.code][place],
        np.maximum(*(nodes_of[place] for nodes_of in uses_gradient)),
    )
    size = held.message_bytes * shares_of(schedule, held.kept.shares)[part]
    yield "receive buffers", posted_s, size
    yield "receive buffers", matched.end_s[user], -size
