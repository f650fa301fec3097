"""Problems of a run in layouts that are not its own, for what chooses layout and schedule."""

from dataclasses import replace

from pipeloom.config.problems import find_problems
from pipeloom.config.run import RunConfig
from pipeloom.config.sections import ScheduleConfig
from pipeloom.workload.layout import ONE_RANK, TWO_PIPELINES, TWO_SHARING, Layout


def problems_in_any_layout(config: RunConfig, *, is_model_known: bool = True) -> list[str]:
    """Problems that a run has in a layout of one rank, and in others as well; one sentence each.

    Args:
        config: whose layout and schedule are not judged.
        is_model_known: whether the sizes of the model are final; otherwise they are not checked.
    """
    layouts = [ONE_RANK, TWO_PIPELINES, *([] if config.model.experts is None else [TWO_SHARING])]
    first, *others = [problems_in_layout(config, layout, is_model_known=is_model_known) for layout in layouts]
    return [problem for problem in first if all(problem in found for found in others)]


def problems_in_layout(
    config: RunConfig, layout: Layout, schedule: ScheduleConfig | None = None, *, is_model_known: bool
) -> list[str]:
    """Problems that a run has with a layout and a schedule, by default the default one, in place of its own."""
    changed = replace(config, layout=layout, schedule=schedule or ScheduleConfig())
    return find_problems(changed, trains=False, is_model_known=is_model_known)
