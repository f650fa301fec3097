"""What makes a schedule legal: a list of named rules for each level.

Each rule yields its violations; the first rule that is broken is reported, since later rules assume the
earlier ones. ``RULES`` is the specification: read it from top to bottom.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pipeloom.errors import ScheduleError
from pipeloom.schedule.accept import accepts
from pipeloom.schedule.action import Action
from pipeloom.schedule.depend import (
    consumer_of,
    data_dependencies,
    lane_of,
    other_end,
)
from pipeloom.schedule.kinds import (
    COMPUTE_KINDS,
    LOAD_OF,
    MOVE_KINDS,
    OUT_OF,
    RECEIVE_KINDS,
    SEND_KINDS,
    STAGE_KINDS,
    TIED_RECEIVE_KINDS,
    TIED_SEND_KINDS,
    USES_WEIGHTS,
    Kind,
)
from pipeloom.schedule.verify_sharding import gathered_bound, gradient_bound, reduce_each_contribution_once
from pipeloom.schedule.verify_stage_swaps import on_device_when_used, resident_bound, update_each_stage_once
from pipeloom.schedule.verify_tied import tied_gradient_in_time, tied_messages_complete, tied_weights_in_time
from pipeloom.schedule.violation import Violation, Violations
from pipeloom.schedule.window import window
from pipeloom.terminal.words import count

if TYPE_CHECKING:
    from pipeloom.schedule.schedule import Schedule


def row_for_each_rank(schedule: "Schedule") -> Violations:
    """There is one row for each pipeline rank, and at least one micro-batch."""
    if len(schedule.rows) != schedule.num_ranks:
        yield Violation(
            f"expected {count(schedule.num_ranks, 'row')}, one for each pipeline rank, found {len(schedule.rows)}"
        )
    if schedule.max_stage_inputs is not None and len(schedule.max_stage_inputs) != schedule.num_ranks:
        found = len(schedule.max_stage_inputs)
        wanted = count(schedule.num_ranks, "limit")
        yield Violation(f"expected {wanted} of stage inputs, one for each rank, found {found}")
    if schedule.stage_sizes is not None and len(schedule.stage_sizes) != schedule.num_stages:
        found = len(schedule.stage_sizes)
        yield Violation(f"expected {count(schedule.num_stages, 'size')}, one for each stage, found {found}")
    for name, number in (("micro-batch", schedule.num_microbatches), ("token slice", schedule.num_slices)):
        if number < 1:
            yield Violation(f"expected at least one {name}, found {number}")
    if not 0 <= schedule.first_backward_stage <= schedule.num_stages:
        yield Violation(f"first_backward_stage {schedule.first_backward_stage} is not in 0..{schedule.num_stages}")


def partners_in_pairs(schedule: "Schedule") -> Violations:
    """Where partners are named, every rank has one that has it as its own, or itself, which means none."""
    partners, ranks = schedule.partners, range(schedule.num_ranks)
    if partners is None:
        return
    if len(partners) != schedule.num_ranks:
        yield Violation(f"expected {count(schedule.num_ranks, 'partner')}, one for each rank, found {len(partners)}")
        return
    for rank, partner in enumerate(partners):
        if partner not in ranks:
            yield Violation(f"the partner {partner} of rank {rank} is not in 0..{schedule.num_ranks - 1}", rank)
        elif partners[partner] != rank:
            yield Violation(f"rank {rank} has the partner {partner}, which has rank {partners[partner]}", rank)


def kinds_of_level(schedule: "Schedule") -> Violations:
    """A compute-level schedule has compute actions only."""
    if schedule.level == "compute":
        for rank, slot, action in schedule.actions():
            if action.kind not in COMPUTE_KINDS:
                yield Violation(f"{action} does not belong in a compute-only schedule", rank, slot)


def in_range(schedule: "Schedule") -> Violations:
    """Stages, micro-batches and slices exist."""
    for rank, slot, action in schedule.actions():
        if not 0 <= action.stage < schedule.num_stages:
            yield Violation(
                f"{action} names stage {action.stage}, but stages are 0..{schedule.num_stages - 1}", rank, slot
            )
        elif (action.microbatch is None) != (action.kind in STAGE_KINDS):
            yield Violation(
                f"{action} must {'not ' if action.kind in STAGE_KINDS else ''}name a micro-batch", rank, slot
            )
        elif action.microbatch is not None and not 0 <= action.microbatch < schedule.num_microbatches:
            last = schedule.num_microbatches - 1
            yield Violation(f"{action} names micro-batch {action.microbatch}, but they are 0..{last}", rank, slot)
        elif not 0 <= action.slice < (1 if action.kind in STAGE_KINDS else schedule.num_slices):
            last = schedule.num_slices - 1
            yield Violation(f"{action} names token slice {action.slice}, but they are 0..{last}", rank, slot)


def on_its_rank(schedule: "Schedule") -> Violations:
    """A rank acts on the stages that it holds."""
    for rank, slot, action in schedule.actions():
        owner = schedule.placement.rank_by_stage[action.stage]
        if owner != rank:
            yield Violation(f"{action} belongs to rank {owner}, which holds stage {action.stage}", rank, slot)


def unique(schedule: "Schedule") -> Violations:
    """Nothing is done twice. What concerns a whole stage may repeat; rules of its own say when."""
    seen: set[Action] = set()
    for rank, slot, action in schedule.actions():
        if action in seen:
            yield Violation(f"{action} appears a second time", rank, slot)
        if action.kind not in STAGE_KINDS:
            seen.add(action)


def complete(schedule: "Schedule") -> Violations:
    """Every micro-batch goes forward through every stage, and back through those that train."""
    present = {action for _, _, action in schedule.actions()}
    for stage in range(schedule.num_stages):
        rank = schedule.placement.rank_by_stage[stage]
        for microbatch in range(schedule.num_microbatches):
            for part in range(schedule.num_slices):
                for problem in _incomplete(stage, microbatch, part, present, stage >= schedule.first_backward_stage):
                    yield Violation(problem, rank, _slot_near(stage, microbatch, problem, schedule.rows[rank]))


def _slot_near(stage: int, microbatch: int, problem: str, row: Sequence[Action]) -> int | None:
    """Where in a row something about an action is wrong: its own slot, or that of the next of its kind and stage."""
    about = Action.parse(problem.split(maxsplit=1)[0])
    alike = [(slot, action) for slot, action in enumerate(row) if (action.kind, action.stage) == (about.kind, stage)]
    others = [(abs((action.microbatch or 0) - microbatch), slot) for slot, action in alike]
    return min(others)[1] if others else None


def _incomplete(stage: int, microbatch: int, part: int, present: set[Action], trains: bool) -> Iterator[str]:
    forward, full, for_input, for_weight = (
        Action(kind, stage, microbatch, part)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    found = [action for action in (full, for_input, for_weight) if action in present]
    again = forward._replace(kind=Kind.RECOMPUTE)
    if not trains and again in present:
        yield f"{again} is superfluous: stage {stage} runs no backward"
    if forward not in present:
        yield f"{forward} is missing"
    if not trains and found:
        yield f"{found[0]} is superfluous: stage {stage} runs no backward"
    if trains and found not in ([full], [for_input, for_weight]):
        if not found:
            yield f"{full} is missing"
        elif full in found:
            yield f"{full} and {found[1]} are both there: a backward is either whole or split"
        else:
            yield f"{for_weight if for_input in found else for_input} is missing"


def forward_before_backward(schedule: "Schedule") -> Violations:
    """On its rank, a micro-batch's forward stands before its backward, and I before W; what recomputes, in between."""
    order = {
        Kind.BACKWARD: Kind.FORWARD,
        Kind.BACKWARD_INPUT: Kind.FORWARD,
        Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
        Kind.RECOMPUTE: Kind.FORWARD,
    }
    seen: set[Action] = set()
    for rank, slot, action in schedule.actions():
        first = action._replace(kind=order[action.kind]) if action.kind in order else None
        if first is not None and first not in seen:
            yield Violation(f"{action} stands before {first}", rank, slot)
        if action.kind is Kind.RECOMPUTE and schedule.input_gradient(*_keyed(action)) in seen:
            yield Violation(f"{action} stands behind the backward that needs it", rank, slot)
        seen.add(action)


