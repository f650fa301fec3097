"""``pipeloom plan --json``: a plan in SI units."""

from dataclasses import asdict
from math import inf
from typing import Any

from pipeloom.cli.goals import least_costs
from pipeloom.planner.comparison import causes
from pipeloom.planner.goals import Goal, Training
from pipeloom.planner.plan import Plan
from pipeloom.predict.step import SimulatedStep
from pipeloom.workload.axes import IN_SENTENCES
from pipeloom.workload.dtypes import dtype_of


def to_json(plan: Plan, training: Training | None = None, goal: Goal | None = None) -> dict[str, Any]:
    """Output of ``--json``; docs/plan.md lists the keys.

    Args:
        plan: the answer.
        training: its tokens.
        goal: of the training.
    """
    question, counts = plan.question, plan.counts
    near = plan.closest
    return {
        "question": {
            "model": asdict(question.shape),
            "cluster": question.cluster.name,
            "software": question.software.name,
            "launcher": question.launcher.name,
            "num_devices": question.num_devices,
            "global_batch": question.global_batch,
            "seq": question.seq,
            "dtype": dtype_of(question.precision),
            "has_default_dtype": question.has_default_dtype,
            "headroom": question.headroom,
            "limits": asdict(question.limits),
        },
        "counts": {**asdict(counts), "excluded": dict(counts.excluded)},
        "is_proved": plan.open_bound_s is None,
        "open_bound_s": plan.open_bound_s,
        "stopped": plan.stopped,
        "layouts": [
            {**step_to_json(step), "is_equivalent": row < plan.num_equivalent} for row, step in enumerate(plan.rows)
        ],
        "rivals": [
            {"kind": one.kind, "layout": _or_null(one.step), "more_s": one.more_s, "least_s": one.least_s}
            for one in plan.rivals
        ],
        "changes": [{"what": one.what, "speed": one.speed, "layout": _or_null(one.step)} for one in plan.changes],
        "training": None if training is None else _training_to_json(plan, training),
        "goal": None if goal is None or training is None else _goal_to_json(plan, training, goal),
        "error_bar": plan.error_bar.to_json(),
        "advice": plan.advice,
        "closest": near
        and {
            **{name: getattr(near, name) for name in ("least_bytes", "missing_bytes", "sequence_bytes")},
            "ways_out": [{"what": what, "layout": step_to_json(step)} for what, step in near.ways_out],
        },
    }


def _training_to_json(plan: Plan, training: Training) -> dict[str, float | None]:
    """How long a training takes with the first row, and its price."""
    cost = None if plan.best is None else training.cost(plan.rows[0])
    return {
        "tokens": training.tokens,
        "days": None if cost is None else cost.days,
        "dollars": None if cost is None else cost.dollars,
    }


def limits_to_json(goal: Goal) -> dict[str, Any]:
    """A goal; a limit that is not set is null."""
    limits = {"deadline_s": goal.deadline_s, "max_dollars": goal.max_dollars}
    return {**{name: None if value == inf else value for name, value in limits.items()}, "objective": goal.objective}


def _goal_to_json(plan: Plan, training: Training, goal: Goal) -> dict[str, Any]:
    cost = None if plan.best is None else training.cost(plan.rows[0])
    is_met = cost is not None and goal.is_met(cost)
    better = goal.better(cost if is_met else None, least_costs(plan, training))
    return {**limits_to_json(goal), "is_met": is_met, "is_proved": not better}


def _or_null(step: SimulatedStep | None) -> dict[str, Any] | None:
    return None if step is None else step_to_json(step)


_OF_RUN = (
    *IN_SENTENCES, "ep", "ep_overlap", "loops", "replicate", "shard", "micro_batch", "num_microbatches",
    "sequence_parallel", "recompute", "recompute_layers", "placement", "pipeline_order", "boundary",
)  # fmt: skip
_OF_KNOBS = ("residency", "prefetch", "gradient_buffers", "receive_buffers")
_OF_STEP = ("tokens_per_s", "mfu", "hfu", "bubble_fraction", "dollars_per_billion_tokens")


def step_to_json(step: SimulatedStep) -> dict[str, Any]:
    """One layout with its predictions."""
    run, knobs, choice, prediction = step.run, step.knobs, step.knobs.choice, step.prediction
    return {
        **{name: getattr(run, name) for name in _OF_RUN},
        # Also where the program divides them: a run has none then.
        "layers_by_stage": step.placed.layers,
        "token_slices": run.slices or None,
        "nodes": [[kind.name, number] for kind, number in step.cluster.kinds(run.num_devices)],
        **{name: getattr(choice, name) for name in ("family", "group_size", "keep")},
        **{name: getattr(knobs, name) for name in _OF_KNOBS},
        **{name: getattr(knobs.moves, name) for name in ("balance", "offload")},
        "activation_bytes": knobs.moves.budget_bytes,
        "device_budget": knobs.device_budget,
        **{name: getattr(step, name) for name in _OF_STEP},
        "step_time_s": prediction.step_time_s,
        "memory_bytes": prediction.memory.total_bytes,
        "causes_s": causes(step),
    }
