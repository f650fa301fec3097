"""Breadth-first pipeline parallelism: plan a layout, verify its schedule, simulate the step, train with it.

Every name here is loaded when it is first used, so that ``import pipeloom`` takes no time and loads neither PyTorch nor
matplotlib. Other modules are internal, but for the registries that docs/extending.md names.

    import pipeloom

    schedule = pipeloom.make_schedule("breadth-first", pp=4, loops=4, num_microbatches=8)
    trace = pipeloom.simulate(schedule, pipeloom.Costs(forward_s=0.01, backward_s=0.02))
    pipeloom.plot(trace, "step.png")
    question = pipeloom.make_question("gpt-6.6b", "dgx-a100", num_devices=64, global_batch=256, seq=1024)
    print(pipeloom.plan(question).best)
    result = pipeloom.train(pipeloom.load_run("run.toml"))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeloom import passes
    from pipeloom.analysis.summary import summarize
    from pipeloom.catalog import load_cluster
    from pipeloom.config import RunConfig
    from pipeloom.cost.costs import Costs, StageCosts
    from pipeloom.errors import PipeloomError, RunError, ScheduleError, UserError
    from pipeloom.families import Request, Rows, backward, family, forward, make_schedule
    from pipeloom.passes import lower
    from pipeloom.planner.plan import make_question, plan
    from pipeloom.planner.question import Question
    from pipeloom.planner.run_step import predict_step
    from pipeloom.plotting.plot import plot
    from pipeloom.predict.describe import load_run
    from pipeloom.schedule import Action, Kind, Placement, Schedule, format_schedule, parse_schedule
    from pipeloom.simulation import simulate
    from pipeloom.trace import Trace
    from pipeloom.training.conversions.export import export_weights
    from pipeloom.training.equivalence import verify_gradients
    from pipeloom.training.run import train

_NAMES = {
    "analysis.summary": ("summarize",),
    "catalog": ("load_cluster",),
    "config": ("RunConfig",),
    "cost.costs": ("Costs", "StageCosts"),
    "errors": ("PipeloomError", "RunError", "ScheduleError", "UserError"),
    "families": ("Request", "Rows", "backward", "family", "forward", "make_schedule"),
    "passes": ("lower",),
    "planner.plan": ("make_question", "plan"),
    "planner.question": ("Question",),
    "planner.run_step": ("predict_step",),
    "plotting.plot": ("plot",),
    "predict.describe": ("load_run",),
    "schedule": ("Action", "Kind", "Placement", "Schedule", "format_schedule", "parse_schedule"),
    "simulation": ("simulate",),
    "trace": ("Trace",),
    "training.equivalence": ("verify_gradients",),
    "training.conversions.export": ("export_weights",),
    "training.run": ("train",),
}
"""Module -> the names that come from it; those that type checkers see above."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "PipeloomError",
    "Placement",
    "Question",
    "Request",
    "Rows",
    "RunConfig",
    "RunError",
    "Schedule",
    "ScheduleError",
    "StageCosts",
    "Trace",
    "UserError",
    "backward",
    "export_weights",
    "family",
    "format_schedule",
    "forward",
    "load_cluster",
    "load_run",
    "lower",
    "make_question",
    "make_schedule",
    "parse_schedule",
    "passes",
    "plan",
    "plot",
    "predict_step",
    "simulate",
    "summarize",
    "train",
    "verify_gradients",
]


def __getattr__(name: str) -> Any:
    """A public name, loaded at its first use."""
    if name == "passes":
        return import_module("pipeloom.passes")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'pipeloom' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"pipeloom.{_MODULE_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names, for completion."""
    return [*__all__]