def messages_complete(schedule: "Schedule") -> Violations:
    """Each tensor that changes rank has one send and one receive; no other tensor has any."""
    expected: set[Action] = set()
    for _, _, action in schedule.actions():
        expected.update(messages_of(action, schedule))
    for rank, slot, action in schedule.actions():
        if action.kind in SEND_KINDS | RECEIVE_KINDS and action not in expected:
            yield Violation(f"{action} moves a tensor that does not change rank", rank, slot)
    present = {action for _, _, action in schedule.actions()}
    for action in sorted(expected - present, key=str):
        yield Violation(f"{action} is missing", schedule.placement.rank_by_stage[action.stage])


def messages_of(action: Action, schedule: "Schedule") -> tuple[Action, ...]:
    """The send and the receive of what a compute action makes for another rank; empty if there is none."""
    placement, stage = schedule.placement, action.stage
    if action.kind is Kind.FORWARD and placement.crosses(stage):
        send = action._replace(kind=Kind.SEND_F)
    elif (
        action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        and stage > schedule.first_backward_stage
        and placement.crosses(stage - 1)
    ):
        send = action._replace(kind=Kind.SEND_B)
    else:
        return ()
    return send, other_end(send, schedule.num_stages)


def send_after_compute(schedule: "Schedule") -> Violations:
    """A send stands after the compute action whose result it sends."""
    slot_of = _slots(schedule)
    for rank, slot, action in schedule.actions():
        if action.kind in SEND_KINDS:
            (made,) = data_dependencies(action, schedule)
            if slot_of[made] > slot:
                yield Violation(f"{action} stands before {made}, whose result it sends", rank, slot)


