"""What ``pipeloom simulate --swap-plan`` prints: where to cut a model that visits its device."""

import json
from dataclasses import dataclass
from typing import Any

from pipeloom.config import RunConfig
from pipeloom.errors import UserError
from pipeloom.planner.stage_swaps import SwapPlan, plan_swaps, question_of
from pipeloom.predict.describe import describe
from pipeloom.predict.stage_swaps import swapped_amounts

_MOST_DOUBLINGS = 11


@dataclass(frozen=True)
class ReportedPlan:
    """A plan, and whether there had to be one.

    Attributes:
        plan: the best cut.
        budget: of the configuration.
        is_needed: whether the model does not fit the budget as it is.
    """

    plan: SwapPlan
    budget: int
    is_needed: bool


def make_swap_plan(config: RunConfig) -> ReportedPlan:
    """The best cut, and the fewest micro-batches, powers of two, with which the device computes most of the time.

    Raises:
        UserError: experts alone are swapped, which no cut divides.
    """
    if not config.swaps_stages:
        raise UserError("--swap-plan cuts a model for one device, and layout.ep swaps experts alone; leave it out")
    described, budget = describe(config), config.schedule.budget_bytes
    assert budget is not None, "a configuration with schedule.device_budget"
    question = question_of(described, budget, needs_norm=config.optimizer.known_update.needs_norm)
    plan = plan_swaps(question, [2**power for power in range(_MOST_DOUBLINGS)])
    whole = sum(one.total for one in swapped_amounts(described.run, described.software))
    return ReportedPlan(plan, budget, whole > budget)


def swap_plan_to_json(swap_plan: ReportedPlan) -> dict[str, Any]:
    """A key ``swap_plan``: its partition, micro-batches, seconds of a step, utilization, and whether it is needed."""
    plan = swap_plan.plan
    return {
        "swap_plan": {
            "partition": list(plan.partition),
            "num_microbatches": plan.num_microbatches,
            "device_budget": plan.schedule.max_resident,
            "step_s": plan.step_s,
            "utilization": plan.utilization,
            "hidden": plan.hidden,
            "is_needed": swap_plan.is_needed,
        }
    }


def print_swap_plan(swap_plan: ReportedPlan, refused: str = "", *, as_json: bool = False) -> None:
    """Print the plan.

    Args:
        swap_plan: the plan.
        refused: why the cut as it was given cannot be simulated, if it cannot.
        as_json: for programs.
    """
    if as_json:
        print(json.dumps(swap_plan_to_json(swap_plan) | {"refused": refused}))
        return
    plan = swap_plan.plan
    if refused:
        print(f"as it is given    {refused}")
    cut = ",".join(map(str, plan.partition))
    print(f"swap plan         layout.loops {len(plan.partition)}, layout.partition [{cut}],")
    room = plan.schedule.max_resident
    if room is not None and room < swap_plan.budget:
        print(f"                  schedule.device_budget {room}: with more the swaps hide less,")
    print(
        f"                  layout.num_microbatches {plan.num_microbatches}: the device computes {plan.utilization:.1%}"
    )
    print(f"                  of the step, {plan.hidden:.1%} of the swaps are hidden")
    if not swap_plan.is_needed:
        print("                  the whole model fits the budget: without one it trains faster")
