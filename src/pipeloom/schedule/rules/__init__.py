"""The rules of legal schedules: a list of named rules for each level.

The lists are the specification; read them from top to bottom. A rule takes rows in arrays (``Facts``) and returns the
first place where it is broken; each assumes that the rules before it hold.
"""

from pipeloom.errors import ScheduleError
from pipeloom.schedule.facts import Facts
from pipeloom.schedule.rules.compute import (
    # Behind the rules that make the graph whole: edges of actions that are missing cannot be followed.
    acyclic,
    complete,
    forward_before_backward,
    in_flight_bound,
    in_range,
    kinds_of_level,
    on_its_rank,
    partners_in_pairs,
    row_for_each_rank,
    unique,
)
from pipeloom.schedule.rules.fault import Rule
from pipeloom.schedule.rules.messages import (
    evicts_to_another,
    messages_complete,
    receive_before_compute,
    send_after_compute,
    sends_match_receives,
    swaps_in_turn,
    tied_gradient_in_time,
    tied_messages_complete,
    tied_weights_in_time,
)
from pipeloom.schedule.rules.stages import (
    gathered_bound,
    gradient_bound,
    on_device_when_used,
    reduce_each_contribution_once,
    resident_bound,
    unshard_before_compute,
    update_each_stage_once,
)
from pipeloom.schedule.window import window

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
RULES = {"compute": COMPUTE_RULES, "communication": COMMUNICATION_RULES}
"""The rules of each level, in the order in which they are checked."""


def rule_name(rule: Rule) -> str:
    """The name by which a refusal calls a rule: ``sends-match-receives``."""
    return rule.__name__.replace("_", "-")


def verify(facts: Facts) -> None:
    """Check every rule of the level.

    Raises:
        ScheduleError: naming the first broken rule, the place, and how often the rule is broken.
    """
    for rule in RULES["communication" if facts.has_transfers else "compute"]:
        fault = rule(facts)
        if fault is not None:
            message, rank, slot, count = fault
            # One place is enough to act on; the number shows whether it is a slip or a mistake of the whole order.
            more = f" (and {count - 1} more like it)" if count > 1 else ""
            view = window(facts.rows, rank, slot) if rank is not None else ""
            raise ScheduleError(rule_name(rule), message + more, rank=rank, slot=slot, window=view)