def receive_before_compute(schedule: "Schedule") -> Violations:
    """A receive stands before the compute action that uses it."""
    slot_of = _slots(schedule)
    for rank, slot, action in schedule.actions():
        if action.kind in RECEIVE_KINDS:
            user = consumer_of(action, schedule)
            if slot_of[user] < slot:
                yield Violation(f"{action} stands behind {user}, which uses it", rank, slot)


def sends_match_receives(schedule: "Schedule") -> Violations:
    """On each directed edge between two ranks, tensors are received in the order in which they are sent."""
    sends: dict[tuple[int, int], list[Action]] = {}
    for rank, _, action in schedule.actions():
        if action.kind in SEND_KINDS | TIED_SEND_KINDS:
            peer = lane_of(action, schedule.placement).peer
            assert peer is not None
            sends.setdefault((rank, peer), []).append(action)
    num_seen: Counter[tuple[int, int]] = Counter()
    for rank, slot, action in schedule.actions():
        if action.kind in RECEIVE_KINDS | TIED_RECEIVE_KINDS:
            peer = lane_of(action, schedule.placement).peer
            assert peer is not None
            sent = sends[peer, rank][num_seen[peer, rank]]
            num_seen[peer, rank] += 1
            if sent != other_end(action, schedule.num_stages):
                yield Violation(f"{action} takes what rank {peer} sends as {sent} at that point", rank, slot)


def evicts_to_another(schedule: "Schedule") -> Violations:
    """Where partners are named, a rank that evicts has another one."""
    if schedule.partners is None:
        return
    for rank, slot, action in schedule.actions():
        if action.kind is Kind.EVICT and schedule.partners[rank] == rank:
            yield Violation(f"{action} has nowhere to go: rank {rank} has no partner", rank, slot)


def swaps_in_turn(schedule: "Schedule") -> Violations:
    """What is evicted is loaded again: once, after its forward, and before the backward that needs it."""
    slot_of = _slots(schedule)
    for rank, slot, action in schedule.actions():
        if action.kind not in MOVE_KINDS:
            continue
        is_out = action.kind in LOAD_OF
        other = action._replace(kind=LOAD_OF[action.kind] if is_out else OUT_OF[action.kind])
        rival = action._replace(kind=Kind.OFFLOAD)
        if other not in slot_of:
            yield Violation(f"{action} stands alone: {other} is missing", rank, slot)
        elif action.stage < schedule.first_backward_stage:
            yield Violation(f"{action} keeps what no backward needs", rank, slot)
        elif action.kind is Kind.EVICT and rival in slot_of:
            yield Violation(f"{action} and {rival} are both there: it goes to the partner or to the host", rank, slot)
        elif is_out and not slot_of[action._replace(kind=Kind.FORWARD)] < slot < slot_of[other]:
            yield Violation(
                f"{action} does not stand between {action._replace(kind=Kind.FORWARD)} and {other}", rank, slot
            )
        elif not is_out:
            again = action._replace(kind=Kind.RECOMPUTE)
            user = again if again in slot_of else schedule.input_gradient(*_keyed(action))
            if slot_of[user] < slot:
                yield Violation(f"{action} stands behind {user}, which needs it", rank, slot)


def _keyed(action: Action) -> tuple[int, int, int]:
    assert action.microbatch is not None
    return action.stage, action.microbatch, action.slice


def unshard_before_compute(schedule: "Schedule") -> Violations:
    """If a stage is ever gathered, it is so whenever it computes on its weights; it is gathered and dropped in turn."""
    sharded_stages = {action.stage for _, _, action in schedule.actions() if action.kind is Kind.UNSHARD}
    gathered: set[int] = set()
    for rank, slot, action in schedule.actions():
        is_gathered = action.stage in gathered
        if action.kind is Kind.UNSHARD:
            if is_gathered:
                yield Violation(f"{action}: the stage is gathered already", rank, slot)
            gathered.add(action.stage)
        elif action.kind is Kind.RESHARD:
            if not is_gathered:
                yield Violation(f"{action}: the stage is not gathered", rank, slot)
            gathered.discard(action.stage)
        elif action.kind in USES_WEIGHTS and action.stage in sharded_stages and not is_gathered:
            yield Violation(f"{action} computes on stage {action.stage} while its weights are sharded", rank, slot)


def acyclic(schedule: "Schedule") -> Violations:
    """No actions wait for each other in a circle, over all ranks: the step cannot deadlock."""
    graph = schedule.graph
    present = {action for _, _, action in schedule.actions()} if graph.absent else set()
    for node in graph.absent:
        action = graph.action(node)
        for needed in data_dependencies(action, schedule):
            if needed not in present:
                yield Violation(f"{action} waits for {needed}, which no rank runs", *graph.place(node))
    cycle = graph.cycle()
    if cycle:
        steps = " -> ".join(f"{graph.action(node)} (rank {graph.place(node)[0]})" for node in [*cycle, cycle[0]])
        yield Violation(f"deadlock, each waits for the next: {steps}", *graph.place(cycle[0]))


def in_flight_bound(schedule: "Schedule") -> Violations:
    """No rank holds more stage inputs than the schedule promises."""
    for rank, limit in enumerate(schedule.max_stage_inputs or ()):
        peak = schedule.peak_stage_inputs[rank]
        if peak > limit:
            row = schedule.rows[rank]
            forwards = [slot for slot, action in enumerate(row) if action.kind is Kind.FORWARD]
            first = int((schedule.held_inputs(row) > limit).argmax())
            message = f"holds up to {peak} stage inputs, but max_stage_inputs promises {limit}; here it takes one more"
            yield Violation(message, rank, forwards[first])


Rule = Callable[["Schedule"], Violations]

COMPUTE_RULES: tuple[Rule, ...] = (
    row_for_each_rank,
    partners_in_pairs,
    kinds_of_level,
    in_range,
    on_its_rank,
    unique,
    complete,
    forward_before_backward,
    acyclic,
    in_flight_bound,
)
COMMUNICATION_RULES: tuple[Rule, ...] = (
    row_for_each_rank,
    partners_in_pairs,
    in_range,
    on_its_rank,
    unique,
    complete,
    forward_before_backward,
    messages_complete,
    tied_messages_complete,
    send_after_compute,
    receive_before_compute,
    sends_match_receives,
    swaps_in_turn,
    evicts_to_another,
    unshard_before_compute,
    gathered_bound,
    reduce_each_contribution_once,
    gradient_bound,
    on_device_when_used,
    resident_bound,
    update_each_stage_once,
    tied_weights_in_time,
    tied_gradient_in_time,
    acyclic,
    in_flight_bound,
)
RULES: dict[str, tuple[Rule, ...]] = {"compute": COMPUTE_RULES, "communication": COMMUNICATION_RULES}
"""The rules of each level, in the order in which they are checked."""


def rule_name(rule: Rule) -> str:
    """The name by which a refusal calls a rule: ``sends-match-receives``."""
    return rule.__name__.replace("_", "-")


def verify(schedule: "Schedule") -> None:
    """Check every rule of the schedule's level: all at once and fast, or one by one for a reason to refuse.

    Raises:
        ScheduleError: naming the first broken rule, the place, and how often the rule is broken.
    """
    if accepts(schedule):
        return
    for rule in RULES[schedule.level]:
        violations = list(rule(schedule))
        if violations:
            message, rank, slot = violations[0]
            more = f" (and {len(violations) - 1} more like it)" if len(violations) > 1 else ""
            view = window(schedule.rows, rank, slot) if rank is not None else ""
            raise ScheduleError(rule_name(rule), message + more, rank=rank, slot=slot, window=view)
    raise AssertionError(f"the fast check refuses what no rule refuses: {schedule.rows}")


def _slots(schedule: "Schedule") -> dict[Action, int]:
    return {action: slot for _, slot, action in schedule.actions()}
